"""Record decoding runs: images, the positions of the vision tokens on them, and each method's answer step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revisit.decoding.batch import decode_texts
from revisit.decoding.generate import beams_asked, generate
from revisit.decoding.method import Method, method_text
from revisit.decoding.trace import StepRecord, Trace, row_trace
from revisit.errors import RevisitError
from revisit.explain.check import Check, check_text, settings_of
from revisit.explain.lens import whole_vocabulary
from revisit.explain.prefill import watch_prefill
from revisit.explain.support import ModelText
from revisit.explain.tokens import token_text, token_texts
from revisit.models.config import name_of
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import new_tokens, prepare
from revisit.models.thoughts import Thoughts, thoughts_of
from revisit.words import WORDS, object_words

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from revisit.models.geometry import Layout
    from revisit.models.types import Inputs, Model, Processor, Tokenizer


@dataclass
class MethodOutput:
    """The text that one method generated, and the trace of its row."""

    text: str  # without thoughts
    trace: Trace
    thought: str = ""  # what a model that thinks wrote before it answered
    unclosed: bool = False  # whether it ended within a thought

    @property
    def method(self) -> dict[str, Any]:
        """The method's name and settings."""
        return self.trace.method

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method.get("name", "greedy"))

    @property
    def steps(self) -> list[StepRecord]:
        """The record of each token."""
        return self.trace.rows[0].records

    @property
    def changed(self) -> list[int]:
        """The steps, from 0, at which the method's best token was not the model's."""
        return [number for number, step in enumerate(self.steps) if step.changed]

    def wrong(self, objects: Sequence[str] | None) -> set[int]:
        """Return the steps, from 0, that write words for objects outside `objects`; none if these are not known."""
        texts = [step.text or "" for step in self.steps]
        spans, found, start = [] if objects is None else wrong_spans("".join(texts), objects), set(), 0
        for number, text in enumerate(texts):
            end = start + len(text)
            if any(start < last and end > first for first, last in spans):
                found.add(number)
            start = end
        return found


@dataclass
class Decode:
    """One question about one or more images, answered by one or more methods."""

    images: list[Image]
    prompt: str
    model: str
    layout: Layout
    answers: list[MethodOutput]
    objects: Sequence[str] | None = None  # in the image, if known
    patch_words: list[list[tuple[str, float]]] | None = None  # likeliest tokens of each vision token at the last layer
    check: Check | None = None  # of the first answer


