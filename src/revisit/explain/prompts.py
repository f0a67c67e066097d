"""The prompts that a method sends to a model: the user's own, and those that it writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from revisit.decoding.generate import generate
from revisit.models.parts import running, vision_token_ids

if TYPE_CHECKING:
    from revisit.decoding.method import MethodLike
    from revisit.models.types import Inputs, Model, Processor


@dataclass(frozen=True)
class SentPrompt:
    """A prompt that a model has run."""

    kind: str  # "the prompt", or "written by the method"
    runs: int  # how often: a second time is with another image, or for another purpose
    tokens: tuple[int, ...]
    text: str  # with runs of vision tokens as their number


def sent_prompts(model: Model, processor: Processor, method: MethodLike, inputs: Inputs) -> list[SentPrompt]:
    """Decode one token of one prompt, and return every prompt that the model ran on the way, in order."""
    runs: dict[tuple[int, ...], int] = {}

    def note(_module: object, _args: object, inputs: dict[str, Any]) -> None:
        ids = inputs.get("input_ids")
        if ids is not None and ids.shape[1] > 1:  # later tokens come one by one
            tokens = tuple(ids[0].tolist())
            runs[tokens] = runs.get(tokens, 0) + 1

    hook = running(model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        generate(model, **inputs, method=method, processor=processor, max_new_tokens=1, do_sample=False)
    finally:
        hook.remove()
    own = tuple(inputs["input_ids"][0].tolist())
    vision = set(vision_token_ids(model.config))
    return [
        SentPrompt(
            "the prompt" if tokens == own else "written by the method", count, tokens, _text(processor, tokens, vision)
        )
        for tokens, count in runs.items()
    ]


def _text(processor: Processor, tokens: tuple[int, ...], vision: set[int]) -> str:
    parts = []
    for seen, group in groupby(tokens, lambda token: token in vision):
        ids = list(group)
        parts.append(f"[{len(ids)} vision tokens]" if seen else processor.tokenizer.decode(ids))
    return "".join(parts)
