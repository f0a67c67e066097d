"""A decode as it is shown: its images, where the vision tokens lie on them, and each method's answer step by step."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.decoding.trace import StepRecord, Trace
    from revisit.models.geometry import Layout

SHOWN_CANDIDATES = 12


@dataclass(frozen=True)
class Candidate:
    """One token of the plausible set with its probability before, in the vision token, and after."""

    token: int
    text: str
    base: float
    vision: float | None
    final: float


@dataclass
class Step:
    """One token of an answer and how it came about."""

    text: str  # what it adds to the answer
    token: int
    shift: float = 0.0  # share of probability that the method moved, 0 to 1 (total variation)
    instead_of: str | None = None  # what the model alone would have put here, where the method's favorite is another
    set_size: int = 0
    layer: int | None = None
    index: int | None = None  # the vision token that was selected
    divergence: float | None = None
    weight: float | None = None  # of the vision side
    heat: np.ndarray | None = None  # (vision tokens,) divergence of each, at its best layer
    candidates: list[Candidate] = field(default_factory=list)
    differs: bool = False  # not in the answer it is compared with
    wrong: bool = False  # part of a word for an object that is known not to be in the picture


@dataclass
class MethodAnswer:
    """What one method said."""

    method: dict[str, Any]
    steps: list[Step]
    text: str
    layers: tuple[int, ...] = ()
    seconds: float | None = None
    trace: Trace | None = None  # what was recorded, where it is kept

    @property
    def name(self) -> str:
        return str(self.method.get("name", "greedy"))

    @property
    def changed(self) -> list[int]:
        """Steps at which the method's favorite was not the model's."""
        return [number for number, step in enumerate(self.steps) if step.instead_of is not None]


@dataclass
class Decode:
    """One question about one or more images, answered by one or more methods."""

    images: list[Image]
    prompt: str
    model: str
    layout: Layout
    answers: list[MethodAnswer]
    shown: tuple[str, ...] | None = None  # the objects that are in the picture, where that is known
    patch_words: list[list[tuple[str, float]]] | None = None  # per vision token, its likeliest tokens at the last layer

    def __post_init__(self) -> None:
        mark_differences(self.answers)
        if self.shown is not None:
            mark_wrong(self.answers, self.shown)


def explain(
    model: Any,
    processor: Any,
    images: Sequence[Image],
    prompt: str,
    methods: Sequence[Method],
    *,
    model_name: str = "",
    shown: Sequence[str] | None = None,
    **generate_kwargs: Any,
) -> Decode:
    """Decode one prompt about these images with each method, and keep everything that can be shown.

    `shown` names the objects that are in the images, where that is known: words for other objects are marked as wrong.
    """
    from revisit.models.prompts import prepare

    if not methods:
        raise RevisitError("No decoding method was given, so there is nothing to explain.")
    config = generate_kwargs.get("generation_config") or model.generation_config
    if (generate_kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1) > 1:
        raise RevisitError(
            "Beam search cannot be shown step by step, because beams change places; leave out num_beams."
        )
    if (generate_kwargs.get("num_return_sequences") or 1) != 1:
        raise RevisitError(
            "One answer is shown for each method: leave out num_return_sequences, and ask again for another."
        )
    inputs = prepare(processor, [prompt], [list(images)], model.device)
    for name in generate_kwargs:
        if name in ("method", "trace", "custom_generate", *inputs):
            raise RevisitError(f"{name} is given to generate already; leave it out (the trace is always kept).")
    answers = [answer_with(model, processor, inputs, method, **generate_kwargs) for method in methods]
    return Decode(
        list(images),
        prompt,
        model_name or name_of(model),
        layout_of(model, processor, images, inputs),
        answers,
        None if shown is None else tuple(shown),
        patch_words(model, processor, inputs),
    )


def patch_words(model: Any, processor: Any, inputs: Any, best: int = 5) -> list[list[tuple[str, float]]]:
    """What every vision token of one prompt says at the last layer: its likeliest tokens with their probabilities."""
    from revisit.explain.lens import vision_states, whole_vocabulary

    head, states, _ = vision_states(model, inputs, "last", "none")
    reading = whole_vocabulary(head, states, getattr(processor, "tokenizer", processor), best)
    return [
        [(reading.entries[int(number)], float(p)) for number, p in zip(*pair, strict=True)]
        for pair in zip(reading.top[-1], reading.chance[-1], strict=True)
    ]


def name_of(model: Any) -> str:
    """What to call a model: its hub id, or the name of its folder; never where on this machine it lies."""
    from revisit.models.config import short_name

    where = str(getattr(model.config, "_name_or_path", ""))
    if where and Path(where).is_dir():
        return short_name(Path(where).resolve())
    return where or type(model).__name__


def answer_with(model: Any, processor: Any, inputs: Any, method: Method, **generate_kwargs: Any) -> MethodAnswer:
    """Decode prepared inputs (one row) with a method, recording everything."""
    from revisit.decoding.loop import generate
    from revisit.decoding.trace import Trace
    from revisit.models.prompts import new_tokens

    trace = Trace(record=True)
    started = time.perf_counter()
    output = generate(model, **inputs, method=method, trace=trace, **generate_kwargs)
    seconds = time.perf_counter() - started
    return answer_of(processor, new_tokens(output, inputs)[0].tolist(), trace, seconds=seconds)


def layout_of(model: Any, processor: Any, images: Sequence[Image], inputs: Any) -> Layout:
    """Where the vision tokens of one prompt lie on its images."""
    from revisit.models.geometry import layout
    from revisit.models.parts import ModelParts
    from revisit.taps.vision import vision_mask

    tokens = int(vision_mask(inputs["input_ids"][:1], ModelParts.of(model).vision_ids).sum())
    sizes = [image.size for image in images]
    return layout(model.config, getattr(processor, "image_processor", None), sizes, tokens, dict(inputs))


def answer_of(
    processor: Any, tokens: Sequence[int], trace: Trace, row: int = 0, seconds: float | None = None
) -> MethodAnswer:
    """The answer of one row: its new tokens with what the trace recorded about each."""
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = _until_end(tokens, trace.rows[row].steps)
    records = trace.rows[row].records
    steps = [
        step_of(tokenizer, token, text, records[number] if number < len(records) else None, trace.method)
        for number, (token, text) in enumerate(zip(tokens, token_texts(tokenizer, tokens), strict=True))
    ]
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return MethodAnswer(dict(trace.method), steps, text, tuple(trace.layers), seconds, trace)


def _until_end(tokens: Sequence[int], steps: int) -> list[int]:
    """Without the padding after a row's end."""
    return list(tokens[:steps]) if steps else list(tokens)


