"""A decode as it is shown: its images, the positions of the vision tokens on them, and each method's answer step by step."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from revisit.benchmarks.chair_words import WORDS, object_words
from revisit.decoding.loop import beams_asked, generate
from revisit.decoding.method import Method, method_text
from revisit.decoding.trace import StepRecord, Trace
from revisit.errors import RevisitError
from revisit.explain.check import settings_of
from revisit.explain.lens import whole_vocabulary
from revisit.explain.prefill import PrefillStates, unfamiliar_images, watch_prefill
from revisit.explain.support import row_layout
from revisit.explain.tokens import token_text, token_texts
from revisit.models.config import name_of
from revisit.models.parts import ModelParts
from revisit.models.prompts import new_tokens, prepare

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.geometry import Layout
    from revisit.models.types import Inputs, Model, Processor, Tokenizer

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
class TokenStep:
    """One token of an answer and how it was chosen."""

    text: str  # what it adds to the answer
    token: int
    shift: float = 0.0  # share of probability that the method moved, 0 to 1 (total variation)
    instead_of: str | None = None  # what the model alone would have put here, where the method's best token is another
    plausible_tokens: int = 0
    layer: int | None = None
    vision_token: int | None = None  # the one that was selected, from 0
    divergence: float | None = None
    weight: float | None = None  # of the vision side
    heat: np.ndarray | None = None  # (vision tokens,) divergence of each, at its best layer
    candidates: list[Candidate] = field(default_factory=list)
    differs: bool = False  # not in the answer it is compared with
    wrong: bool = False  # part of a word for an object that is known not to be in the picture


@dataclass
class MethodOutput:
    """What one method wrote, step by step."""

    method: dict[str, Any]
    steps: list[TokenStep]
    text: str
    layers: tuple[int, ...] = ()
    trace: Trace | None = None  # what was recorded

    @property
    def name(self) -> str:
        return str(self.method.get("name", "greedy"))

    @property
    def changed(self) -> list[int]:
        """Steps at which the method's best token was not the model's."""
        return [number for number, step in enumerate(self.steps) if step.instead_of is not None]


@dataclass
class Decode:
    """One question about one or more images, answered by one or more methods. It does not keep the model alive."""

    images: list[Image]
    prompt: str
    model: str
    layout: Layout
    answers: list[MethodOutput]
    objects: tuple[str, ...] | None = None  # that are in the picture, where that is known
    vision: PrefillStates | None = None  # of the first method's prefill
    tokenizer: Tokenizer | None = None
    unfamiliar: tuple[int, ...] = ()  # numbers of the images that the embedded model cannot know

    def __post_init__(self) -> None:
        mark_differences(self.answers)
        if self.objects is not None:
            mark_wrong(self.answers, self.objects)

    @cached_property
    def patch_words(self) -> list[list[tuple[str, float]]] | None:
        """The likeliest tokens of each vision token at the last layer, computed when first asked for.

        None if the states were not recorded, or the model was released before.
        """
        head = None if self.vision is None else self.vision.head()
        if head is None or self.vision is None or self.tokenizer is None:
            return None
        reading = whole_vocabulary(head, self.vision.states[-1:], self.tokenizer, best=5)
        pairs = zip(reading.top[-1].tolist(), reading.chance[-1].tolist(), strict=True)
        return [[(reading.entries[n], p) for n, p in zip(*pair, strict=True)] for pair in pairs]

    @property
    def no_patch_words(self) -> str:
        """Why `patch_words` is None; empty if it is not."""
        if self.patch_words is not None:
            return ""
        if self.vision is None:
            return "What each patch says was not recorded."
        return "What each patch says is not known: the model was released before this page was written."


def explain(
    model: Model, processor: Processor, images: Sequence[Image], prompt: str, methods: Sequence[Method], **options: Any
) -> Decode:
    """`explain_many` for one picture, or several that share a prompt."""
    return explain_many(model, processor, [images], prompt, methods, **options)[0]


def explain_many(
    model: Model,
    processor: Processor,
    pictures: Sequence[Sequence[Image]],
    prompt: str,
    methods: Sequence[Method],
    *,
    model_name: str = "",
    objects: Sequence[str] | None = None,
    **generate_kwargs: Any,
) -> list[Decode]:
    """Decode one prompt about each of these pictures with each method, as one batch, and record every step.

    Each method takes one vision pass and one prefill (a contrastive method also those of its own branch). Vision passes are
    not shared, because transformers refuses precomputed image features together with the pixels that some methods need.

    Args:
        model: A loaded model.
        processor: Its processor.
        pictures: For each row of the batch the images of its prompt, in order.
        prompt: What to ask.
        methods: Decoding methods; the vision tokens' states are kept from the first one's prefill.
        model_name: What to call the model.
        objects: The objects in the images, if known; words for other objects are marked as wrong.
        **generate_kwargs: Passed to `generate`.

    Returns:
        For each row its answers with their steps.

    Raises:
        RevisitError: If there is no method, or the arguments ask for beams or several answers.
    """
    if not methods:
        raise RevisitError("There is nothing to explain without a decoding method.")
    if beams_asked(model, generate_kwargs) > 1:
        raise RevisitError(
            "Beam search cannot be shown step by step, because beams are reordered; remove num_beams, or use revisit.generate."
        )
    if (generate_kwargs.get("num_return_sequences") or 1) != 1:
        raise RevisitError("Only one answer per method can be shown: remove num_return_sequences.")
    inputs = prepare(processor, [prompt] * len(pictures), [list(images) for images in pictures], model.device)
    for name in generate_kwargs:
        if name in ("method", "trace", "processor", "custom_generate", *inputs):
            raise RevisitError(f"{name} is set by `explain`; remove it (the trace is always kept).")
    layers = sorted({0, settings_of(model)[0]["layer"], ModelParts.of(model).depth})
    with watch_prefill(model, inputs, layers) as seen:
        first = answers_with(model, processor, inputs, methods[0], **generate_kwargs)
    others = [answers_with(model, processor, inputs, method, **generate_kwargs) for method in methods[1:]]
    name = model_name or name_of(model)
    decodes = []
    for row, images in enumerate(pictures):
        own = seen.of_row(row)
        layout = row_layout(model, processor, inputs, row, pictures, own.states.shape[1])
        answers = [answers[row] for answers in (first, *others)]
        for answer in answers:
            add_patches(answer.trace, layout)
        decodes.append(
            Decode(
                list(images),
                prompt,
                name,
                layout,
                answers,
                None if objects is None else tuple(objects),
                own,
                processor.tokenizer,
                unfamiliar_images(name, own, len(images)),
            )
        )
    return decodes


def refuse_beams(method: Method) -> None:
    """Raises RevisitError for a method that searches with beams, whose answers have no steps to show."""
    if method.own_beams > 1:
        raise RevisitError(
            f"{method.name} uses beam search, so its answer cannot be shown step by step: use another method."
        )


def answers_with(
    model: Model, processor: Processor, inputs: Inputs, method: Method, **generate_kwargs: Any
) -> list[MethodOutput]:
    """Decode prepared inputs with a method, and record every step of every row."""
    refuse_beams(method)
    trace = Trace(record=True)
    output = generate(model, **inputs, method=method, trace=trace, processor=processor, **generate_kwargs)
    rows = enumerate(new_tokens(output, inputs).tolist())
    return [answer_of(processor.tokenizer, tokens, trace.of_row(row)) for row, tokens in rows]


def add_patches(trace: Trace | None, layout: Layout) -> None:
    """Fill in the row and column of every selected patch, where they are known."""
    for record in [record for row in trace.rows for record in row.records] if trace is not None else []:
        region = None if record.vision_token is None else layout.region(record.vision_token)
        if region is not None:
            record.patch_row, record.patch_col = region.row + 1, region.column + 1


def answer_of(tokenizer: Tokenizer, tokens: Sequence[int], trace: Trace) -> MethodOutput:
    """The answer of a trace's first row: its new tokens with what the trace recorded about each."""
    row = trace.rows[0]
    tokens = list(tokens[: row.step_count or None])  # without the padding after its end
    records = [*row.records, *[None] * (len(tokens) - len(row.records))]
    steps = [
        step_of(tokenizer, token, text, record, trace.method)
        for token, text, record in zip(tokens, token_texts(tokenizer, tokens), records, strict=False)
    ]
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return MethodOutput(dict(trace.method), steps, text, tuple(trace.layers), trace)


