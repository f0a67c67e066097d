"""How far the vision tokens support names: read through the model's own head, before the first token is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.step.reference import CHUNK_NUMBERS

if TYPE_CHECKING:
    from revisit.models.head import LinearHead
    from revisit.models.spelling import Spelling
    from revisit.models.types import Model

TOP = 5  # vision tokens whose mean probability is the support of a token


def check_layer(model: Model, depth: int, chosen: int | None = None) -> int:
    """Return the layer whose vision tokens are read: the chosen one, `check` in the model's generation_config.json, or the last."""
    if chosen is not None:
        if chosen > depth:
            raise RevisitError(f"floor_layer must be a layer from 0 to {depth}, not {chosen}.")
        return chosen
    entry = getattr(model.generation_config, "check", None) or {}
    layer = entry.get("layer", depth) if isinstance(entry, dict) else None
    if not isinstance(layer, int) or layer not in range(depth + 1):
        raise RevisitError(f"`check` in the model's generation_config.json must have a layer from 0 to {depth}.")
    return layer


def logit_slices(head: LinearHead, states: Tensor) -> Iterator[Tensor]:
    """Yield the logits of states over the whole vocabulary in parts of bounded memory.  (n, d) -> (part, V)"""
    for part in states.to(head.device).split(max(1, CHUNK_NUMBERS // head.vocabulary)):
        yield head.all_logits(part)


@torch.no_grad()
def token_support(head: LinearHead, states: Tensor, ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Map each token to its support by the vision tokens' states (n, d), and the vision token that supports it most."""
    columns = torch.tensor(list(ids), device=head.device)
    # On a CPU, softmax is one pass over the logits, and several times as fast as logsumexp.
    return best_support(torch.cat([logits.softmax(-1)[:, columns] for logits in logit_slices(head, states)]), ids)


def best_support(probabilities: Tensor, ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Map each token to its support by vision tokens that give these probabilities (n, ids), and the best of them."""
    best = probabilities.topk(min(TOP, len(probabilities)), dim=0)  # (top, ids)
    return dict(zip(ids, zip(best.values.mean(0).tolist(), best.indices[0].tolist(), strict=True), strict=True))


def name_support(head: LinearHead, states: Tensor, spelling: Spelling) -> dict[str, float]:
    """Return the support of each category by the vision tokens' states (n, d): the best of its names."""
    return spelling.support(token_support(head, states, spelling.read_tokens))
