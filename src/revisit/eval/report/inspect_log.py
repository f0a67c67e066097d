"""Logs in the format of inspect_ai, which `inspect view` opens with images, scores and decoding counters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError, need
from revisit.eval.log import Answer, Log
from revisit.eval.report.sample_browser import images_of, items_of, truth_of
from revisit.explain.document import data_uri
from revisit.explain.files import make_folder
from revisit.models.images import open_image

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample

    from revisit.eval.benchmarks.base import Item


def export(logs: Sequence[Log], out: Path) -> tuple[list[Path], list[str]]:
    """Write every log that has answers for inspect_ai.

    Args:
        logs: What to write.
        out: The folder for the files; existing ones of the same logs are replaced.

    Returns:
        The files, and notes about what they lack, such as images whose data folder is gone.
    """
    need("inspect_ai")
    from inspect_ai.log import write_eval_log

    written, notes = [], list[str]()
    for log in logs:
        answers = log.current()
        if answers:
            items = items_of(log, notes)
            path = make_folder(out) / f"{log.path.stem}.eval"
            samples = [_sample(log, answer, items.get(answer.id)) for answer in answers]
            write_eval_log(_converted(log, samples), str(path), format="eval")
            written.append(path)
    if not written:
        raise RevisitError("There are no answers yet; finish `revisit eval` with this --out.")
    return written, list(dict.fromkeys(notes))


def _converted(log: Log, samples: list[EvalSample]) -> Any:
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
        EvalStats,
    )

    own, request = log.spec, log.request
    ended = datetime.fromisoformat(request.written)
    spec = EvalSpec(
        run_id=own.key[:22],
        eval_id=own.key[:22],
        task_id=own.key[:22],
        created=request.written,
        task=own.benchmark,
        task_args=dict(own.options),
        dataset=EvalDataset(name=own.benchmark, samples=request.items),
        model=f"revisit/{own.model}:{own.method}",  # the viewer's list has no column for the method
        model_args={"method": own.method, "settings": own.settings},
        config=EvalConfig(limit=request.limit),
        packages={"revisit-decoding": str(own.libraries["revisit"])},
        metadata={"decoding": own.decoding, "seed": own.seed, "command": request.environment["argv"]},
    )
    values = {name: log.scores.value(name)[0] for name in log.scores.metrics} if log.scores else {}
    metrics = {name: EvalMetric(name=name, value=value) for name, value in values.items() if value == value}
    score = EvalScore(name=own.benchmark_name, scorer=own.benchmark_name, metrics=metrics)
    begun = ended - timedelta(seconds=log.totals()["seconds"])
    return EvalLog(
        status="success" if log.scores else "cancelled",
        eval=spec,
        results=EvalResults(total_samples=request.items, completed_samples=log.answered, scores=[score]),
        stats=EvalStats(started_at=begun.isoformat(), completed_at=ended.isoformat()),
        samples=samples,
    )


def _sample(log: Log, answer: Answer, item: Item | None) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ContentImage, ContentText, ModelOutput
    from inspect_ai.scorer import Score

    images = [ContentImage(image=data_uri(open_image(path))) for path in images_of(log, answer) if path.is_file()]
    question = ChatMessageUser(content=[*images, ContentText(text=answer.prompt)])
    shown = {}
    if log.scores is not None:
        for name, units in log.scores.per_item.items():
            numerator, denominator = units.get(answer.id, (0.0, 0.0))
            metric = log.scores.shown.get(name.rpartition("/")[2])
            if denominator:
                shown[name] = round(numerator / denominator * (metric.show if metric else 1), 2)
    return EvalSample(
        id=answer.id,
        epoch=1,
        input=[question],
        target=truth_of(item) if item else "",
        messages=[question, ChatMessageAssistant(content=answer.text)],
        output=ModelOutput.from_content(model=log.spec.model, content=answer.text),
        scores={log.spec.benchmark_name: Score(value=shown, answer=answer.text)} if shown else None,
        metadata={"decoding": answer.counters, "tokens": len(answer.tokens), "finish": answer.finish},
    )
