"""Records of decoding runs: images, the positions of the vision tokens on them, and each method's answer step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from revisit.decoding.batch import decode_texts
from revisit.decoding.generate import generate
from revisit.decoding.method import Method, method_text
from revisit.decoding.trace import StepRecord, Trace, row_trace
from revisit.explain.lens import whole_vocabulary
from revisit.models.prompts import new_tokens
from revisit.models.thoughts import Thoughts, thoughts_of
from revisit.models.tokens import token_text, token_texts, tokens_in
from revisit.words import WORDS, object_words

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.explain.prefill import PromptStates
    from revisit.models.geometry import Layout
    from revisit.models.types import Inputs, Model, Processor, Tokenizer


@dataclass
class MethodOutput:
    """The text that one method generated, and the trace of its row."""

    text: str  # without thoughts
    trace: Trace
    thought: str = ""  # the reasoning before the answer
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
    def label(self) -> str:
        """The method as typed on the command line, without settings that equal its defaults."""
        return method_text(self.name, {key: value for key, value in self.method.items() if key != "name"})

    @property
    def settings(self) -> str:
        """The settings that differ from the method's defaults, as typed on the command line."""
        return self.label.removeprefix(self.name).removeprefix(":")

    @property
    def steps(self) -> list[StepRecord]:
        """The record of each token."""
        return self.trace.rows[0].records

    @property
    def changed(self) -> list[int]:
        """The steps, from 0, at which the method's best token was not the model's."""
        return [number for number, step in enumerate(self.steps) if step.changed]

    def wrong(self, objects: Sequence[str] | None) -> set[int]:
        """Return the steps, from 0, that name objects other than `objects`; none if `objects` is None."""
        texts = [step.text or "" for step in self.steps]
        ends = list(accumulate(map(len, texts)))
        spans = list(zip([0, *ends], ends, strict=False))
        wrong = [] if objects is None else wrong_spans("".join(texts), objects)
        return {step for span in wrong for step in tokens_in(spans, *span)}


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


def patch_words(states: PromptStates, layer: int, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """Return the likeliest tokens of each vision token at a layer."""
    reading = whole_vocabulary(states.head, states.vision[layer][None], tokenizer, top=5)
    pairs = zip(reading.top[0].tolist(), reading.probabilities[0].tolist(), strict=True)
    return [[(reading.entries[n], p) for n, p in zip(*pair, strict=True)] for pair in pairs]


def outputs_of(
    model: Model, processor: Processor, inputs: Inputs, method: Method, **generate_kwargs: Any
) -> list[MethodOutput]:
    """Decode prepared inputs with a method, and record every step of every row."""
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
    """Build the output of one row of a recorded batch; set the texts of its steps, and whether each is part of a thought."""
    trace, tokenizer = row_trace(trace, row), processor.tokenizer
    steps = trace.rows[0].records
    tokens = tokens[: len(steps)]  # without the padding after the answer
    inside = [False] * len(tokens) if thoughts is None else thoughts.split(tokens, opened).in_thought
    for step, token, text, thought in zip(steps, tokens, token_texts(tokenizer, tokens), inside, strict=True):
        step.token, step.text, step.thought = token, text, thought
        step.texts = [token_text(tokenizer, candidate) for candidate in step.ids]
    ((answer, thought_text, unclosed),) = decode_texts(processor, thoughts, [tokens], [opened])
    return MethodOutput(answer, trace, thought_text, unclosed)


def wrong_spans(text: str, objects: Sequence[str]) -> list[tuple[int, int]]:
    """Find the words of a text for objects (CHAIR's words, singular or plural) that are not among `objects`."""
    present = {WORDS.get(name, name) for name in objects}
    return [found.span() for found in object_words().finditer(text) if WORDS[found.group(1).lower()] not in present]