def step_of(tokenizer: Any, token: int, text: str, record: StepRecord | None, method: dict[str, Any]) -> Step:
    """One step as it is shown; without a record, its text alone."""
    if record is None:
        return Step(text, token)
    favorite = max(range(len(record.base)), key=record.base.__getitem__)
    best = max(range(len(record.final)), key=record.final.__getitem__)
    shown = _shown(record, token, favorite)
    candidates = [
        Candidate(
            record.ids[k],
            token_text(tokenizer, record.ids[k]),
            record.base[k],
            record.vision[k] if record.vision is not None else None,
            record.final[k],
        )
        for k in shown
    ]
    return Step(
        text=text,
        token=token,
        shift=shift(record.base, record.final),
        instead_of=token_text(tokenizer, record.ids[favorite]) if record.ids[best] != record.ids[favorite] else None,
        set_size=record.set_size,
        layer=record.layer,
        index=record.index,
        divergence=record.divergence,
        weight=record.weight,
        heat=_heat(record, method),
        candidates=candidates,
    )


def _shown(record: StepRecord, token: int, favorite: int) -> list[int]:
    """The best candidates after the method, always with the chosen token and the model's own favorite."""
    order = sorted(range(len(record.ids)), key=lambda k: -record.final[k])
    needed = [k for k in order[SHOWN_CANDIDATES:] if k == favorite or record.ids[k] == token]
    return order[: SHOWN_CANDIDATES - len(needed)] + needed