def step_of(
    tokenizer: Tokenizer, token: int, text: str, record: StepRecord | None, method: dict[str, Any]
) -> TokenStep:
    """One step as it is shown; without a record, its text alone."""
    if record is None:
        return TokenStep(text, token)
    candidates = [
        Candidate(
            record.ids[k],
            token_text(tokenizer, record.ids[k]),
            record.base[k],
            record.vision[k] if record.vision is not None else None,
            record.final[k],
        )
        for k in _shown(record, token)
    ]
    return TokenStep(
        text=text,
        token=token,
        shift=shift(record.base, record.final),
        instead_of=None if record.instead_of is None else token_text(tokenizer, record.instead_of),
        plausible_tokens=record.plausible_tokens,
        layer=record.layer,
        vision_token=record.vision_token,
        divergence=record.divergence,
        weight=record.weight,
        heat=_heat(record, method),
        candidates=candidates,
    )


def _shown(record: StepRecord, token: int) -> list[int]:
    """The best candidates after the method, always with the chosen token and the best of model and vision token."""
    rest = range(SHOWN_CANDIDATES, len(record.ids))
    seen = record.ids[int(np.argmax(record.vision))] if record.vision else None
    needed = [k for k in rest if record.ids[k] in (token, record.instead_of, seen)]
    return [*range(min(SHOWN_CANDIDATES - len(needed), len(record.ids))), *needed]


