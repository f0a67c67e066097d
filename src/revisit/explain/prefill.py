"""Capture hidden states in the forward pass of prompts, or of prompts and the texts that follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.forward.states import Capture, Hooks, forced_inputs, last_logits, saved_positions
from revisit.models.head import Head, head_device
from revisit.models.parts import ModelParts, check_context, no_image, running, vision_mask

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model


@dataclass(frozen=True)
class PromptStates:
    """The hidden states of one prompt and of the text that follows it."""

    head: Head  # calibrated to the model's logits
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    text: Tensor  # (tokens, d): final states, each of which predicts a token of the text


@contextmanager
def watch_prefill(model: Model, inputs: Inputs, layers: Sequence[int]) -> Iterator[list[PromptStates]]:
    """Capture the vision tokens' states in the first forward pass inside the block, which must run the prompts `inputs`.

    That forward pass fills the list, with one entry for each prompt.
    """
    parts = ModelParts.of(model)
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)
    if not bool(mask.any()):
        raise no_image(model)
    prompts: list[PromptStates] = []
    with ExitStack() as stack:
        capture, hooks = Capture(parts, mask, tuple(layers), 1, stack), Hooks(stack)

        def finish(output: Any) -> None:
            capture.check_reached()
            assert capture.last is not None
            head = parts.calibrate(capture.last[0], output.logits[0, -1])
            prompts.extend(PromptStates(head, item.by_layer, capture.last[:0]) for item in capture.items)
            capture.release()
            hooks.release()

        hooks.output(running(model), finish)
        yield prompts


@torch.no_grad()
def force(
    model: Model, inputs: Inputs, texts: Sequence[Sequence[int]] = ((),), layers: Sequence[int] = ()
) -> list[PromptStates]:
    """Run each prompt followed by the tokens of its text, in one batch; keep the vision tokens' states of `layers`.

    By default, a single prompt is run without a text.
    """
    parts = ModelParts.of(model)
    start = inputs["input_ids"].shape[1]
    longest = max(range(len(texts)), key=lambda row: len(texts[row]))
    check_context(model, start + len(texts[longest]))
    mask = torch.nn.functional.pad(vision_mask(inputs["input_ids"], parts.vision_ids), (0, len(texts[longest])))
    if layers and not bool(mask.any(-1).all()):
        raise no_image(model)
    with ExitStack() as stack:
        stack.enter_context(saved_positions(model, clear=True))
        final_states: list[Tensor] = []
        Hooks(stack).state(parts, parts.depth, final_states.append)
        capture = Capture(parts, mask, tuple(sorted(set(layers))), 1, stack)
        outputs = model(**forced_inputs(dict(inputs), texts), use_cache=False, **last_logits(model))
    capture.check_reached()
    states = final_states[0].to(head_device(parts.head))  # (rows, positions, d)
    head = parts.calibrate(states[longest, -1], outputs.logits[longest, -1])
    return [
        PromptStates(head, item.by_layer, states[row, start - 1 : start - 1 + len(texts[row])])
        for row, item in enumerate(capture.items)
    ]
