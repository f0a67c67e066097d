"""The log of an evaluation: one file per spec, `OUT/logs/MODEL-METHOD-BENCHMARK-KEY.jsonl`.

The first line is a header with the spec and the command's request: its items and its environment. A command with a different
request adds a header, and scores are stored in another one. Every other line is one answer with the hash of its item (prompt and image
bytes), so an old answer is never used for a changed item.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from revisit.errors import RevisitError, listed
from revisit.eval import statistics
from revisit.eval.benchmarks.base import Benchmark, Item, Scores, check_answers, ratio
from revisit.eval.report.document import Document, Section, Table, fragment
from revisit.eval.spec import Frozen, Spec, environment
from revisit.io.files import LineFile, decode, digest, inside, open_regular, read_lines, slug, write_json
from revisit.io.records import Fields

logger = logging.getLogger(__name__)

LOGS, RESULTS = "logs", "results.json"  # in the output folder
SCORES = TypeAdapter(Scores)
KEY_LENGTH = 12  # digits of the key in a log's name and lines


class Frame(Frozen):
    """A sampled frame of a video."""

    index: int  # among all frames of the stream
    time: float  # in seconds, from its own time stamp


class Answer(Frozen):
    """An engine's answer to one item."""

    id: str  # of the item
    item: str = ""  # SHA-256 of the prompt and of every image's bytes
    prompt: str
    images: tuple[str, ...] = ()  # relative to the data folder
    image_hashes: tuple[str, ...] = ()  # SHA-256 of each image's bytes
    frames: tuple[Frame, ...] = ()  # of the videos among the images
    target: str | tuple[str, ...] = ""  # the correct answer, or the objects that are in the image
    text: str  # without thoughts
    thought: str = ""  # text before the answer of a model that thinks
    tokens: tuple[int, ...]
    counters: dict[str, int | float] = Field(default_factory=dict)  # steps, and those that the method changed
    seconds: float = 0.0
    finish: Literal["stop", "length"] = "stop"
    error: str = ""  # why there is no answer; the next command tries again

    @model_validator(mode="before")
    @classmethod
    def _with_videos(cls, fields: Any) -> Any:
        """Read logs that named videos apart from images."""
        if not isinstance(fields, dict) or "videos" not in fields:
            return fields
        images = (*fields.get("images", ()), *fields["videos"])
        return {name: value for name, value in fields.items() if name != "videos"} | {"images": images}

    @classmethod
    def to(cls, item: Item, **fields: Any) -> Answer:
        """Return an answer to this item."""
        return cls(id=item.id, item=item.hash, prompt=item.prompt, **fields)

    @classmethod
    def failure(cls, item: Item, error: str) -> Answer:
        """Return what stands in the place of an answer to this item."""
        return cls.to(item, text="", tokens=(), error=shorten(error, 500, placeholder="…"))


class Request(Frozen):
    """The items that a command needs in a log, and where it ran."""

    time: str
    number: int = 0  # counts up over the logs of which only the newest is shown; the clock may be set back
    items: int
    items_hash: str  # hash of the ids and hashes of all items
    labels_hash: str = ""  # hash of the labels and other data that the scorer reads
    data: str = ""  # the data folder
    limit: int | None = None
    batch_size: int = 1
    excluded: int = 0  # items that are not in the subset
    environment: Fields

    @property
    def command(self) -> str:
        """The command line, ready for a shell."""
        return shlex.join(self.environment["argv"])


