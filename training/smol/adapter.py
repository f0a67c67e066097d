"""A low-rank adapter: small trained matrices beside the frozen ones of a Llama model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class LowRank(nn.Module):
    """A frozen linear layer W plus up @ down, which starts as zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.frozen(states) + F.linear(F.linear(states, self.down), self.up)
        return out


def attach(model: LlamaForCausalLM, first: int, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Put adapters on every linear layer from decoder layer `first` on; their parameters by the name of the layer they change.

    The model itself is frozen, so nothing is kept for the backward pass below layer `first`.
    """
    model.requires_grad_(False)
    torch.manual_seed(seed)
    parameters: dict[str, nn.Parameter] = {}
    for number, layer in enumerate(model.model.layers):
        if number < first:
            continue
        for block, names in PROJECTIONS.items():
            owner = getattr(layer, block)
            for name in names:
                adapted = LowRank(getattr(owner, name), rank)
                setattr(owner, name, adapted)
                key = f"layers.{number}.{block}.{name}"
                parameters[f"{key}.down"], parameters[f"{key}.up"] = adapted.down, adapted.up
    return parameters
