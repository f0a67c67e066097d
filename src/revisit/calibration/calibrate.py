"""Find the floor that keeps a promised rate of mistakes: decode captions with it, and learn then test.

Captions are stored as they are decoded, so an interrupted calibration resumes. A caption is decoded at a floor only if it differs from
the one at the floor before and from the one without a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit import __version__
from revisit.calibration.bounds import Outcome, certified_rate, conformal_threshold, fixed_sequence, smallest_rate
from revisit.decoding.decode import Decoded, decode
from revisit.decoding.method import Method
from revisit.decoding.row_guard import RowGuard
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.chair import parse_caption
from revisit.explain.check import check_many
from revisit.forward.support import check_layer
from revisit.guard.rates import Loss, Rate, dtype_of, model_fingerprint
from revisit.io.files import LineFile, digest, file_digest
from revisit.io.images import open_image
from revisit.models.config import name_of
from revisit.models.names import names_of
from revisit.models.parts import ModelParts
from revisit.models.prompts import prepare
from revisit.models.spelling import spelling_of
from revisit.settings import cache_folder

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

# The strictest first; fixed, because a choice after seeing the captions would break the promise.
FLOORS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.09, 0.06, 0.04, 0.02, 0.01, 0.0)


@dataclass(frozen=True)
class Caption:
    """The caption of one image at one floor."""

    text: str
    tokens: tuple[int, ...]
    support: dict[str, float]  # of each category; empty without a floor
    lowest_floor: float  # floors down to this one would not change it

    @classmethod
    def of(cls, answer: Decoded) -> Caption:
        row = answer.trace.rows[0]
        return cls(answer.text, answer.tokens, row.support, row.lowest_floor)


@dataclass(frozen=True)
class Price:
    """What a floor costs on the calibration images."""

    floor: float
    risk: float  # the mean loss
    recall: float
    words: float
    decoded: int  # captions that had to be decoded


@dataclass
class Calibration:
    """One calibration of a model and a method.

    Args:
        method: The method, without a floor; `names` is its list.
        items: Images with the names of the objects in each.
        show: Called with the price of every floor.
        advance: Called with the number of captions that were decoded.
    """

    model: Model
    processor: Processor
    items: Sequence[Item]
    method: Method
    risk: float
    confidence: float
    loss: Loss
    prompt: str
    max_new_tokens: int
    batch_size: int = 8
    show: Callable[[Price], None] = lambda _: None
    advance: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self.truth = {item.id: frozenset(item.meta["ground_truth"]) for item in self.items}
        self._captions: dict[tuple[str, float], Caption] = {}

    @cached_property
    def layer(self) -> int:
        """The layer whose vision tokens are read."""
        return check_layer(self.model, ModelParts.of(self.model).depth, self.method.floor_layer)

    @cached_property
    def data(self) -> str:
        """The hash of the images and their labels."""
        return digest([[file_digest(item.images[0]), sorted(self.truth[item.id])] for item in self.items])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that a promised rate depends on."""
        return {
            "model": name_of(self.model),
            "fingerprint": model_fingerprint(self.model, self.processor),
            "dtype": dtype_of(self.model),
            "layer": self.layer,
            "method": self.method.name,
            "prompt": self.prompt,
            "max_new_tokens": self.max_new_tokens,
            "data": self.data,
            "revisit": __version__,
        }

    @property
    def path(self) -> Path:
        """The file of the captions."""
        return cache_folder() / "calibrations" / f"{digest([self.identity, self.method.settings()])[:20]}.jsonl"

    def run_floor(self) -> tuple[Rate | None, float]:
        """Return the certified rate, if a floor reaches it, and the smallest rate that the strictest floor certifies."""
        with closing(LineFile(self.path)) as file:
            self._read(file)
            base = self._at(0.0, file)
            self.show(self._price(0.0, len(base)))
            certified = fixed_sequence(self._outcomes(file), self.risk, self.confidence, self.loss)
        if not certified:
            return None, certified_rate(self._losses(FLOORS[0]), self.confidence, self.loss)
        return self._sealed("floor", self.confidence, certified[-1].floor, sum(certified[-1].losses)), self.risk

    def run_filter(self) -> Rate | None:
        """Return the threshold for removing sentences from finished texts, if one reaches the rate."""
        with closing(LineFile(self.path)) as file:
            self._read(file)
            self.show(self._price(0.0, len(self._at(0.0, file))))
        critical = []
        for item, check in zip(self.items, self._checks(), strict=True):
            kept = [(sentence, low) for sentence, low in check.sentences()] if check is not None else []
            wrong = [low for sentence, low in kept if not self.named(sentence) <= self.truth[item.id]]
            critical.append(max(wrong, default=-1.0))
        threshold = conformal_threshold(critical, self.risk)
        if threshold is None or threshold > 1:
            return None
        threshold = max(threshold, 0.0)
        return self._sealed("expectation", None, threshold, sum(value >= threshold for value in critical))

    def _checks(self) -> Iterator[Any]:
        texts = [self._captions[item.id, 0.0].text for item in self.items]
        images = [item.images[0] for item in self.items]
        found = check_many(
            (self.model, self.processor), images, texts, self.prompt, batch_size=self.batch_size, errors="return"
        )
        return (None if isinstance(check, RevisitError) else check for check in found)

    def _sealed(self, bound: Any, confidence: float | None, threshold: float, mistakes: float) -> Rate:
        floor = threshold if bound == "floor" else 0.0
        method = self.method.replace(floor=floor, floor_layer=self.layer)
        return Rate.sealed(
            **self.identity,
            bound=bound,
            risk=self.risk,
            confidence=confidence,
            loss=self.loss,
            settings=method.settings(),
            threshold=threshold,
            images=len(self.items),
            mistakes=mistakes,
        )

    # -- captions ---------------------------------------------------------------------------------------------------

    def _read(self, file: LineFile) -> None:
        for line in file.objects:
            caption = Caption(line["text"], tuple(line["tokens"]), line["support"], line["lowest_floor"])
            self._captions[line["image"], line["floor"]] = caption

    def _at(self, floor: float, file: LineFile) -> list[Item]:
        """Decode the captions at a floor that are missing; return their images."""
        left = [item for item in self.items if (item.id, floor) not in self._captions]
        method = self.method.replace(floor=floor, floor_layer=self.layer)
        settings = Decoding(max_new_tokens=self.max_new_tokens)
        for start in range(0, len(left), self.batch_size):
            batch = left[start : start + self.batch_size]
            images = [[open_image(item.images[0])] for item in batch]
            inputs = prepare(self.processor, [self.prompt] * len(batch), images, device=self.model.device)
            found = decode(self.model, self.processor, inputs, method, settings)
            self._store(file, floor, {item.id: Caption.of(answer) for item, answer in zip(batch, found, strict=True)})
            self.advance(len(batch))
        return left

    def _store(self, file: LineFile, floor: float, captions: dict[str, Caption]) -> None:
        file.append([{"image": image, "floor": floor, **vars(caption)} for image, caption in captions.items()])
        self._captions |= {(image, floor): caption for image, caption in captions.items()}

    def _outcomes(self, file: LineFile) -> Iterator[Outcome]:
        """Yield the losses at every floor, the strictest first."""
        for number, floor in enumerate(FLOORS):
            before = FLOORS[number - 1] if number else None
            known = {
                item.id: self._known(item.id, floor, before)
                for item in self.items
                if (item.id, floor) not in self._captions
            }
            self._store(file, floor, {image: caption for image, caption in known.items() if caption is not None})
            decoded = len(self._at(floor, file))
            if floor:
                self.show(self._price(floor, decoded))
            yield Outcome(floor, self._losses(floor))

    def _known(self, image: str, floor: float, before: float | None) -> Caption | None:
        """Return the caption at a floor if it is that of the floor before, or the one without a floor; None if it must be decoded."""
        if before is None or not floor:
            return None
        last, free = self._captions[image, before], self._captions[image, 0.0]
        if last.lowest_floor < floor:
            return last
        guard = RowGuard(spelling_of(self.processor.tokenizer, self.method.names), last.support, floor)
        return Caption(free.text, free.tokens, last.support, 0.0) if guard.allows(free.tokens) else None

    # -- losses -----------------------------------------------------------------------------------------------------

    def named(self, text: str) -> set[str]:
        """Return the categories that a text names."""
        return set(names_of(self.method.names).find(text) if self.method.names else parse_caption(text).nodes)

    def _losses(self, floor: float) -> tuple[float, ...]:
        losses = []
        for item in self.items:
            named = self.named(self._captions[item.id, floor].text)
            absent = len(named - self.truth[item.id])
            losses.append(float(absent > 0) if self.loss == "caption" else absent / max(1, len(named)))
        return tuple(losses)

    def _price(self, floor: float, decoded: int) -> Price:
        texts = {item.id: self._captions[item.id, floor].text for item in self.items}
        recalled = sum(len(self.named(text) & self.truth[image]) for image, text in texts.items())
        losses = self._losses(floor)
        return Price(
            floor,
            sum(losses) / len(losses),
            recalled / max(1, sum(map(len, self.truth.values()))),
            sum(len(text.split()) for text in texts.values()) / len(texts),
            decoded,
        )


def require_images(count: int, risk: float, confidence: float, loss: Loss, bound: str) -> None:
    """Raise RevisitError if so few images cannot certify a rate, whatever the captions are."""
    smallest = smallest_rate(count, confidence, loss) if bound == "floor" else 1 / (count + 1)
    if smallest > risk + 1e-12:
        raise RevisitError(
            f"{count} images can certify a risk of {smallest:.3f} at best, even without any mistake, not {risk:g}: use more images."
        )
