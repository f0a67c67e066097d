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
| lmms-eval | `{"doc_id", "doc", "resps", "filtered_resps"}` sample lines, from 0.7 on also without `doc`, or with the bare reply |
| VLMEvalKit | `index`, `prediction`, ... as .tsv, .csv or .json |

Lists may be JSON arrays or JSON lines, packed with gzip or not.
"""

from __future__ import annotations

import re
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
# Names of fields that no layout above has, but that somebody may have given to the generated text.
_LIKE_GENERATED = re.compile(
    r"(?!gt|gold|true|multiple_choice)(?:.*_)?(?:ans|answer|pred|prediction|predicted|resp|response|reply|output|generated|generation|completion)"
    r"(?:_(?:text|raw|model|new|\d+|greedy|[a-z]*cd))?"
)
# Where a row may repeat the question that it answers.
QUESTIONS = ("question", "prompt", "query", "input")
# Where it may name its picture.
PICTURES = ("image", "image_source", "image_file", "image_path", "img_path", "filename")
GOLD = ("label", "ground_truth", "gt_answer", "gt", "target")
# Fields whose texts are neither questions nor answers.
_ABOUT = re.compile(
    r"(?:.*_)?(?:id|index|hash|path|file|filename|source|category|subcategory|type|split|dataset|model|name|img|image)"
)


@dataclass(frozen=True)
class Answer:
    """One generated text with everything its file says about it; `where` names file and line."""

    text: str
    record: Record
    text_field: str = "text"
    file: Path | None = None
    chosen: bool = False  # whether the user named the field

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
    if whole is not None and isinstance(whole.get("logs"), list):  # lmms-eval before 0.3
        rows = [files.record(row, f"{path} log {n}") for n, row in enumerate(whole["logs"], 1)]
    elif whole is not None and not _looks_like_a_record(whole, layout):
        return [_from_pair(path, key, value) for key, value in whole.items()]
    else:
        rows = files.read_records(path)
    return [replace(_from_record(row, layout), file=path) for row in rows]


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
        return Answer(_text(record[layout.field], layout.field, record.where), record, layout.field, chosen=True)
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
    """The one field that holds the generated text, or the sentence that says why it cannot be told."""
    sure = [name for name in GENERATED if name in record]
    maybe = [name for name in documented if name in record]
    found = sure or maybe
    if found == ["text", "answer"] and _holds(record, GOLD) and not _holds(record, QUESTIONS):
        return "answer"  # a row of the question file, whose text is the question, with the answer added
    if not found:
        raise RevisitError(
            f"{record.where} holds no answer: none of {', '.join(map(repr, (*GENERATED, *documented)))} is among "
            f"{', '.join(map(repr, record)) or 'its (no) keys'}."
        )
    if len(found) > 1:
        raise RevisitError(
            f"{record.where} has several fields that may be the generated text ({', '.join(found)}), and one of them may be the "
            f"gold answer; choose one with --field, such as --field {found[0]}."
        )
    other = [
        name
        for name, value in record.items()
        if name not in (*AMBIGUOUS, *QUESTIONS, *GOLD)
        and isinstance(value, str)
        and _LIKE_GENERATED.fullmatch(str(name))
    ]
    if other and not sure and not found[0].endswith("_gpt_check"):
        raise RevisitError(
            f"{record.where} has {found[0]!r} beside {other[0]!r}, so one may be generated and the other the gold answer; choose "
            f"with --field, such as --field {other[0]}."
        )
    return found[0]


def _holds(record: Record, names: Sequence[str]) -> bool:
    return any(name in record for name in names)


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


def check_questions(questions: Mapping[str, str], found: Mapping[str, Answer]) -> None:
    """Raises if an answer repeats another question than that of its item, or is nothing but the question.

    `questions`: item id -> the question; rows may put it into a longer prompt, or leave it out.
    """
    other, echoes = [], 0
    for key, answer in found.items():
        asked = _plain(questions.get(key, ""))
        if not asked:
            continue
        echoes += _plain(answer.text) == asked
        said = _said(answer)
        if said and asked not in said and said not in asked:
            other.append((key, answer))
    if other:
        key, answer = other[0]
        raise RevisitError(
            f"{answer.where} answers another question than item {key!r} of the question file ({len(other)} of {len(found)} rows "
            "do): the rows are shuffled, or of another file."
        )
    if echoes and echoes == len(found):
        raise RevisitError(
            f"{next(iter(found.values())).where}: field {next(iter(found.values())).text_field!r} repeats the questions, so "
            "these are no answers; choose another with --field, or another file."
        )


def repeats_question(answer: Answer) -> bool:
    """Whether a row says which question it answers."""
    return bool(_said(answer))


def check_pictures(pictures: Mapping[str, str], found: Mapping[str, Answer]) -> None:
    """Raises if an answer names another picture than that of its item; `pictures`: item id -> its file name."""
    for key, answer in found.items():
        asked = _picture_number(pictures.get(key, ""))
        names = [answer.record[name] for name in PICTURES if isinstance(answer.record.get(name), str)]
        said = _picture_number(names[0]) if names else None
        if asked is not None and said is not None and asked != said:
            raise RevisitError(
                f"{answer.where} is about picture {names[0]!r}, but item {key!r} of the question file is about {pictures[key]!r}: the rows "
                "are shuffled, or of another file."
            )


def _picture_number(name: str) -> int | None:
    """The number that ends a picture's name; None for other names, and for pictures that are not files."""
    match = re.search(r"(\d+)(?:\.[A-Za-z]+)?$", name) if len(name) < 300 else None
    return int(match.group(1)) if match else None


def check_not_gold(gold: Mapping[str, str], found: Mapping[str, Answer]) -> None:
    """Raises if the answers are the gold answers word for word, and the rows hold another text that may be generated.

    `gold`: item id -> its gold answer.
    """
    answers = found.items()
    if any(answer.chosen or answer.text.strip().lower() != gold.get(key, "").lower() for key, answer in answers):
        return
    texts: dict[str, set[str]] = {}
    for answer in found.values():
        for name, value in answer.record.items():
            if (
                isinstance(value, str)
                and name not in (answer.text_field, *QUESTIONS, *GOLD)
                and not _ABOUT.fullmatch(name)
            ):
                texts.setdefault(name, set()).add(value)
    other = [name for name, values in texts.items() if len(values) > 1]
    if other:
        first = next(iter(found.values()))
        raise RevisitError(
            f"{first.where}: {first.text_field!r} is the gold answer word for word in all rows, and {other[0]!r} is a text too; choose "
            f"the generated one with --field, such as --field {other[0]}."
        )


def _said(answer: Answer) -> str:
    """The question that a row repeats, if it does; a single word is a checksum or a name."""
    record = answer.record
    names = [name for name in QUESTIONS if isinstance(record.get(name), str)]
    if not names and answer.text_field == "answer" and _holds(record, GOLD) and isinstance(record.get("text"), str):
        names = ["text"]
    said = _plain(record[names[0]]) if names else ""
    return said if " " in said else ""


def _plain(text: str) -> str:
    """Letters and digits only, so that image tokens' brackets, line breaks and a known misprint do not tell texts apart."""
    lower = text.lower().replace("<image>", " ").replace("imange", "image")
    return " ".join("".join(c if c.isalnum() else " " for c in lower).split())
