"""Answers on disk: rows with an id and a text, from our runs or from other programs; docs/benchmarks.md describes the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.benchmarks.io import files
from revisit.benchmarks.io.files import Record
from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.benchmarks.base import Item

# Fields that hold generated text. `answer` is not among them: it holds the gold answer as often.
TEXTS = ("text", "caption", "response", "prediction", "model_prediction")
IDS = ("id", "question_id", "image_id", "index")
QUESTIONS = ("question", "prompt", "query")  # where a row may repeat the question that it answers
PICTURES = ("image", "image_source", "image_file", "image_path", "img_path", "filename")


@dataclass(frozen=True)
class Answer:
    """One generated text and the row that holds it."""

    text: str
    record: Record

    @property
    def where(self) -> str:
        """File and line."""
        return self.record.where

    def key(self, fields: Sequence[str] = IDS) -> str | None:
        """The answer's id: the first of `fields` that its row has."""
        return next((str(self.record[name]) for name in fields if self.record.get(name) is not None), None)

    def need(self, fields: Sequence[str] = IDS) -> str:
        """The answer's id; raises RevisitError if it has none."""
        found = self.key(fields)
        if found is None:
            raise RevisitError(f"{self.where} has none of {', '.join(map(repr, fields))} to identify its item.")
        return found


def read_answers(path: Path, field: str | None = None) -> list[Answer]:
    """All answers of a file, or of a cell of `revisit eval`, in order.

    Args:
        path: JSON lines, a JSON array, a JSON map of ids to texts, a .csv or .tsv table, or the folder of a cell.
        field: The field with the generated text; without it, rows must have exactly one of `TEXTS`.
    """
    if path.is_dir():
        if not (path / "answers.jsonl").exists():
            raise RevisitError(f"{path} contains no answers.jsonl; pass a file, or a folder in RUN/cells.")
        path = path / "answers.jsonl"
    whole = files.read_map(path) if ".json" in path.suffixes else None
    if whole is not None and not {*TEXTS, field} & whole.keys():
        rows = [Record({"id": key, "text": text}, f"{path} entry {key!r}") for key, text in whole.items()]
        answers = [_answer(row, "text") for row in rows]
    else:
        answers = [_answer(row, field or _text_field(row)) for row in files.read_records(path)]
    if not answers:
        raise RevisitError(f"{path} contains no answers.")
    return answers


def _text_field(row: Record) -> str:
    """The field with the generated text; raises RevisitError unless there is exactly one."""
    found = [name for name in TEXTS if name in row]
    if len(found) != 1:
        problem = f"several texts ({', '.join(found)})" if found else "no answer"
        raise RevisitError(
            f"{row.where} has {problem} among its fields {', '.join(map(str, row)) or '(none)'}; choose one with --field."
        )
    return found[0]


def _answer(row: Record, field: str) -> Answer:
    text = row.need(field)
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)  # a label
    if not isinstance(text, str):
        raise RevisitError(f"{row.where}: {field!r} must be text, not {type(text).__name__}.")
    return Answer(text, row)


def attach(
    answers: Sequence[Answer], items: Sequence[Item], key: Callable[[Answer], str | None] = Answer.key
) -> dict[str, str]:
    """Item id -> text: by the rows' ids, or by position if no row has an id. Ids of no item are kept for the caller to refuse.

    An item called "coco_random/17" may be named "17" if no other item is.
    """
    keys = [key(answer) for answer in answers]
    if all(name is None for name in keys):
        if len(answers) != len(items):
            raise RevisitError(
                f"The answers have no ids, so they must be in the order of the {len(items)} items, but there are {len(answers)}."
            )
        keys = [item.id for item in items]
    short = {item.id.rpartition("/")[2]: item.id for item in items}
    if len(short) < len(items):
        short = {}
    found: dict[str, Answer] = {}
    for name, answer in zip(keys, answers, strict=True):
        name = answer.need() if name is None else name
        name = short.get(name, name)
        if name in found:
            raise RevisitError(f"{answer.where} answers {name!r} a second time (first at {found[name].where}).")
        found[name] = answer
    _check_questions(found, {item.id: item.prompt for item in items})
    return {name: answer.text for name, answer in found.items()}


def _check_questions(found: Mapping[str, Answer], prompts: Mapping[str, str]) -> None:
    """Raises RevisitError if rows repeat another question than that of their item, or if all answers are questions."""
    echoes = 0
    for name, answer in found.items():
        asked = _plain(prompts.get(name, "").partition("\n")[0])
        said = next((str(answer.record[field]) for field in QUESTIONS if answer.record.get(field)), "")
        repeated = _plain(said)
        if asked and " " in repeated and asked not in repeated and repeated not in asked:
            raise RevisitError(
                f"{answer.where} has the question {said!r}, but item {name!r} asks {prompts[name]!r}: the rows are shuffled, or "
                "belong to other data files."
            )
        echoes += bool(asked) and _plain(answer.text) == asked
    if found and echoes == len(found):
        first = next(iter(found.values()))
        raise RevisitError(f"{first.where}: the texts repeat the questions; choose another field with --field.")


def _plain(text: str) -> str:
    """Letters and digits only; "imange" is a misprint in VCD's files."""
    lower = text.lower().replace("<image>", " ").replace("imange", "image")
    return " ".join("".join(c if c.isalnum() else " " for c in lower).split())
