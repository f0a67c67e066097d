"""Capture the hidden states of a prompt's vision tokens during its prefill, without another forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.hooks.forcing import last_logits
from revisit.hooks.states import Capture, no_image, vision_mask
from revisit.models.parts import Head, ModelParts, describe
from revisit.step.reference import CHUNK_NUMBERS

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model


class PrefillStates:
    """Hidden states of the prompts' vision tokens at some layers, with a weak reference to the model."""

    def __init__(self, model: Model, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._model = weakref.ref(model)
        self._transform: Callable[[Tensor], Tensor] | None = None
        self._rows: list[Tensor] = []  # (layers, tokens, d) of each prompt

    def fill(self, rows: list[Tensor], head: Head) -> None:
        """Store each prompt's states (layers, tokens, d) and the calibrated head."""
        self._rows, self._transform = rows, head.transform

    @property
    def states(self) -> Tensor:
        """The states of the first prompt, (layers, tokens, d)."""
        if not self._rows:
            raise RevisitError("The model's forward pass did not go through its decoder module.")
        return self._rows[0]

    def row(self, number: int) -> dict[int, Tensor]:
        """Return one prompt's states (tokens, d) by layer."""
        return dict(zip(self.layers, self._rows[number], strict=True))

    def of_row(self, number: int) -> PrefillStates:
        """Return the states of one prompt of a batch, as if it had been decoded alone."""
        found = copy(self)
        found._rows = [self._rows[number]] if self._rows else []
        return found

    def model(self) -> Model | None:
        """Return the model, or None if it was released."""
        return self._model()

    def head(self) -> Head | None:
        """Return the model's head, or None if the model was released."""
        model = self._model()
        if model is None:
            return None
        head = ModelParts.of(model).head
        head.transform = self._transform
        return head


@contextmanager
def watch_prefill(
    model: Model, inputs: Inputs, layers: Sequence[int] | None = None, *, final_norm: bool = False
) -> Iterator[PrefillStates]:
    """Capture the vision tokens' states of the first forward pass inside the block, which must run the prompts `inputs`.

    Args:
        model: The model that is about to run.
        inputs: The prompts, as the processor prepared them.
        layers: Hidden states to keep; by default only the last.
        final_norm: Apply the decoder's final norm to layers below the last.
    """
    parts = ModelParts.of(model)
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)
    if not bool(mask.any()):
        raise no_image(model)
    chosen = (parts.depth,) if layers is None else tuple(layers)
    found = PrefillStates(model, chosen)
    with ExitStack() as stack:
        capture = Capture(parts, mask, chosen, 1, stack, final_norm=final_norm)

        def finish(output: Any) -> None:
            capture.check_reached()
            assert capture.last is not None
            parts.head.calibrate(capture.last[0], output.logits[0, -1], describe(model))
            rows = [torch.stack([item.by_layer[layer] for layer in chosen]) for item in capture.items]
            found.fill(rows, parts.head)
            capture.release()

        capture.after_forward(model, finish)
        yield found


@torch.no_grad()
def prefill_states(
    model: Model, inputs: Inputs, layers: Sequence[int], *, final_norm: bool = False
) -> tuple[Head, PrefillStates]:
    """Run one prompt; return the model's head and the vision tokens' states at these layers."""
    with watch_prefill(model, inputs, layers, final_norm=final_norm) as seen:
        model(**inputs, use_cache=False, **last_logits(model))
    return ModelParts.of(model).head, seen


def logit_slices(head: Head, states: Tensor) -> Iterator[Tensor]:
    """Yield the logits of states over the whole vocabulary in parts of bounded memory.  (n, d) -> (part, V)"""
    for part in states.to(head.device).split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        yield head.all_logits(part)
