"""Turn what `generate` returns into text: the new tokens, the answer, and the thought before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from revisit.models.thoughts import Thoughts, find_thoughts

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from revisit.models.types import Inputs, Processor


@dataclass(frozen=True)
class OutputText:
    """The text of one output, without special tokens and surrounding blanks."""

    text: str  # the answer, without thoughts
    thought: str  # the reasoning before the answer, if the model thinks
    unclosed: bool  # whether it ended within a thought
    in_thought: list[bool]  # for every token; also true for the tokens around a thought


def read_outputs(
    processor: Processor,
    thoughts: Thoughts | None,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> list[OutputText]:
    """Detokenize the new tokens of each prompt, and separate thoughts from answers. A prompt may end within a thought."""
    thoughts = thoughts or Thoughts(-1, -1)  # no token
    opened = map(thoughts.open_at_end, prompts)
    splits = [thoughts.split(row, inside) for row, inside in zip(outputs, opened, strict=True)]
    parts = [part for split in splits for part in (split.answer, split.thought)]
    texts = [text.strip() for text in processor.batch_decode(parts, skip_special_tokens=True)]
    return [
        OutputText(answer, thought, split.unclosed, split.in_thought)
        for answer, thought, split in zip(texts[::2], texts[1::2], splits, strict=True)
    ]


def generated_text(processor: Processor, output: Any, inputs: Inputs) -> list[str]:
    """Return the answers in the output of `generate`, one per row, without special tokens and thoughts."""
    prompts, rows = inputs["input_ids"].tolist(), new_tokens(output, inputs).tolist()
    prompts = [prompt for prompt in prompts for _ in range(len(rows) // len(prompts))]  # return sequences
    return [found.text for found in read_outputs(processor, find_thoughts(processor.tokenizer), prompts, rows)]


def new_tokens(output: Any, inputs: Inputs) -> Tensor:
    """Return the generated tokens in the output of `generate`, (rows, new)."""
    sequences = output if not hasattr(output, "sequences") else output.sequences
    return sequences[:, inputs["input_ids"].shape[1] :]  # type: ignore[no-any-return]


def end_tokens(config: GenerationConfig, given: int | Sequence[int] | None = None) -> set[int]:
    """Return the token ids that end an answer: those given to a call, or else those of the generation configuration."""
    ids = config.eos_token_id if given is None else given
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def until_end(tokens: Sequence[int], end: set[int]) -> list[int]:
    """Return the tokens up to and including the first end token; padding follows it."""
    for number, token in enumerate(tokens):
        if token in end:
            return list(tokens[: number + 1])
    return list(tokens)
