"""The states of a prompt's vision tokens, taken from the prefill that decodes it: no forward pass of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.embedded.familiar import unlike_scenes
from revisit.errors import RevisitError
from revisit.models.config import is_embedded
from revisit.models.parts import Head, ModelParts, describe
from revisit.step.reference import CHUNK_NUMBERS
from revisit.taps.forcing import last_logits
from revisit.taps.states import Capture, no_image, vision_mask

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model


class PrefillStates:
    """Hidden states of the prompts' vision tokens at some layers; they do not keep the model alive."""

    def __init__(self, model: Model, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._model = weakref.ref(model)
        self._transform: Callable[[Tensor], Tensor] | None = None
        self._rows: list[Tensor] = []  # (layers, tokens, d) of each prompt

    def fill(self, rows: list[Tensor], head: Head) -> None:
        """Keep each prompt's states (layers, tokens, d) of a prefill whose head is calibrated."""
        self._rows, self._transform = rows, head.transform

    @property
    def states(self) -> Tensor:
        """The states of the first prompt.  -> (layers, tokens, d)"""
        if not self._rows:
            raise RevisitError("The model's forward pass did not go through its decoder module.")
        return self._rows[0]

    def row(self, number: int) -> dict[int, Tensor]:
        """One prompt's states (tokens, d) by layer."""
        return dict(zip(self.layers, self._rows[number], strict=True))

    def of_row(self, number: int) -> PrefillStates:
        """The states of one prompt of a batch, as if it had been decoded alone."""
        found = copy(self)
        found._rows = [self._rows[number]] if self._rows else []
        return found

    def model(self) -> Model | None:
        """The model; None if it has been released."""
        return self._model()

    def head(self) -> Head | None:
        """The model's head, which turns states into words; None if the model has been released."""
        model = self._model()
        if model is None:
            return None
        head = ModelParts.of(model).head
        head.transform = self._transform
        return head


@contextmanager
def watch_prefill(
    model: Model, inputs: Inputs, layers: Sequence[int] | None = None, *, final_norm: bool = False, copies: int = 1
) -> Iterator[PrefillStates]:
    """Keep the vision tokens' states of the first forward pass inside the block, which must run the prompts `inputs`.

    Args:
        model: The model that is about to run.
        inputs: The prompts, as the processor prepared them.
        layers: Hidden states to keep; by default the projector's output and the last.
        final_norm: Apply the decoder's final norm to layers below the last.
        copies: Rows that the model runs for each prompt (beams).
    """
    parts = ModelParts.of(model)
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)
    if not bool(mask.any()):
        raise no_image(model)
    chosen = (0, parts.depth) if layers is None else tuple(layers)
    found = PrefillStates(model, chosen)
    with ExitStack() as stack:
        capture = Capture(parts, mask.repeat_interleave(copies, 0), chosen, copies, stack, final_norm=final_norm)

        def finish(output: Any) -> None:
            if capture.last is None:
                return
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
    """Run one prompt; returns the model's head and the vision tokens' states at these layers."""
    with watch_prefill(model, inputs, layers, final_norm=final_norm) as seen:
        model(**inputs, use_cache=False, **last_logits(model))
    return ModelParts.of(model).head, seen


def logit_slices(head: Head, states: Tensor) -> Iterator[Tensor]:
    """The logits of states over the whole vocabulary, some states at a time, so that memory stays bounded.  (n, d) -> (part, V)"""
    for part in states.to(head.device).split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        yield head.all_logits(part)


def unfamiliar_images(model_name: str, seen: PrefillStates, images: int) -> tuple[int, ...]:
    """The numbers of the images that the embedded model cannot know; none for other models, which are not judged."""
    head = seen.head()
    if head is None or seen.layers[0] != 0 or not is_embedded(model_name):
        return ()
    return unlike_scenes(head, seen.states[0], images)
