"""Answers that are already on disk: ours, and those that other people's scripts and harnesses write.

docs/benchmarks.md lists the layouts. Lists may be JSON arrays or JSON lines, packed with gzip or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revisit.benchmarks.io import files
from revisit.benchmarks.io.files import Record
from revisit.errors import RevisitError

# Fields that hold nothing but generated text, whatever the benchmark.
GENERATED = (
    *("prediction", "model_prediction", "pred", "predict", "response", "model_response", "output", "outputs"),
    *("model_output", "model_answer", "generated_text", "completion"),
)
# Fields that hold the generated text in some layouts, and a question or the gold answer in others.
AMBIGUOUS = ("text", "answer", "ans", "caption", "content", "gpt4v_output_gpt_check")
# Where a row may repeat the question that it answers, name its picture, or carry the gold answer.
QUESTIONS = ("question", "prompt", "query", "input")
PICTURES = ("image", "image_source", "image_file", "image_path", "img_path", "filename")
GOLD = ("label", "ground_truth", "gt_answer", "gt", "target")
# What else the layouts above have; a text in any other field might be the generated one.
OTHERS = (
    *("id", "index", "category", "subcategory", "question_type", "answer_type", "split", "dataset", "source", "model"),
    *("item", "check", "finish", "hash", "metadata", "visual_input", "multiple_choice_answer"),
)


@dataclass(frozen=True)
class Answer:
    """One generated text with everything its file says about it; `where` names file and line."""

    text: str
    record: Record
    text_field: str = "text"
    file: Path | None = None

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


@dataclass(frozen=True)
class Layout:
    """Where to look for the generated text: in `field`, if the user names one, else in what the benchmark documents."""

    documented: tuple[str, ...] = AMBIGUOUS
    field: str | None = None


def read_answers(path: Path, documented: Sequence[str] = AMBIGUOUS, field: str | None = None) -> list[Answer]:
    """All answers of a file or folder in one of the layouts above, in order.

    `documented`: the fields in which the benchmark's own layouts keep generated text, besides those that never hold
    anything else; `field`: the one to take. Raises where several could be meant.
    """
    layout = Layout(tuple(documented), field)
    answers = _folder(path, layout) if path.is_dir() else _file(path, layout)
    if not answers:
        raise RevisitError(f"{path} holds no answers.")
    first = answers[0]
    for answer in answers:
        if answer.text_field != first.text_field:
            raise RevisitError(
                f"{answer.where} has its answer in {answer.text_field!r}, but {first.where} has it in {first.text_field!r}; "
                "choose one with --field."
            )
    return answers


def _folder(path: Path, layout: Layout) -> list[Answer]:
    if (path / "answers.jsonl").exists():
        return _file(path / "answers.jsonl", layout)
    if (path / "cells").is_dir():
        raise RevisitError(f"{path} is a whole run; give one of the folders below {path / 'cells'}.")
    lists = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
    found = sorted(path.glob("*/output.json")) or sorted(path.glob("*.txt")) or lists
    if not found:
        raise RevisitError(
            f"{path} holds neither answers.jsonl, nor */output.json, nor *.txt, nor *.json or *.jsonl files."
        )
    return [answer for file in found for answer in _file(file, layout)]


def _file(path: Path, layout: Layout) -> list[Answer]:
    if path.suffix == ".txt":
        lines = enumerate(files.read_text(path).split("\n"), 1)
        return [_from_columns(path, n, line) for n, line in lines if line.strip()]
    whole = files.read_map(path) if ".json" in path.suffixes or ".jsonl" in path.suffixes else None
    if whole is not None and not _looks_like_a_record(whole, layout):
        return [_from_pair(path, key, value) for key, value in whole.items()]
    return [replace(_from_record(row, layout), file=path) for row in files.read_records(path)]


def _looks_like_a_record(value: dict[str, Any], layout: Layout) -> bool:
    """A file with one JSON line is a record; a file with one object of ids is a map."""
    names = (*GENERATED, *AMBIGUOUS, "resps", "filtered_resps", layout.field)
    return any(name in value for name in names)


def _from_columns(path: Path, number: int, line: str) -> Answer:
    where = f"{path} line {number}"
    columns = line.rstrip("\r").split("\t")
    if len(columns) != 4:
        raise RevisitError(f"{where} has {len(columns)} tab-separated columns, not image, question, gold and answer.")
    image, question, gold, text = columns
    record = {"image": image, "question": question, "label": gold, "category": path.stem, "text": text}
    return Answer(text, Record(record, where), file=path)


def _from_pair(path: Path, key: str, value: Any) -> Answer:
    where = f"{path} entry {key!r}"
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        raise RevisitError(f"{where} must be text, not {type(value).__name__}.")
    return Answer(text, Record({"id": key, "text": text}, where))


def _from_record(record: Record, layout: Layout) -> Answer:
    if layout.field is not None:
        if layout.field not in record:
            raise RevisitError(
                f"{record.where} has no {layout.field!r} (it has: {', '.join(map(str, record)) or 'nothing'})."
            )
        return Answer(_text(record[layout.field], layout.field, record.where), record, layout.field)
    if "filtered_resps" in record or "resps" in record:
        return _from_sample(record)
    name = answer_field(record, layout.documented)
    return Answer(_text(record[name], name, record.where), record, name)


def _from_sample(record: Record) -> Answer:
    """A sample of lmms-eval; from 0.7 on it need not hold the `doc`, but what the scorer noted and the question."""
    reply: Any = record["filtered_resps"] if "filtered_resps" in record else record["resps"]
    while isinstance(reply, list):
        if len(reply) != 1:
            raise RevisitError(
                f"{record.where} holds {len(reply)} responses to one question; keep the one that is to be scored."
            )
        reply = reply[0]
    doc = record.get("doc")
    if isinstance(doc, dict):
        merged = {**doc, "doc_id": record.get("doc_id")}
    else:
        noted = [value for value in record.values() if isinstance(value, dict)]
        merged = {key: value for key, value in record.items() if key not in ("resps", "filtered_resps", "doc")}
        for name in ("question_id", "id"):
            found = next((value[name] for value in noted if name in value), None)
            if found is not None:
                merged.setdefault(name, found)
    return Answer(_text(reply, "filtered_resps", record.where), Record(merged, record.where), "filtered_resps")


def answer_field(record: Record, documented: Sequence[str]) -> str:
    """The field that holds the generated text; raises RevisitError unless exactly one can be meant."""
    sure = [name for name in GENERATED if name in record]
    found = sure or [name for name in documented if name in record]
    if found == ["text", "answer"] and _first(record, GOLD) and not _first(record, QUESTIONS):
        return "answer"  # a row of the question file, whose text is the question, with the answer added
    if not found:
        raise RevisitError(
            f"{record.where} holds no answer: none of {', '.join(map(repr, (*GENERATED, *documented)))} is among "
            f"{', '.join(map(repr, record)) or 'its (no) keys'}; name the field with --field."
        )
    layout = (*AMBIGUOUS, *QUESTIONS, *PICTURES, *GOLD, *OTHERS)
    if not sure and not found[0].endswith("_gpt_check"):
        texts = (str(name) for name, value in record.items() if isinstance(value, str) and name not in layout)
        found += [name for name in texts if not name.endswith(("_id", "_type"))]
    if len(found) > 1:
        raise RevisitError(
            f"{record.where} has several fields that may be the generated text ({', '.join(found)}), and one of them may be the "
            f"gold answer; choose one with --field, such as --field {found[-1]}."
        )
    return found[0]


def _first(record: Record, names: Sequence[str]) -> str:
    """The text of the first of these fields that is there."""
    return next((str(record[name]) for name in names if name in record), "")


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


def aligned(ids: Sequence[str], answers: Sequence[Answer], fields: Sequence[str]) -> dict[str, Answer]:
    """Item id -> answer: by id if the answers have ids, else by position, which needs one answer per item."""
    if any(answer.key(fields) is not None for answer in answers):
        return by_id(answers, fields)
    if len(answers) != len(ids):
        raise RevisitError(
            f"The answers carry no ids, so their order must be that of the {len(ids)} items, "
            f"but there are {len(answers)} of them."
        )
    return dict(zip(ids, answers, strict=True))


def check_rows(found: Mapping[str, Answer], questions: Mapping[str, str]) -> None:
    """Raises if rows repeat another question than that of their item, or if all answers are the questions.

    Args:
        found: Item id -> its answer.
        questions: Item id -> the question; rows may put it into a longer prompt, or leave it out.
    """
    asked = {key: _plain(questions.get(key, "")) for key in found}
    repeated = {key: _plain(question) for key, answer in found.items() if (question := _question(answer))}
    differ = [key for key, text in repeated.items() if asked[key] and asked[key] not in text and text not in asked[key]]
    if differ:
        key, answer = differ[0], found[differ[0]]
        raise RevisitError(
            f"{answer.where} has the question {_question(answer)!r}, but item {key!r} of the question file has {questions[key]!r} "
            f"({len(differ)} of {len(found)} rows differ): the rows are shuffled, or of another file."
        )
    if found and all(_plain(answer.text) == asked[key] != "" for key, answer in found.items()):
        first = next(iter(found.values()))
        raise RevisitError(
            f"{first.where}: field {first.text_field!r} repeats the questions, so these are no answers; choose another with "
            "--field, or another file."
        )


def _question(answer: Answer) -> str:
    """The question that a row repeats, if it does; a single word is a checksum or a name."""
    added = answer.text_field == "answer" and _first(answer.record, GOLD) and not _first(answer.record, QUESTIONS)
    names = [name for name in (("text",) if added else QUESTIONS) if name != answer.text_field]
    said = next((answer.record[name] for name in names if isinstance(answer.record.get(name), str)), "")
    return said if " " in _plain(said) else ""


def _plain(text: str) -> str:
    """Letters and digits only, so that image tokens' brackets, line breaks and a known misprint do not tell texts apart."""
    lower = text.lower().replace("<image>", " ").replace("imange", "image")
    return " ".join("".join(c if c.isalnum() else " " for c in lower).split())
