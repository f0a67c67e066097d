"""A run of `revisit eval` as inspect_ai logs, one per cell, which `inspect view` opens with pictures, scores and decoding facts."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError, need
from revisit.evaluation.store import make_folder, read_results
from revisit.models.images import open_image
from revisit.pages.document import data_uri
from revisit.report.sample_browser import begun_cells, truth_of

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample

    from revisit.benchmarks.base import Item
    from revisit.evaluation.records import Answer, ScoresRecord, Stored


def export(run: Path, out: Path) -> tuple[list[Path], list[str]]:
    """Write one log per cell that has answers.

    Args:
        run: The folder of `revisit eval`.
        out: The folder for the logs; existing logs of the same cells are replaced.

    Returns:
        The logs, and notes about what they lack, such as pictures whose data folder is gone.
    """
    need("inspect_ai")
    from inspect_ai.log import write_eval_log

    results, notes = read_results(run), list[str]()
    written = []
    for cell, lines, scores, items in begun_cells(run, results, notes):
        samples = [_sample(line, items.get(line.id), scores, cell) for line in lines]
        if samples:
            path = make_folder(out) / f"{Path(cell['path']).name}.eval"
            write_eval_log(_log(results, cell, samples), str(path), format="eval")
            written.append(path)
    if not written:
        raise RevisitError(f"{run} contains no answers yet; finish `revisit eval` with this --out.")
    return written, notes


def _log(results: Stored, cell: Stored, samples: list[EvalSample]) -> Any:
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

    complete = cell["status"] == "complete"
    ended = datetime.fromisoformat(results["written"])
    spec = EvalSpec(
        run_id=cell["key"][:22],
        eval_id=cell["key"][:22],
        task_id=cell["key"][:22],
        created=results["written"],
        task=cell["benchmark"]["label"],
        task_args={**cell["benchmark"]["options"]},
        dataset=EvalDataset(name=cell["benchmark"]["label"], samples=cell["items"]),
        model=f"revisit/{cell['model']['name']}:{cell['method']['label']}",  # the viewer's list has no column for the method
        model_args={"method": cell["method"]["label"], "settings": cell["method"]["settings"]},
        config=EvalConfig(limit=cell["provenance"]["limit"]),
        packages={"revisit-decoding": str(results["environment"].get("revisit", ""))},
        metadata={"decoding": cell["decoding"], "seed": cell["seed"], "command": cell["provenance"]["argv"]},
    )
    metrics = {
        name: EvalMetric(name=name, value=about["value"] * about["show"])
        for name, about in cell["metrics"].items()
        if about["value"] is not None
    }
    score = EvalScore(name=cell["benchmark"]["name"], scorer=cell["benchmark"]["name"], metrics=metrics)
    return EvalLog(
        status="success" if complete else "cancelled",
        eval=spec,
        results=EvalResults(total_samples=cell["items"], completed_samples=cell["answers"], scores=[score]),
        stats=EvalStats(
            started_at=(ended - timedelta(seconds=cell["seconds"])).isoformat(), completed_at=ended.isoformat()
        ),
        samples=samples,
    )


def _sample(line: Answer, item: Item | None, scores: ScoresRecord | None, cell: Stored) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ContentImage, ContentText, ModelOutput
    from inspect_ai.scorer import Score

    pictures = [ContentImage(image=data_uri(open_image(path))) for path in (item.images if item else ())]
    question = ChatMessageUser(content=[*pictures, ContentText(text=line.prompt)])
    terms = {m: units[line.id] for m, units in (scores.per_item if scores else {}).items() if line.id in units}
    shown = {
        name: round(a / b * cell["metrics"].get(name.rpartition("/")[2], {"show": 1})["show"], 2)
        for name, (a, b) in terms.items()
        if b
    }
    name = cell["benchmark"]["name"]
    return EvalSample(
        id=line.id,
        epoch=1,
        input=[question],
        target=truth_of(item) if item else "",
        messages=[question, ChatMessageAssistant(content=line.text)],
        output=ModelOutput.from_content(model=cell["model"]["name"], content=line.text),
        scores={name: Score(value=shown, answer=line.text)} if shown else None,
        metadata={"decoding": line.counters, "tokens": len(line.tokens), "finish": line.finish},
    )
