"""One file per spec: `OUT/logs/MODEL-METHOD-BENCHMARK-KEY.jsonl`.

The first line is a header: the spec, the environment and what was requested. A later command with another request (more items, another
machine) adds a header of its own. Every other line is one answer, with the hash of its item (prompt and image bytes), so that an old
answer is never used for a changed item. `….scores.json` next to a log caches its scores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from revisit.errors import RevisitError
from revisit.eval import statistics
from revisit.eval.benchmarks.base import Benchmark, Item, Scores, check_answers, ratio
from revisit.eval.spec import Spec, environment
from revisit.explain.files import LineFile, decode, digest, encode, read_file, read_lines, slug, write_json

logger = logging.getLogger(__name__)

LOGS = "logs"  # below the output folder
SCORES = TypeAdapter(Scores)
KEY = 12  # digits of the key that are in a log's name and in its lines


class Record(BaseModel):
    """Base of all lines: unknown fields raise an error, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Answer(Record):
    """What an engine answered to one item."""

    id: str  # of the item
    item: str = ""  # SHA-256 of the prompt and of every image's bytes
    prompt: str
    images: tuple[str, ...] = ()  # below the data folder
    text: str  # without thoughts
    thought: str = ""  # what a model that thinks wrote before it answered
    tokens: tuple[int, ...]
    counters: dict[str, int | float] = Field(default_factory=dict)  # steps, and those that the method changed
    seconds: float = 0.0
    finish: Literal["stop", "length"] = "stop"


class Request(Record):
    """What a command asked of a log."""

    written: str
    items: int
    asked: str  # hash of the ids and hashes of all readable items
    data: str | None = None
    limit: int | None = None
    batch_size: int = 1
    left_out: int = 0  # items that are not in the subset
    environment: dict[str, Any]

    @property
    def command(self) -> str:
        """The command, as one would type it."""
        return shlex.join(self.environment["argv"])