def _heat(record: StepRecord, method: dict[str, Any]) -> np.ndarray | None:
    """Each vision token's divergence at the layer where it would be selected.  (layers, N) -> (N,)"""
    if record.divergences is None:
        return None
    table = record.divergences.numpy()
    import numpy as np

    filled = np.where(np.isnan(table), np.inf, table)
    if method.get("select") == "max":
        return np.where(np.isnan(table), -np.inf, table).max(0)  # type: ignore[no-any-return]
    return filled.min(0)  # type: ignore[no-any-return]


def shift(base: Sequence[float], final: Sequence[float]) -> float:
    """Half the summed change of probability; what lies outside the listed candidates counts as one."""
    listed = sum(abs(a - b) for a, b in zip(base, final, strict=True))
    return min(1.0, 0.5 * (listed + abs(sum(base) - sum(final))))


class TokenTexts:
    """What each token adds to the text, one after the other; bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens, self.before = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        self.tokens.append(token)
        now = self.tokenizer.decode(self.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if now.endswith("\ufffd"):
            return ""
        before, self.before = self.before, now
        return now[len(before) :] if now.startswith(before) else token_text(self.tokenizer, token)


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text."""
    reader = TokenTexts(tokenizer)
    return [reader.add(token) for token in tokens]


def token_text(tokenizer: Any, token: int) -> str:
    """One token alone, with the blank that it may begin with."""
    raw = tokenizer.convert_ids_to_tokens(token)
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" "):
        text = " " + text
    return text or (raw if isinstance(raw, str) else f"#{token}")  # a vocabulary may be padded beyond its tokens


def printable(text: str) -> str:
    """A token that shows: blanks around it dropped, line breaks and what does not print made visible."""
    bare = text.strip()
    return (bare if bare.isprintable() else repr(bare)[1:-1]) or repr(text)


def mark_differences(answers: Sequence[MethodAnswer]) -> None:
    """Mark the tokens that an answer does not share with the plain one (or the first, if none is plain)."""
    if len(answers) < 2:
        return
    reference = next((answer for answer in answers if answer.name == "greedy"), answers[0])
    wanted = [step.token for step in reference.steps]
    for answer in answers:
        if answer is reference:
            continue
        matcher = difflib.SequenceMatcher(None, wanted, [step.token for step in answer.steps], autojunk=False)
        for kind, a0, a1, b0, b1 in matcher.get_opcodes():
            if kind != "equal":
                for step in [*reference.steps[a0:a1], *answer.steps[b0:b1]]:
                    step.differs = True


def mark_wrong(answers: Sequence[MethodAnswer], shown: Sequence[str]) -> None:
    """Mark the tokens of words for objects that are not among those shown."""
    for answer in answers:
        spans = wrong_spans("".join(step.text for step in answer.steps), shown)
        start = 0
        for step in answer.steps:
            end = start + len(step.text)
            step.wrong = any(start < last and end > first for first, last in spans)
            start = end


def wrong_spans(text: str, shown: Sequence[str]) -> list[tuple[int, int]]:
    """Where a text has words for objects (CHAIR's words, singular or plural) that are not among those shown."""
    from revisit.benchmarks.chair_words import WORDS

    present = {WORDS.get(name, name) for name in shown}
    return [found.span() for found in object_words().finditer(text) if WORDS[found.group(1).lower()] not in present]


@cache
def object_words() -> re.Pattern[str]:
    """CHAIR's words with an optional plural ending, the longest first."""
    from revisit.benchmarks.chair_words import WORDS

    words = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
    return re.compile(rf"\b({words})(?:e?s)?\b", re.IGNORECASE)


def label(method: dict[str, Any]) -> str:
    """A method with the settings that are not its defaults."""
    own = own_settings(method)
    return str(method.get("name", "greedy")) + (f" ({own})" if own else "")


def own_settings(method: dict[str, Any]) -> str:
    """The settings of a method that are not its defaults, as text; empty if there are none."""
    from revisit import methods

    try:
        defaults = methods.get(str(method.get("name", "greedy"))).settings()
    except (RevisitError, TypeError):
        defaults = {}
    own = {k: v for k, v in method.items() if k != "name" and k in defaults and defaults[k] != v}
    return ", ".join(f"{k}={methods.value_text(v)}" for k, v in own.items())
