"""Answers that are already on disk: ours, and those that other people's scripts and harnesses write.

| written by | one answer looks like |
|---|---|
| our store | `{"id", "text", ...}` lines, or the cell's folder |
| CHAIR, OPERA | `{"image_id", "caption"}` |
| LLaVA, VCD | `{"question_id", "text", ...}` |
| POPE | `{"question", "answer"}` in the order of the questions |
| VQA | `{"question_id", "answer"}` |
| MMMU | `{id: response}`, a list with `response`, or the folder of `<Subject>/output.json` |
| HallusionBench | the question's fields with `model_prediction` |
| AMBER | `{"id", "response"}` |
| MME | `image <tab> question <tab> gold <tab> answer` lines in `<category>.txt` |
| lmms-eval | `{"doc_id", "doc", "resps", "filtered_resps"}` sample lines |
| VLMEvalKit | `index`, `prediction`, ... as .tsv, .csv or .json |

Lists may be JSON arrays or JSON lines, packed with gzip or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.benchmarks.io import files
from revisit.benchmarks.io.files import Record
from revisit.errors import RevisitError

# Where the generated text may be, first hit wins: a key that could hold a gold answer comes after one that cannot.
TEXT_FIELDS = (
    "prediction",
    "model_prediction",
    "response",
    "caption",
    "output",
    "answer",
    "text",
    "content",
    "gpt4v_output_gpt_check",
)


@dataclass(frozen=True)
class Answer:
    """One generated text with everything its file says about it; `where` names file and line."""

    text: str
    record: Record
    text_field: str = "text"

    @property
    def where(self) -> str:
        return self.record.where

    def key(self, fields: Sequence[str]) -> str | None:
        """The answer's id: the first of `fields` that it has."""
        for name in fields:
            if self.record.get(name) is not None:
                return str(self.record[name])
        return None

    def need(self, fields: Sequence[str]) -> str:
        """The answer's id, or the sentence that says it has none."""
        found = self.key(fields)
        if found is None:
            raise RevisitError(f"{self.where} has none of {', '.join(map(repr, fields))} to say which item it answers.")
        return found


def read_answers(path: Path) -> list[Answer]:
    """All answers of a file or folder in one of the layouts above, in order."""
    answers = _folder(path) if path.is_dir() else _file(path)
    if not answers:
        raise RevisitError(f"{path} holds no answers.")
    return answers


def _folder(path: Path) -> list[Answer]:
    if (path / "answers.jsonl").exists():
        return _file(path / "answers.jsonl")
    if (path / "cells").is_dir():
        raise RevisitError(f"{path} is a whole run; give one of the folders below {path / 'cells'}.")
    found = sorted(path.glob("*/output.json")) or sorted(path.glob("*.txt"))
    if not found:
        raise RevisitError(f"{path} holds neither answers.jsonl, nor */output.json, nor *.txt files.")
    return [answer for file in found for answer in _file(file)]


def _file(path: Path) -> list[Answer]:
    if path.suffix == ".txt":
        return [_from_columns(path, n, line) for n, line in enumerate(files.read_text(path).split("\n"), 1) if line]
    whole = files.read_map(path) if ".json" in path.suffixes or ".jsonl" in path.suffixes else None
    if whole is not None and isinstance(whole.get("logs"), list):  # lmms-eval before 0.3
        return [_from_record(files.record(row, f"{path} log {n}")) for n, row in enumerate(whole["logs"], 1)]
    if whole is not None and not _looks_like_a_record(whole):
        return [_from_pair(path, key, value) for key, value in whole.items()]
    return [_from_record(record) for record in files.read_records(path)]


def _looks_like_a_record(value: dict[str, Any]) -> bool:
    """A file with one JSON line is a record; a file with one object of ids is a map."""
    return any(name in value for name in (*TEXT_FIELDS, "resps", "filtered_resps"))


def _from_columns(path: Path, number: int, line: str) -> Answer:
    where = f"{path} line {number}"
    columns = line.rstrip("\r").split("\t")
    if len(columns) != 4:
        raise RevisitError(f"{where} has {len(columns)} tab-separated columns, not image, question, gold and answer.")
    image, question, gold, text = columns
    record = {"image": image, "question": question, "label": gold, "category": path.stem, "text": text}
    return Answer(text, Record(record, where))


def _from_pair(path: Path, key: str, value: Any) -> Answer:
    where = f"{path} entry {key!r}"
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        raise RevisitError(f"{where} must be text, not {type(value).__name__}.")
    return Answer(text, Record({"id": key, "text": text}, where))


def _from_record(record: Record) -> Answer:
    if isinstance(record.get("doc"), dict) and ("filtered_resps" in record or "resps" in record):
        reply: Any = record.get("filtered_resps") or record.get("resps")
        while isinstance(reply, list) and reply:
            reply = reply[0]
        merged = Record({**record["doc"], "doc_id": record.get("doc_id")}, record.where)
        return Answer(_text(reply, "filtered_resps", record.where), merged, "filtered_resps")
    for name in TEXT_FIELDS:
        if name in record:
            return Answer(_text(record[name], name, record.where), record, name)
    raise RevisitError(
        f"{record.where} holds no answer: none of {', '.join(map(repr, TEXT_FIELDS))} is among "
        f"{', '.join(map(repr, record)) or 'its (no) keys'}."
    )


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise RevisitError(f"{where}: {name!r} must be text, not {type(value).__name__}.")
    return value


def by_id(answers: Iterable[Answer], fields: Sequence[str]) -> dict[str, Answer]:
    """Answers by their id; a second answer to the same item is named, not dropped."""
    found: dict[str, Answer] = {}
    for answer in answers:
        key = answer.need(fields)
        if key in found:
            raise RevisitError(f"{answer.where} answers {key!r} a second time (first at {found[key].where}).")
        found[key] = answer
    return found


def align(ids: Sequence[str], answers: Sequence[Answer], fields: Sequence[str]) -> dict[str, str]:
    """Item id -> text: by id if the answers have ids, else by position, which needs one answer per item."""
    if any(answer.key(fields) is not None for answer in answers):
        return {key: answer.text for key, answer in by_id(answers, fields).items()}
    if len(answers) != len(ids):
        raise RevisitError(
            f"The answers carry no ids, so their order must be that of the {len(ids)} items, "
            f"but there are {len(answers)} of them."
        )
    return {key: answer.text for key, answer in zip(ids, answers, strict=True)}
