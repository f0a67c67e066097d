"""What every study shares: its settings, the captions it reads, and the file it leaves for `revisit report`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from revisit.benchmarks.base import Item
from revisit.benchmarks.chair import Chair
from revisit.errors import RevisitError
from revisit.evaluation.environment import command_line, environment
from revisit.evaluation.places import DEFAULT_SCENES, resolve_data
from revisit.evaluation.plan import Plan
from revisit.evaluation.records import StudyRecord
from revisit.evaluation.runner import Reporter, run
from revisit.evaluation.store import make_folder, read_answers, read_record, read_scores, slug, write_record
from revisit.methods import as_method
from revisit.models.images import open_image
from revisit.models.loading import load
from revisit.models.prompts import end_tokens, prepare
from revisit.paper.objects import ObjectVocabulary

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Model, Processor

Thing = TypeVar("Thing")
Result: TypeAlias = dict[str, Any]  # what a study measured, or a part of it, ready for JSON

FOLDER = "studies"  # below the output folder
CAPTIONS = "captions"  # the folder of the descriptions that studies read, below the output
NO_CAPTIONS = {"method": None, "max_new_tokens": None, "batch_size": None}  # settings of a study that decodes nothing


@dataclass(frozen=True)
class Subject:
    """A model and the pictures it is studied on: CHAIR's items of a folder, or of generated scenes."""

    model: str = "tiny"
    data: str = DEFAULT_SCENES
    limit: int | None = None
    output: str = "results"
    method: str = "greedy"  # how captions are decoded
    max_new_tokens: int = 512
    batch_size: int = 8
    dtype: str | None = None
    device_map: str | None = None

    @cached_property
    def folder(self) -> Path:
        """Where the pictures are."""
        return resolve_data(self.data, "chair", self.limit)

    @cached_property
    def items(self) -> list[Item]:
        """The pictures with their ground truth."""
        items = Chair().load(self.folder)[: self.limit]
        if not items:
            raise RevisitError(f"There are no CHAIR items in {self.folder}.")
        return items

    @cached_property
    def loaded(self) -> tuple[Model, Processor]:
        """(model, processor)."""
        device_map = self.device_map or ("cuda" if torch.cuda.is_available() else None)
        return load(self.model, dtype=self.dtype, device_map=device_map)

    @cached_property
    def vocabulary(self) -> ObjectVocabulary:
        """The object words that are single tokens of the model's tokenizer."""
        return ObjectVocabulary.of(self.loaded[1].tokenizer)

    @cached_property
    def end(self) -> set[int]:
        """The tokens that end an answer."""
        return end_tokens(self.loaded[0].generation_config)

    def inputs(self, items: Sequence[Item]) -> dict[str, Any]:
        """The model's inputs for a batch of items."""
        model, processor = self.loaded
        return dict(prepare(processor, [item.prompt for item in items], [images(item) for item in items], model.device))

    def captions(self, reporter: Reporter) -> list[Caption]:
        """The model's own descriptions, answered and stored by the runner, so that they are decoded once."""
        plan = Plan(
            models=(self.model,),
            methods=(as_method(self.method),),
            benchmarks=(Chair(),),
            data={"chair": self.folder},
            output=Path(self.output) / CAPTIONS,  # apart from the user's own results, which may be about other items
            limit=self.limit,
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            engine_options={"dtype": self.dtype, "device_map": self.device_map},
        )
        cell = run(plan, reporter)["cells"][-1]
        place = Path(self.output) / CAPTIONS / cell["path"]
        asked = read_scores(place).items  # id -> hash of prompt and picture
        stored = read_answers(place / "answers.jsonl")
        lines = {line.id: line for line in stored if asked.get(line.id) == line.item}
        return [Caption(item, lines[item.id].text, lines[item.id].tokens) for item in self.items]

    def settings(self) -> dict[str, Any]:
        """What decides the result, in JSON-ready form."""
        kept = asdict(self)
        kept.pop("output")
        return {**kept, "items": len(self.items)}


@dataclass(frozen=True)
class Caption:
    """One generated description with its tokens."""

    item: Item
    text: str
    tokens: tuple[int, ...]

    @property
    def truth(self) -> frozenset[str]:
        """The categories in the picture."""
        return frozenset(self.item.meta["ground_truth"])


def images(item: Item) -> list[Image]:
    """The item's pictures."""
    return [open_image(path) for path in item.images]


def spoken(caption: Caption, end: Sequence[int] | set[int]) -> tuple[int, ...]:
    """The caption's tokens without the one that ends it."""
    tokens = caption.tokens
    return tokens[:-1] if tokens and tokens[-1] in end else tokens


def save(subject: Subject, study: str, result: Result, extra: Result | None = None) -> Path:
    """Writes a study's file: what was measured, with the command, the settings and the machine."""
    folder = make_folder(Path(subject.output) / FOLDER)
    path = folder / f"{study}-{slug(subject.model)}-{slug(subject.data)}.json"
    write_record(
        path,
        {
            "study": study,
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command(),
            "settings": {**subject.settings(), **(extra or {})},
            "environment": environment(),
            "result": result,
        },
        StudyRecord,
    )
    return path


def read_study(path: Path) -> dict[str, Any]:
    """A study's file as plain data; raises RevisitError if it is damaged."""
    return read_record(path, StudyRecord).model_dump(mode="json", by_alias=True)


def command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join(command_line())


def track(reporter: Reporter, title: str, things: Sequence[Thing]) -> Iterator[Thing]:
    """The things one by one, with progress."""
    reporter.start(title, len(things), 0)
    for thing in things:
        yield thing
        reporter.advance(1)