class Log:
    """The answers under one spec.

    Attributes:
        path: The file.
        spec: The identity of the answers.
        requests: The requests of all commands, in order.
        answers: All answers, by item id and hash; one with an `error` stands for an item that could not be answered.
        scores: The scores of the answered items, with intervals; None until every requested item was tried.
        damaged: The number of lines that could not be used.
    """

    def __init__(self, path: Path, spec: Spec, lines: Iterable[Fields] = (), damaged: int = 0) -> None:
        self.path, self.spec, self.damaged = path, spec, damaged
        self.requests: list[Request] = []
        self.answers: dict[tuple[str, str], Answer] = {}
        self._file: LineFile | None = None
        self._scored: list[Fields] = []
        for line in lines:
            try:
                if "spec" in line:
                    request = Request.model_validate(line["request"])
                    self.requests += [request] if self.requests[-1:] != [request] else []
                    self._scored += [line] if "scores" in line else []
                elif line.get("log") == spec.key[:KEY_LENGTH]:
                    answer = Answer.model_validate({name: value for name, value in line.items() if name != "log"})
                    self.answers[answer.id, answer.item] = answer
                else:  # a line of another log
                    self.damaged += 1
            except (ValidationError, KeyError):  # a line of another version
                self.damaged += 1
        self.scores = self._read_scores() if self.requests else None

    def __repr__(self) -> str:
        if self.scores is None:
            return f"<Log {self.state if self.requests else self.title}>"
        metric, n = self.scores.shown[self.scores.headline], len(self.scores.items)
        return f"<Log {self.title}: {metric.name} {metric.text(self.scores.metrics[metric.name])}, n = {n}>"

    def _repr_html_(self) -> str:
        rows = []
        for name, metric in self.scores.shown.items() if self.scores else ():
            assert self.scores is not None
            _, low, high = self.scores.value(name)
            bounds = "" if math.isnan(low) else f"[{low:.{metric.decimals}f}, {high:.{metric.decimals}f}]"
            rows.append((name, metric.text(self.scores.metrics[name]), bounds))
        table = Table(("metric", "value", "95 % interval"), rows, f"{self.answered} of {self.request.items} answers.")
        return fragment(Document("", "", [Section(self.title, [table])]))

    @classmethod
    def open(cls, folder: Path, spec: Spec) -> Log:
        """Open the log of a spec in an output folder for appending; raise RevisitError if another process has it open."""
        names = "-".join(slug(name) for name in (spec.model, str(spec.method), spec.benchmark))
        path = inside(folder, LOGS, f"{names}-{spec.key[:KEY_LENGTH]}.jsonl")
        file = LineFile(path)
        stored = next((line["spec"] for line in file.objects if "spec" in line), None)
        if stored is not None and stored != spec.model_dump(mode="json"):
            file.close()
            raise RevisitError(f"{path} belongs to other settings; move it away.")
        log = cls(path, spec, file.objects, file.damaged)
        log._file = file
        return log

    @classmethod
    def read(cls, path: Path) -> Log:
        """Return a stored log; raise RevisitError if it has no readable header."""
        try:
            lines, damaged, _ = read_lines(path)
        except OSError as error:
            raise RevisitError(f"{path} cannot be read: {error.strerror}.") from error
        header = next((line for line in lines if "spec" in line and "request" in line), None)
        if header is None:
            raise RevisitError(f"{path} is not a log of `revisit eval`, or its header is damaged; move it away.")
        with suppress(ValidationError):
            log = cls(path, Spec.model_validate(header["spec"]), lines, damaged)
            if log.requests:  # a later command may have added a header that can be read
                return log
        raise RevisitError(f"{path} was written by another version of revisit; move it away.")

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self, items: Sequence[Item], **details: Any) -> None:
        """Store the request of a command for these items, unless it equals the last one; `details` are fields of `Request`.

        Its `number` is the largest in similar logs. If the last request has a smaller one, another log was newer until now.
        """
        request = Request(
            time=datetime.now(timezone.utc).isoformat(),
            items=len(items),
            items_hash=_items_hash({item.id: item.hash for item in items}),
            labels_hash=digest({item.id: item.meta for item in items}),
            environment=environment(),
            **details,
        )
        unchanged = {"time": request.time, "number": request.number}
        if (
            not self.requests
            or self.request.number < request.number
            or self.request.model_copy(update=unchanged) != request
        ):
            self.requests.append(request.model_copy(update={"number": request.number + 1}))
            self._append_header()
        self.scores = self._read_scores()

    def _append_header(self, **scored: Any) -> None:
        assert self._file is not None
        spec, request = self.spec.model_dump(mode="json"), self.request.model_dump(mode="json")
        self._file.append([{"spec": spec, "request": request, **scored}])

    def append(self, answers: Iterable[Answer]) -> int:
        """Store the answers that are not stored yet, all of them or none; return their number."""
        stored = ((self.answers.get((answer.id, answer.item)), answer) for answer in answers)
        return self._store(new for old, new in stored if old is None or (old.error and old.error != new.error))

    def describe(self, items: Mapping[tuple[str, str], Fields]) -> None:
        """Store answers again, by id and hash, whose `target`, `images` or `image_hashes` are others now."""
        answers = [(answer, items.get(key, {})) for key, answer in self.answers.items()]
        self._store(
            a.model_copy(update=fields) for a, fields in answers if any(getattr(a, n) != v for n, v in fields.items())
        )

    def _store(self, answers: Iterable[Answer]) -> int:
        new = {(answer.id, answer.item): answer for answer in answers}
        if new:
            assert self._file is not None
            self._file.append(
                {
                    "log": self.spec.key[:KEY_LENGTH],
                    **answer.model_dump(mode="json", exclude=None if answer.error else {"error"}),
                }
                for answer in new.values()
            )
            self.answers.update(new)
            if self.scores is not None:  # which may have left these items out
                self.scores = self._read_scores()
        return len(new)

    def score(self, benchmark: Benchmark, items: Sequence[Item]) -> Scores:
        """Return the scores of the requested items; they are computed and stored unless answers and labels have not changed.

        Items that could not be answered are left out.
        """
        if self.scores is None:
            failed = {item.id: item.hash for item in self.missing(items)}
            answered = [item for item in items if item.id not in failed]
            texts = {item.id: self.answers[item.id, item.hash].text for item in answered}
            self.scores = scores = replace(_score(benchmark, answered, texts), failed=failed)
            self._scored.append({"answers": self._answers_hash(scores), "scores": json.loads(SCORES.dump_json(scores))})
            self._append_header(**self._scored[-1])
        return self.scores

    def close(self) -> None:
        """Close the file, so that other processes can open it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard_if_empty(self) -> None:
        """Remove the file if it has no answer."""
        if all(answer.error for answer in self.answers.values()):
            self.close()
            self.path.unlink(missing_ok=True)

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def request(self) -> Request:
        """The request of the latest command."""
        return self.requests[-1]

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.path.parent.parent

    @property
    def title(self) -> str:
        """The model, method and benchmark, and the seed if tokens are sampled."""
        names = (self.spec.model, str(self.spec.method), self.spec.benchmark)
        sampled = self.spec.decoding.get("temperature") is not None
        return " · ".join([*names, *([f"seed {self.spec.seed}"] if sampled else [])])

    @property
    def answered(self) -> int:
        """The number of requested items with an answer."""
        return len(self.scores.items) if self.scores else min(len(self.current()), self.request.items)

    @property
    def failed(self) -> list[Answer]:
        """What stands for the items that could not be answered; each has an `error`."""
        if self.scores is not None:
            return [self.answers[key] for key in self.scores.failed.items()]
        return [answer for answer in self._newest() if answer.error]

    @property
    def state(self) -> str:
        """The progress in words: "m · greedy · pope: 8 of 23 answers"."""
        return f"{self.title}: {self.answered} of {self.request.items} answers"

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """Return the items without an answer."""
        answers = ((item, self.answers.get((item.id, item.hash))) for item in items)
        return [item for item, answer in answers if answer is None or answer.error]

    def current(self) -> list[Answer]:
        """Return the answers that were scored, or before that the newest answer to each item."""
        if self.scores is not None:
            return [self.answers[key] for key in self.scores.items.items()]
        return [answer for answer in self._newest() if not answer.error]

    def _newest(self) -> Iterable[Answer]:
        return {answer.id: answer for answer in self.answers.values()}.values()

    def totals(self) -> dict[str, float]:
        """Return the sums of the counters, tokens and seconds of all current answers."""
        answers = self.current()
        names = dict.fromkeys(name for answer in answers for name in answer.counters)
        sums: dict[str, float] = {name: sum(answer.counters.get(name, 0) for answer in answers) for name in names}
        seconds = round(sum(answer.seconds for answer in answers), 3)
        return {**sums, "new_tokens": sum(len(answer.tokens) for answer in answers), "seconds": seconds}

    def summary(self) -> Fields:
        """Return the spec, the request and the numbers on the scale of the printed tables, as plain data."""
        fields: Fields = {
            "log": self.path.name,
            "complete": self.scores is not None and not self.failed,
            **self.spec.model_dump(mode="json"),
            "method": str(self.spec.method),
            "control": self.spec.method.control,
            "answers": self.answered,
            "failed": {answer.id: answer.error for answer in self.failed},
            "request": self.request.model_dump(mode="json"),
            "totals": self.totals(),
        }
        if self.scores is None:
            return fields
        numbers = json.loads(SCORES.dump_json(self.scores, exclude={"per_item", "items", "shown", "intervals"}))
        for name, metric in self.scores.shown.items():
            value, low, high = (None if math.isnan(x) else x for x in self.scores.value(name))
            kind = getattr(self.scores.intervals[name], "kind", None)
            bounds = {"low": low, "high": high, "interval": kind}
            numbers["metrics"][name] = {"value": value, **bounds, "better": metric.better}
        return {**fields, **numbers, "n": len(self.scores.items)}

    def _read_scores(self) -> Scores | None:
        """Return the stored scores of the requested items with their labels and answers, if there are any."""
        for entry in self._scored:
            try:
                scores: Scores = SCORES.validate_python(entry["scores"])
            except (ValidationError, KeyError):  # a line of another version
                continue
            requested = _items_hash(scores.items | scores.failed) == self.request.items_hash
            if requested and entry.get("answers") == self._answers_hash(scores):
                return scores
        return None

    def _answers_hash(self, scores: Scores) -> str:
        """Return a hash of the scorer, the labels, and the answers to the requested items."""
        answers = [(*key, self.answers.get(key)) for key in sorted((scores.items | scores.failed).items())]
        texts = [[id, item, answer.text if answer and not answer.error else None] for id, item, answer in answers]
        return digest([self.spec.scorer, self.request.labels_hash, texts])


def _items_hash(hashes: Mapping[str, str]) -> str:
    return digest(sorted(hashes.items()))


def _score(benchmark: Benchmark, items: Sequence[Item], texts: Mapping[str, str]) -> Scores:
    """Score answers; add intervals, how metrics are printed, and the number of words if the benchmark lists it as a metric."""
    check_answers(items, texts)
    scores = benchmark.score(list(items), texts)
    metrics, per_item = dict(scores.metrics), dict(scores.per_item)
    if "words" not in metrics and any(metric.name == "words" for metric in benchmark.metrics):
        per_item["words"] = {id: (float(len(text.split())), 1.0) for id, text in texts.items()}
        metrics["words"] = ratio(per_item["words"].values())
    shown = {name: benchmark.metric(name) for name in metrics}
    intervals = {
        name: statistics.metric_interval(name, value, per_item, full=100 / shown[name].show)
        for name, value in metrics.items()
    }
    return replace(
        scores,
        metrics=metrics,
        per_item=per_item,
        items={item.id: item.hash for item in items},
        intervals=intervals,
        shown=shown,
        headline=benchmark.headline if benchmark.headline in metrics else next(iter(metrics)),
    )


# -- many logs ------------------------------------------------------------------------------------------------------


def read_logs(folder: str | Path) -> list[Log]:
    """Return the logs of an output folder in the order in which they were begun.

    If logs differ only in weights, code, libraries or batching, only the newest is returned.
    """
    folder, logs = Path(folder), list[Log]()
    check_layout(folder)
    for path in sorted((folder / LOGS).glob("*.jsonl")):
        try:
            logs.append(Log.read(path))
        except RevisitError as error:  # one damaged log does not hide the others
            logger.warning("%s", error)
    if not logs:
        runs = (path.parent for path in sorted(folder.glob(f"*/{LOGS}")))
        example = next((f", for example {run}" for run in runs), "")
        raise RevisitError(f"{folder} has no logs: give the --out folder of `revisit eval`{example}.")
    newest = {log.spec.similar: log for log in sorted(logs, key=lambda log: (log.request.number, log.request.time))}
    return sorted(newest.values(), key=lambda log: log.requests[0].time)


def request_numbers(folder: Path) -> dict[str, int]:
    """Return the largest number of a request in the logs with the same `Spec.similar`."""
    numbers: dict[str, int] = {}
    for path in (folder / LOGS).glob("*.jsonl"):
        with suppress(OSError), open_regular(path) as file:
            for line in filter(lambda line: line.startswith(b'{"spec"'), file):
                with suppress(ValueError, KeyError, RecursionError):  # damaged, or of another version
                    header = decode(line)
                    similar = Spec.model_validate(header["spec"]).similar
                    numbers[similar] = max(numbers.get(similar, 0), Request.model_validate(header["request"]).number)
    return numbers


def write_results(folder: Path) -> None:
    """Write the numbers of all logs of a folder to `results.json`, for other programs; this package does not read it."""
    write_json(inside(folder, RESULTS), {"logs": [log.summary() for log in read_logs(folder)]})


def check_layout(folder: Path) -> None:
    """Raise RevisitError if a folder has results of another program, or of an earlier version of this one."""
    if (folder / "cells").is_dir() or ((folder / RESULTS).exists() and not (folder / LOGS).is_dir()):
        raise RevisitError(
            f"{folder} has results that this version of revisit did not write and cannot read: use another --out."
        )


def unfinished(logs: Sequence[Log]) -> str:
    """Return a notice about incomplete logs and failed items, with the commands that finish them; empty if all are complete."""
    incomplete = [log for log in logs if log.scores is None]
    failed = failures(logs)
    if not incomplete and not failed:
        return ""
    notices = []
    if incomplete:
        states = "; ".join(log.state for log in incomplete[:5])
        more = f"; and {len(incomplete) - 5} more" if len(incomplete) > 5 else ""
        notices.append(
            f"{len(incomplete)} of {len(logs)} combinations of model, method and benchmark have no result ({states}{more})"
        )
    if failed:
        reasons = listed([f"{name}: {reason}" for name, reason in failed.items()], 3)
        notices.append(f"{len(failed)} item{'s' * (len(failed) > 1)} could not be answered ({reasons})")
    commands = [
        command
        for command in dict.fromkeys(log.request.command for log in logs if log.scores is None or log.failed)
        if command.startswith("revisit ")
    ]
    finish = f"run: {' ; '.join(commands)}" if commands else "call `revisit.evaluate` again with the same arguments."
    return f"This run is incomplete: {', and '.join(notices)}. To finish it, {finish}"


def failures(logs: Iterable[Log]) -> dict[str, str]:
    """Return the items that could not be answered, as "BENCHMARK: ID", and the reasons."""
    return {f"{log.spec.benchmark}: {answer.id}": answer.error for log in logs for answer in log.failed}