class Log:
    """The answers under one spec.

    Attributes:
        path: The file.
        spec: What identifies the answers.
        request: What the latest command asked for.
        answers: All answers, by item id and hash.
        scores: The scores of what was requested, with intervals; None until the log is complete.
    """

    def __init__(self, path: Path, spec: Spec, rows: Iterable[Mapping[str, Any]] = (), damaged: int = 0) -> None:
        self.path, self.spec, self.damaged = path, spec, damaged
        self.requests: list[Request] = []
        self.answers: dict[tuple[str, str], Answer] = {}
        self._file: LineFile | None = None
        for row in rows:
            self._take(row)
        self.scores = self._cached() if self.requests else None

    @classmethod
    def open(cls, folder: Path, spec: Spec) -> Log:
        """Open the log of a spec below `folder` for appending; raise RevisitError if another process has it open."""
        names = "-".join(slug(name) for name in (spec.model, spec.method, spec.benchmark))
        path = folder / LOGS / f"{names}-{spec.key[:KEY]}.jsonl"
        file = LineFile(path)
        headers = [row for row in file.rows if "spec" in row]
        if headers and headers[0]["spec"] != spec.model_dump(mode="json"):
            file.close()
            raise RevisitError(f"{path} belongs to other settings; move it away.")
        log = cls(path, spec, file.rows, file.damaged)
        log._file = file
        return log

    @classmethod
    def read(cls, path: Path) -> Log:
        """Return a stored log; raise RevisitError if it has no readable header."""
        try:
            rows, damaged = read_lines(path)
        except OSError as error:
            raise RevisitError(f"{path} cannot be read: {error.strerror}.") from error
        header = next((row for row in rows if "spec" in row and "request" in row), None)
        if header is None:
            raise RevisitError(f"{path} is not a log of `revisit eval`, or its header is damaged; move it away.")
        try:
            Request.model_validate(header["request"])
            return cls(path, Spec.model_validate(header["spec"]), rows, damaged)
        except ValidationError as error:
            raise RevisitError(f"{path} was written by another version of revisit; move it away.") from error

    def _take(self, row: Mapping[str, Any]) -> None:
        """Add a stored line; lines of other logs and of other versions count as damaged."""
        try:
            if "spec" in row:
                self.requests.append(Request.model_validate(row["request"]))
            elif row.get("log") == self.spec.key[:KEY]:
                answer = Answer.model_validate({name: value for name, value in row.items() if name != "log"})
                self.answers.setdefault((answer.id, answer.item), answer)
            else:
                self.damaged += 1
        except (ValidationError, KeyError):
            self.damaged += 1

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Store what a command asks for, unless it is what was asked last."""
        if not self.requests or self.request.model_copy(update={"written": request.written}) != request:
            row = {"spec": self.spec.model_dump(mode="json"), "request": request.model_dump(mode="json")}
            self._writable().append([row])
            self.requests.append(request)
        self.scores = self._cached()

    def append(self, answers: Iterable[Answer]) -> int:
        """Store those answers that are not stored yet, all of them or none; return their number."""
        new = {(answer.id, answer.item): answer for answer in answers if (answer.id, answer.item) not in self.answers}
        if new:
            key = self.spec.key[:KEY]
            self._writable().append({"log": key, **answer.model_dump(mode="json")} for answer in new.values())
            self.answers.update(new)
        return len(new)

    def score(self, benchmark: Benchmark, items: Sequence[Item]) -> Scores:
        """Return the scores of these items' answers: cached ones if neither the scorer nor an answer has changed."""
        texts = {item.id: self.answers[item.id, item.hash].text for item in items}
        hashes = {item.id: item.hash for item in items}
        key = {"scorer": self.spec.scorer, "answers": _digest(hashes, self.answers)}
        stored = _read_scores(self._scores_path)
        if stored is None or any(stored[name] != value for name, value in key.items()):
            check_answers(items, texts)
            scores = _with_length(benchmark, benchmark.score(list(items), texts), texts)
            stored = {**key, "scores": _with_intervals(benchmark, scores, hashes)}
        if stored.get("asked") != self.request.asked:
            plain = json.loads(SCORES.dump_json(stored["scores"]))
            row = encode({**stored, "scores": plain, "asked": self.request.asked})
            write_json(self._scores_path, json.loads(row))
        found: Scores = stored["scores"]
        self.scores = found
        return found

    def close(self) -> None:
        """End appending and let other processes in."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard_if_empty(self) -> None:
        """Remove a log that has no answer."""
        if not self.answers:
            self.close()
            self.path.unlink(missing_ok=True)

    def _writable(self) -> LineFile:
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open for appending")
        return self._file

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def request(self) -> Request:
        """What the latest command asked for."""
        return self.requests[-1]

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.path.parent.parent

    @property
    def title(self) -> str:
        """The model, method and benchmark, and the seed of sampling."""
        names = (self.spec.model, self.spec.method, self.spec.benchmark)
        sampled = self.spec.decoding.get("temperature") is not None
        return " · ".join([*names, *([f"seed {self.spec.seed}"] if sampled else [])])

    @property
    def answered(self) -> int:
        """The number of requested items with an answer."""
        return len(self.scores.items) if self.scores else min(len({id for id, _ in self.answers}), self.request.items)

    @property
    def state(self) -> str:
        """What is there, for people: "m · greedy · pope: 8 of 23 answers"."""
        return f"{self.title}: {self.answered} of {self.request.items} answers"

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """Return the items without an answer."""
        return [item for item in items if (item.id, item.hash) not in self.answers]

    def current(self) -> list[Answer]:
        """Return the answers to what was scored; to the newest hash of every item if nothing was."""
        if self.scores is not None:
            return [self.answers[pair] for pair in self.scores.items.items()]
        return list({answer.id: answer for answer in self.answers.values()}.values())

    def totals(self) -> dict[str, float]:
        """Return the counters of all current answers, added up, with their tokens and seconds."""
        answers = self.current()
        names = dict.fromkeys(name for answer in answers for name in answer.counters)
        found: dict[str, float] = {name: sum(answer.counters.get(name, 0) for answer in answers) for name in names}
        seconds = round(sum(answer.seconds for answer in answers), 3)
        return {**found, "new_tokens": sum(len(answer.tokens) for answer in answers), "seconds": seconds}

    @property
    def _scores_path(self) -> Path:
        return self.path.with_suffix(".scores.json")

    def _cached(self) -> Scores | None:
        """Return the stored scores if they are of all that was requested, and of these answers."""
        stored = _read_scores(self._scores_path)
        if stored is None or stored["scorer"] != self.spec.scorer or stored["asked"] != self.request.asked:
            return None
        scores: Scores = stored["scores"]
        if any(pair not in self.answers for pair in scores.items.items()):
            return None
        return scores if stored["answers"] == _digest(scores.items, self.answers) else None


def _digest(hashes: Mapping[str, str], answers: Mapping[tuple[str, str], Answer]) -> str:
    """Return a hash of the answers to some items."""
    return digest([[id, item, answers[id, item].text] for id, item in sorted(hashes.items())])


# -- scores ---------------------------------------------------------------------------------------------------------


def _with_length(benchmark: Benchmark, scores: Scores, texts: Mapping[str, str]) -> Scores:
    """Add the mean number of words of an answer if the benchmark lists it and its scorer does not count it."""
    if "words" in scores.metrics or all(metric.name != "words" for metric in benchmark.metrics):
        return scores
    words = {id: (float(len(text.split())), 1.0) for id, text in texts.items()}
    metrics = {**scores.metrics, "words": ratio(words.values())}
    return replace(scores, metrics=metrics, per_item={**scores.per_item, "words": words})


def _with_intervals(benchmark: Benchmark, scores: Scores, items: dict[str, str]) -> Scores:
    """Return scores with the interval and the printed form of every metric."""
    shown = {name: benchmark.metric(name) for name in scores.metrics}
    found = {
        name: statistics.metric_interval(name, value, scores.per_item, full=100 / shown[name].show)
        for name, value in scores.metrics.items()
    }
    return replace(scores, items=items, shown=shown, intervals=found, headline=benchmark.headline)


def _read_scores(path: Path) -> dict[str, Any] | None:
    """Return cached scores with what they depend on; None if there are none, or if the file is damaged."""
    try:
        record: dict[str, Any] = decode(read_file(path))
        return {**record, "scores": SCORES.validate_python(record["scores"])}
    except (OSError, ValueError, KeyError, RecursionError):
        return None


# -- many logs ------------------------------------------------------------------------------------------------------


def read_logs(folder: str | Path) -> list[Log]:
    """Return the logs of an output folder in the order in which they were begun.

    Of logs that differ only in weights, code, libraries or batching, the newest is returned.
    """
    folder, found = Path(folder), list[Log]()
    check_layout(folder)
    for path in sorted((folder / LOGS).glob("*.jsonl")):
        try:
            found.append(Log.read(path))
        except RevisitError as error:  # one damaged log does not hide the others
            logger.warning("%s", error)
    found.sort(key=lambda log: log.requests[0].written)
    if not found:
        raise RevisitError(f"{folder} has no logs: give the --out folder of `revisit eval`.")
    newest: dict[str, Log] = {}
    for log in found:
        ignored = ("fingerprint", "code", "libraries", "batching")
        place = digest({name: value for name, value in log.spec.model_dump(mode="json").items() if name not in ignored})
        if place not in newest or newest[place].request.written <= log.request.written:
            newest[place] = log
    return [log for log in found if log in newest.values()]


def check_layout(folder: Path) -> None:
    """Raise RevisitError for a folder with the results of another program, or of an earlier version of this one."""
    if (folder / "cells").is_dir() or ((folder / "results.json").exists() and not (folder / LOGS).is_dir()):
        raise RevisitError(
            f"{folder} has results that this version of revisit did not write and cannot read: use another --out."
        )


def unfinished(logs: Sequence[Log]) -> str:
    """Return the notice that some logs are incomplete, with the commands that finish them; empty if none is."""
    rest = [log for log in logs if log.scores is None]
    if not rest:
        return ""
    listed = "; ".join(log.state for log in rest[:5])
    more = f"; and {len(rest) - 5} more" if len(rest) > 5 else ""
    commands = dict.fromkeys(log.request.command for log in rest)
    return (
        f"This run is incomplete: {len(rest)} of {len(logs)} combinations of model, method and benchmark have no "
        f"result ({listed}{more}). To finish it, run: {' ; '.join(commands)}"
    )


def new_request(items: Mapping[str, str], **fields: Any) -> Request:
    """Return a request of this process for items (id -> hash)."""
    written, asked = datetime.now(timezone.utc).isoformat(), digest(sorted(items.items()))
    return Request(written=written, items=len(items), asked=asked, environment=environment(), **fields)


def item_hash(prompt: str, images: Sequence[str]) -> str:
    """Return the hash that an answer is tied to, from the prompt and the hashes of the images."""
    return digest([prompt, list(images)])


def item_seed(seed: int, id: str) -> int:
    """Return the seed of one item, the same in any batch and any order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:7], "big")