def patch_words(head: Head, states: Tensor, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """Return the likeliest tokens of vision tokens, from their states (tokens, d)."""
    reading = whole_vocabulary(head, states[None], tokenizer, top=5)
    pairs = zip(reading.top[0].tolist(), reading.probabilities[0].tolist(), strict=True)
    return [[(reading.entries[n], p) for n, p in zip(*pair, strict=True)] for pair in pairs]


def explain(
    model: Model, processor: Processor, images: Sequence[Image], prompt: str, methods: Sequence[Method], **options: Any
) -> Decode:
    """Record one prompt about one image, or several that share it; see `explain_many`."""
    return explain_many(model, processor, [images], prompt, methods, **options)[0]


def explain_many(
    model: Model,
    processor: Processor,
    images: Sequence[Sequence[Image]],
    prompt: str,
    methods: Sequence[Method],
    *,
    model_name: str = "",
    objects: Sequence[str] | None = None,
    **generate_kwargs: Any,
) -> list[Decode]:
    """Decode one prompt about each of these images with each method, as one batch, and record every step.

    Each method takes one vision pass and one prefill; a contrastive method also those of its own branch. Vision passes are not
    shared, because transformers accepts no precomputed image features together with the pixels that some methods need.

    Args:
        model: A loaded model.
        processor: Its processor.
        images: The images of each prompt of the batch, in order.
        prompt: The question.
        methods: Decoding methods; the vision tokens' states are kept from the first one's prefill.
        model_name: The model's name on the page.
        objects: The objects in the images, if known; words for other objects are marked as wrong.
        **generate_kwargs: Passed to `generate`.

    Returns:
        The answers to each prompt, with their steps.

    Raises:
        RevisitError: If there is no method, or the arguments request beams or several answers.
    """
    if not methods:
        raise RevisitError("There is no decoding method to record.")
    if beams_asked(model, generate_kwargs) > 1:
        raise RevisitError(
            "Beam search cannot be shown step by step, because beams are reordered; remove num_beams, or use revisit.generate."
        )
    if (generate_kwargs.get("num_return_sequences") or 1) != 1:
        raise RevisitError("Only one answer per method can be shown; remove num_return_sequences.")
    inputs = prepare(processor, [prompt] * len(images), [list(own) for own in images], model.device)
    for name in generate_kwargs:
        if name in ("method", "trace", "processor", "custom_generate", *inputs):
            raise RevisitError(f"{name} is set by `ask`; remove it (the trace is always kept).")
    layers = sorted({settings_of(model)[0], ModelParts.of(model).depth})
    with watch_prefill(model, inputs, layers) as seen:
        outputs = [outputs_of(model, processor, inputs, methods[0], **generate_kwargs)]
    outputs += [outputs_of(model, processor, inputs, method, **generate_kwargs) for method in methods[1:]]
    name, tokenizer = model_name or name_of(model), processor.tokenizer
    decodes = []
    for row, own in enumerate(images):
        answers = [of_method[row] for of_method in outputs]
        records = [step for step in answers[0].steps if not step.thought]
        tokens = [step.token for step in records if step.token is not None]
        text = ModelText.from_trace(model, processor, inputs, row, images, seen, answers[0].text, tokens, records)
        for step in (step for answer in answers for step in answer.steps):
            region = None if step.vision_token is None else text.layout.region(step.vision_token)
            if region is not None:
                step.patch_row, step.patch_col = region.row + 1, region.column + 1
        words = patch_words(seen.head, text.vision[layers[-1]], tokenizer)
        check = check_text(model, tokenizer, text)
        decodes.append(Decode(list(own), prompt, name, text.layout, answers, objects, words, check))
    return decodes


def outputs_of(
    model: Model, processor: Processor, inputs: Inputs, method: Method, **generate_kwargs: Any
) -> list[MethodOutput]:
    """Decode prepared inputs with a method, and record every step of every row."""
    need_single_beam(method)
    trace, thoughts = Trace(record=True), thoughts_of(model, processor)
    output = generate(model, **inputs, method=method, trace=trace, processor=processor, **generate_kwargs)
    opened = [thoughts is not None and thoughts.open_at_end(prompt) for prompt in inputs["input_ids"].tolist()]
    return [
        method_output(trace, row, tokens, processor, thoughts, opened[row])
        for row, tokens in enumerate(new_tokens(output, inputs).tolist())
    ]


def method_output(
    trace: Trace, row: int, tokens: Sequence[int], processor: Processor, thoughts: Thoughts | None, opened: bool
) -> MethodOutput:
    """Build the output of one row of a recorded batch; fill in the texts of its steps, and which belong to a thought."""
    own, tokenizer = row_trace(trace, row), processor.tokenizer
    steps = own.rows[0].records
    tokens = tokens[: len(steps)]  # without the padding behind the answer
    inside = [False] * len(tokens) if thoughts is None else thoughts.split(tokens, opened).in_thought
    for step, token, text, thought in zip(steps, tokens, token_texts(tokenizer, tokens), inside, strict=True):
        step.token, step.text, step.thought = token, text, thought
        step.texts = [token_text(tokenizer, candidate) for candidate in step.ids]
    ((answer, thought_text, unclosed),) = decode_texts(processor, thoughts, [tokens], [opened])
    return MethodOutput(answer, own, thought_text, unclosed)


def need_single_beam(method: Method) -> None:
    """Raise RevisitError for a method that uses beam search, whose steps cannot be shown."""
    if method.own_beams > 1:
        raise RevisitError(f"{method.name} uses beam search and cannot be shown step by step; use another method.")


def instead_of(step: StepRecord) -> str | None:
    """Return the text of the model's own best token, if the method's differs."""
    return None if step.instead_of is None or step.texts is None else step.texts[step.ids.index(step.instead_of)]


def selects_largest(method: Mapping[str, Any]) -> bool:
    """Return whether the method selects the vision token with the largest divergence."""
    return method.get("select") == "max"


def wrong_spans(text: str, objects: Sequence[str]) -> list[tuple[int, int]]:
    """Find the words of a text for objects (CHAIR's words, singular or plural) that are not among `objects`."""
    present = {WORDS.get(name, name) for name in objects}
    return [found.span() for found in object_words().finditer(text) if WORDS[found.group(1).lower()] not in present]


def label(method: Mapping[str, Any]) -> str:
    """Return a method as it is typed, without the settings that are its defaults."""
    return method_text(method.get("name", "greedy"), {key: value for key, value in method.items() if key != "name"})


def own_settings(method: Mapping[str, Any]) -> str:
    """Return the settings of a method that are not its defaults as text; empty if there are none."""
    return label(method).removeprefix(method.get("name", "greedy")).removeprefix(":")
