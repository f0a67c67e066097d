"""The model and images of a study, its captions, and the format of its numbers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor

from revisit.decoding.decode import Decoded, decode
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.chair import Chair
from revisit.eval.benchmarks.io.places import DEFAULT_SCENES, resolve_data
from revisit.eval.config import EvalConfig
from revisit.eval.report.document import Cell, Text
from revisit.eval.run import Reporter, run
from revisit.eval.spec import command_line
from revisit.explain.prefill import PromptStates, force
from revisit.io.files import inside
from revisit.io.images import open_image
from revisit.io.records import Fields
from revisit.methods import as_method
from revisit.models.config import EMBEDDED, describe_model
from revisit.models.loading import load
from revisit.models.outputs import end_tokens
from revisit.models.parts import ModelParts, vision_mask
from revisit.models.prompts import prepare
from revisit.paper.objects import ObjectVocabulary
from revisit.registry import Count

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Inputs, Model, Processor

T = TypeVar("T")
Result: TypeAlias = Fields  # the measurements of a study, as JSON values
Stored: TypeAlias = Mapping[str, Any]  # the same, read from a file

CAPTIONS = "captions"  # folder of the studied captions, below the output


class Subject(EvalConfig):
    """A model and the images of a study: CHAIR's items in a folder, or generated scenes.

    The first method decodes the captions; some studies compare several.
    """

    model: str = EMBEDDED
    data: str = DEFAULT_SCENES
    method: Any = ("greedy",)
    max_new_tokens: Count = 512

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods by name, with their settings."""
        return tuple(self.method)

    @cached_property
    def folder(self) -> Path:
        """The folder of the images."""
        return resolve_data(self.data, "chair", self.limit)

    @cached_property
    def items(self) -> list[Item]:
        """The images with their ground truth."""
        return Chair().load(self.folder)[: self.limit]

    @cached_property
    def loaded(self) -> tuple[Model, Processor]:
        """The model and its processor."""
        return load(self.model, dtype=self.dtype, device_map=self.device_map)

    @cached_property
    def vocabulary(self) -> ObjectVocabulary:
        """The object words that are single tokens of the model's tokenizer."""
        return ObjectVocabulary.of(self.loaded[1].tokenizer)

    def inputs(self, items: Sequence[Item]) -> Fields:
        """Return the model's inputs for a batch of items."""
        model, processor = self.loaded
        return dict(
            prepare(processor, [item.prompt for item in items], [images(item) for item in items], device=model.device)
        )

    def decode(
        self, method: Method, reporter: Reporter, title: str, items: Sequence[Item] | None = None
    ) -> Iterator[tuple[Item, Decoded]]:
        """Decode the items batch by batch and record every step; yield each item with its answer."""
        items, settings = self.items if items is None else items, Decoding(max_new_tokens=self.max_new_tokens)
        for start in track(reporter, title, range(0, len(items), self.batch_size)):
            batch = items[start : start + self.batch_size]
            yield from zip(batch, decode(*self.loaded, self.inputs(batch), method, settings, record=True), strict=True)

    def forced(self, caption: Caption, *, vision: bool = True) -> PromptStates:
        """Return the states that predict each token of a caption, with or without vision tokens in the prompt."""
        model = self.loaded[0]
        inputs = self.inputs([caption.item])
        if not vision:
            inputs = without_vision(inputs, ModelParts.of(model).vision_ids)
        return force(model, inputs, [caption.tokens])[0]

    def captions(self, reporter: Reporter) -> list[Caption]:
        """Return the model's captions of all items; they are decoded once and stored as an evaluation."""
        changes = {"benchmark": Chair(), "data": str(self.folder), "out": str(inside(self.out, CAPTIONS))}
        method = as_method(self.methods[0], describe_model(self.model))
        (log,) = run(self.replace(**changes, method=method), reporter)
        end = end_tokens(self.loaded[0].generation_config)
        answers = {answer.id: answer.tokens for answer in log.current()}
        texts = {name: tokens[:-1] if tokens and tokens[-1] in end else tokens for name, tokens in answers.items()}
        return [Caption(item, texts[item.id]) for item in self.items if item.id in texts]

    def settings(self) -> Fields:
        """Return the settings that affect the result, as JSON values."""
        shown = {"model": self.model, "data": self.data, "limit": self.limit}
        if self.methods:
            lengths = {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
            shown |= {"methods": "; ".join(self.methods), **lengths}
        return {**shown, "dtype": self.dtype, "device_map": self.device_map, "items": len(self.items)}


@dataclass(frozen=True)
class Caption:
    """A generated caption: its tokens, without the end token."""

    item: Item
    tokens: tuple[int, ...]

    @property
    def truth(self) -> frozenset[str]:
        """The categories in the image."""
        return frozenset(self.item.meta["ground_truth"])


def images(item: Item) -> list[Image]:
    """Open the item's images."""
    return [open_image(path) for path in item.images]


def command() -> str:
    """Return the command line of this process."""
    return shlex.join(command_line())


def provenance(about: Stored) -> Text:
    """Return the command and settings of a study or an ablation."""
    kept = {k: v for k, v in about["settings"].items() if v is not None}
    return Text(f"Made by {about['command']} ({', '.join(f'{k} {v}' for k, v in kept.items())}).", kind="made")


def track(reporter: Reporter, title: str, values: Sequence[T]) -> Iterator[T]:
    """Yield the values one by one and report progress."""
    reporter.start(title, len(values), 0)
    for value in values:
        yield value
        reporter.advance(1)


# -- printing ------------------------------------------------------------------------------------------------------


def percent(value: float | None, decimals: int = 2) -> str:
    """Format a share in percent; a dash if it is undefined."""
    return number(None if value is None else 100 * value, decimals)


def number(value: float | None, decimals: int = 2) -> str:
    """Format a number; a dash if it is undefined."""
    return "–" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def share(row: Stored, key: str = "recall", decimals: int = 1) -> Cell:
    """Format a share in percent, with its 95 % interval if it has one."""
    low, high = (percent(row[end], decimals) for end in ("low", "high"))
    return Cell(percent(row[key], decimals), small="" if row["low"] is None else f"[{low}, {high}]")


def captions_text(result: Stored) -> str:
    """Describe the captions of a study, and its vocabulary."""
    words = result["vocabulary"]
    return (
        f"{result['captions']} captions, {result['hallucinated_captions']} of them with a hallucinated object; object "
        f"vocabulary: {words['words']} words of {words['categories']} categories. "
    )


def without_vision(inputs: Inputs, vision_ids: Sequence[int]) -> Fields:
    """Return the inputs of one prompt without its vision tokens and its image."""
    ids = inputs["input_ids"]
    keep = ~vision_mask(ids, vision_ids)[0]  # (T,)
    return {
        name: value[:, keep] for name, value in inputs.items() if isinstance(value, Tensor) and value.shape == ids.shape
    }
