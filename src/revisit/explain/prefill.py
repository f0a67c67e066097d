"""Capture the hidden states of vision tokens in the forward pass of a prompt, or of a prompt and the text that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.hooks.states import Capture, Hooks, forced_inputs, last_logits, no_image, saved_positions, vision_mask
from revisit.models.parts import Head, ModelParts, describe
from revisit.step.reference import CHUNK_NUMBERS

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model


@dataclass
class PrefillStates:
    """Hidden states of the prompts' vision tokens at some layers, and the model's calibrated head."""

    layers: tuple[int, ...]
    head: Head
    rows: list[Tensor] = field(default_factory=list)  # (layers, tokens, d) of each prompt

    @property
    def states(self) -> Tensor:
        """The states of the first prompt, (layers, tokens, d)."""
        return self.rows[0]

    def row(self, number: int) -> dict[int, Tensor]:
        """Return one prompt's states (tokens, d) by layer."""
        return dict(zip(self.layers, self.rows[number], strict=True))


@contextmanager
def watch_prefill(model: Model, inputs: Inputs, layers: Sequence[int]) -> Iterator[PrefillStates]:
    """Capture the vision tokens' states of the first forward pass inside the block, which must run the prompts `inputs`."""
    parts = ModelParts.of(model)
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)
    if not bool(mask.any()):
        raise no_image(model)
    chosen = tuple(layers)
    found = PrefillStates(chosen, parts.head)
    with ExitStack() as stack:
        capture = Capture(parts, mask, chosen, 1, stack)

        def finish(output: Any) -> None:
            capture.check_reached()
            assert capture.last is not None
            parts.head.calibrate(capture.last[0], output.logits[0, -1], describe(model))
            found.rows += [torch.stack([item.by_layer[layer] for layer in chosen]) for item in capture.items]
            capture.release()

        capture.after_forward(model, finish)
        yield found


@torch.no_grad()
def prefill_states(model: Model, inputs: Inputs, layers: Sequence[int]) -> PrefillStates:
    """Run one prompt; return the vision tokens' states at these layers."""
    with watch_prefill(model, inputs, layers) as seen:
        model(**inputs, use_cache=False, **last_logits(model))
    return seen


class Forced(NamedTuple):
    """The hidden states of one prompt and its text."""

    states: Tensor  # (tokens, d): final states; each predicts a token of the text
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    head: Head  # as the model uses it


@torch.no_grad()
def force(model: Model, inputs: Inputs, texts: Sequence[Sequence[int]], layers: Sequence[int] = ()) -> list[Forced]:
    """Run each prompt followed by the tokens of its text, in one batch; keep the vision tokens' states of `layers`."""
    parts = ModelParts.of(model)
    start = inputs["input_ids"].shape[1]
    longest = max(range(len(texts)), key=lambda row: len(texts[row]))
    length = start + len(texts[longest])
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        raise RevisitError(
            f"Prompt, image and text have {length} tokens, but the model's limit is {most}; split the text."
        )
    mask = torch.nn.functional.pad(vision_mask(inputs["input_ids"], parts.vision_ids), (0, len(texts[longest])))
    if layers and not bool(mask.any(-1).all()):
        raise no_image(model)
    with ExitStack() as stack:
        stack.enter_context(saved_positions(model, clear=True))
        hooks, seen = Hooks(stack), list[Tensor]()
        hooks.every_position(parts.decoder)
        hooks.state(parts, parts.depth, seen.append)
        capture = Capture(parts, mask, tuple(sorted(set(layers))), 1, stack) if layers else None
        outputs = model(**forced_inputs(dict(inputs), texts), use_cache=False, **last_logits(model))
    states = seen[0].to(parts.head.device)  # (rows, positions, d)
    parts.head.calibrate(states[longest, -1], outputs.logits[longest, -1], describe(model))
    return [
        Forced(
            states[row, start - 1 : start - 1 + len(tokens)],
            capture.items[row].by_layer if capture else {},
            parts.head,
        )
        for row, tokens in enumerate(texts)
    ]


def logit_slices(head: Head, states: Tensor) -> Iterator[Tensor]:
    """Yield the logits of states over the whole vocabulary in parts of bounded memory.  (n, d) -> (part, V)"""
    for part in states.to(head.device).split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        yield head.all_logits(part)