def _heat(record: StepRecord, method: dict[str, Any]) -> np.ndarray | None:
    """Each vision token's divergence at the layer where it would be selected.  (layers, N) -> (N,)"""
    if record.divergences is None:
        return None
    table = record.divergences.numpy()
    if seeks_far(method):
        return np.where(np.isnan(table), -np.inf, table).max(0)  # type: ignore[no-any-return]
    return np.where(np.isnan(table), np.inf, table).min(0)  # type: ignore[no-any-return]


def seeks_far(method: Mapping[str, Any]) -> bool:
    """Whether the method seeks the vision token with the largest divergence, not the smallest."""
    return method.get("select") == "max"


def shift(base: Sequence[float], final: Sequence[float]) -> float:
    """Half the summed change of probability; everything outside the listed candidates counts as one."""
    listed = sum(abs(a - b) for a, b in zip(base, final, strict=True))
    return min(1.0, 0.5 * (listed + abs(sum(base) - sum(final))))


def mark_differences(answers: Sequence[MethodOutput]) -> None:
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


def mark_wrong(answers: Sequence[MethodOutput], objects: Sequence[str]) -> None:
    """Mark the tokens of words for objects that are not in the picture."""
    for answer in answers:
        spans = wrong_spans("".join(step.text for step in answer.steps), objects)
        start = 0
        for step in answer.steps:
            end = start + len(step.text)
            step.wrong = any(start < last and end > first for first, last in spans)
            start = end


def wrong_spans(text: str, objects: Sequence[str]) -> list[tuple[int, int]]:
    """Where a text has words for objects (CHAIR's words, singular or plural) that are not among `objects`."""
    present = {WORDS.get(name, name) for name in objects}
    return [found.span() for found in object_words().finditer(text) if WORDS[found.group(1).lower()] not in present]


def label(method: Mapping[str, Any]) -> str:
    """A method as it is typed, without the settings that are its defaults."""
    return method_text(method.get("name", "greedy"), {key: value for key, value in method.items() if key != "name"})


def own_settings(method: Mapping[str, Any]) -> str:
    """The settings of a method that are not its defaults, as text; empty if there are none."""
    return label(method).removeprefix(method.get("name", "greedy")).removeprefix(":")
