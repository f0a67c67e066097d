"""Teacher forcing: what a forward pass needs to run a prompt with a text already behind it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from revisit.models.parts import ModelParts
from revisit.models.types import Model
from revisit.taps.states import Hooks


def last_logits(model: Model) -> dict[str, int]:
    """The argument that makes a forward compute logits of the last position only, where the model takes it.

    Without it the model itself would project every position onto the whole vocabulary.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def forced_inputs(inputs: dict[str, Any], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The inputs of prompts with the tokens of a text behind each; shorter texts are padded on the right, unattended.

    Other per-position inputs continue with zeros.
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
    """The decoder's final states (rows, positions, d) of every forward inside, in order."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        Hooks(stack).state(parts, parts.depth, seen.append)
        yield seen
