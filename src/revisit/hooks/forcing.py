"""Teacher forcing: the inputs of a forward pass over a prompt and a given text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from revisit.hooks.states import Hooks
from revisit.models.parts import ModelParts
from revisit.models.types import Model


def last_logits(model: Model) -> dict[str, int]:
    """Return the argument that limits a forward's logits to the last position, if the model has one.

    Without it, the model projects every position onto the whole vocabulary.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def forced_inputs(inputs: dict[str, Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Append the tokens of a text to each prompt; shorter texts are padded on the right and masked.

    Other per-position inputs are padded with zeros.
    """
    ids = inputs["input_ids"]
    longest = max(map(len, texts))
    new = ids[:, -1:].repeat(1, longest)  # padding repeats the prompt's last token
    attended = torch.zeros_like(new)
    for row, tokens in enumerate(texts):
        new[row, : len(tokens)] = torch.tensor(list(tokens), device=ids.device, dtype=ids.dtype)
        attended[row, : len(tokens)] = 1
    longer = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            tail = {"input_ids": new, "attention_mask": attended}.get(name, torch.zeros_like(new))
            longer[name] = torch.cat([value, tail.to(value.dtype)], dim=1)
    return longer


@contextmanager
def last_states(parts: ModelParts) -> Iterator[list[Tensor]]:
    """Collect the decoder's final states (rows, positions, d) of every forward within the context."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        hooks = Hooks(stack)
        hooks.every_position(parts.decoder)
        hooks.state(parts, parts.depth, seen.append)
        yield seen
