"""Low-rank adapters: small trained matrices next to frozen linear layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer W plus up @ down, which starts as zero; both are kept in float32."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, states: Tensor) -> Tensor:
        down, up = self.down.to(states.dtype), self.up.to(states.dtype)
        out: Tensor = self.frozen(states) + F.linear(F.linear(states, down), up)
        return out


def attach(model: nn.Module, names: Iterable[str], rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Attach adapters to the linear layers with these names; return the parameters by the name of their layer.

    The model itself is frozen, so the backward pass ends at the lowest adapter.
    """
    model.requires_grad_(False)
    torch.manual_seed(seed)
    parameters: dict[str, nn.Parameter] = {}
    for name in names:
        frozen = model.get_submodule(name)
        assert isinstance(frozen, nn.Linear)
        adapted = LowRank(frozen, rank)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, adapted)
        parameters[f"{name}.down"], parameters[f"{name}.up"] = adapted.down, adapted.up
    return parameters
