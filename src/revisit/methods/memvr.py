"""MemVR (Zou et al.): where a middle layer is unsure what to say next, its feed-forward network looks at the image again.

1. At some layers, the state that the layer reads goes through the final norm and the head at the newest position. The
   entropy of the ten likeliest tokens there, divided by ln 10, says how unsure the model is.
2. In the first layer where that exceeds a threshold, in each forward, the feed-forward network's output becomes
   (1 − ratio)·FFN(x) + ratio·c·x·Vᵀ·V. V are the vision tokens as they enter the decoder, and c gives both terms the same
   mean size. This is done at all positions that are run, in the prompt's forward too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from revisit.decoding.method import LayerNumbers, Method, Refine
from revisit.methods.layers import check_layers, layers_of_32
from revisit.registry import Share

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.run import Run

CANDIDATES = 10  # tokens whose entropy counts


def unsureness(logits: Tensor) -> Tensor:
    """Entropy of the ten likeliest tokens among themselves, 1 where they are equally likely.  (..., V) -> (...)"""
    count = min(CANDIDATES, logits.shape[-1])
    p = logits.topk(count, dim=-1).values.softmax(-1)
    return -(p * p.log()).nan_to_num(0.0).sum(-1) / math.log(CANDIDATES)


def looked_again(x: Tensor, output: Tensor, vision: Tensor, valid: Tensor, ratio: float) -> Tensor:
    """A network's output mixed with what its input finds in the vision tokens.

    (rows, q, d) input and output, (rows, n, d) vision tokens or zeros, (rows, q) positions that are not padding.
    """
    found = (x.float() @ vision.mT) @ vision  # (rows, q, d)
    valid = valid[..., None]
    sizes = [(states.abs() * valid).sum((1, 2), keepdim=True) for states in (output.float(), found)]
    scaled = found * (sizes[0] / sizes[1])
    return ((1 - ratio) * output + ratio * scaled).to(output.dtype)


class MemVR(Method):
    """Settings of MemVR; the defaults are those of its documentation.

    Args:
        ratio: Weight of the second look.
        threshold: How unsure a layer must be, from 0 to 1.
        layers: Decoder layers (from 0) that may look again: "middle" (7 to 16 of 32, scaled to the decoder's depth) or numbers.

    A forward looks again in one layer at most. With `use_cache=False`, where earlier positions are run again, they are changed
    with the newest one.
    """

    ratio: Share = 0.12
    threshold: Share = 0.75
    layers: Literal["middle"] | LayerNumbers = "middle"

    name = "memvr"
    summary = "where a middle layer is unsure, its feed-forward network looks at the image again"
    cost = "1 forward; a head row at each of the middle layers"
    source = "Zou et al., MemVR, arXiv:2410.03577"

    def begin(self, run: Run) -> Refine:
        mask = run.find_vision_tokens()
        depth = run.parts.depth
        layers = layers_of_32(7, 16, depth, 1) if self.layers == "middle" else check_layers(self, self.layers, depth)
        looks = Looks(self, run, mask, layers)
        return lambda input_ids, logits: run.decode_by(input_ids, logits, logits, acted=looks.done)


class Looks:
    """The taps of one call: what each layer is unsure about, and the second look of its network."""

    def __init__(self, method: MemVR, run: Run, mask: Tensor, layers: tuple[int, ...]) -> None:
        from revisit.contrast.pixels import refuse_filled_cache
        from revisit.taps.states import Hooks

        refuse_filled_cache(run)
        self.method, self.run, self.mask, self.rows = method, run, mask, len(mask)
        self.vision: Tensor | None = None  # (rows, n, d) the vision tokens, zeros where a row has fewer
        self.done = mask.new_zeros(self.rows)  # (rows,) whether the running forward has looked again
        self.now = self.done  # whether it does so in the running layer
        self.x: Tensor | None = None  # (rows, q, d) what the running layer's network reads
        hooks, parts = Hooks(run.stack), run.parts
        hooks.before(parts.layers[0], self._start)
        for layer in layers:
            hooks.before(parts.layers[layer], self._ask)
            hooks.before(parts.mlps[layer], self._keep)
            hooks.after(parts.mlps[layer], self._look)

    def _start(self, states: Tensor) -> None:
        import torch

        if self.run.contrasting:
            return
        self.done = torch.zeros_like(self.done)
        if self.vision is None:
            counts = self.mask.sum(-1)
            vision = states.new_zeros(self.rows, int(counts.max()), states.shape[-1], dtype=torch.float32)
            places = torch.arange(vision.shape[1], device=states.device) < counts[:, None].to(states.device)
            vision[places] = states[: self.rows][self.mask.to(states.device)].float()
            self.vision = vision

    def _ask(self, states: Tensor) -> None:
        if self.run.contrasting:
            return
        from revisit.taps.states import normed, taps_paused

        with taps_paused():
            state = normed(self.run.parts.final_norm, states[: self.rows, -1:])
            head = self.run.parts.head
            logits = head.transforms[-1](head.module(state[:, 0].to(head.device)).float())  # (rows, V), as declared
        unsure = (unsureness(logits) > self.method.threshold).to(self.done.device)
        self.now = unsure & ~self.done & self.mask.any(-1)
        self.done = self.done | self.now

    def _keep(self, states: Tensor) -> None:
        self.x = None if self.run.contrasting else states[: self.rows]

    def _look(self, output: Tensor) -> Tensor | None:
        import torch

        x, self.x = self.x, None
        if x is None or (self.now.is_cpu and not bool(self.now.any())):
            return None
        assert self.vision is not None
        own, device = output[: self.rows], output.device
        changed = looked_again(x, own, self.vision.to(device), self._valid(x.shape[1]).to(device), self.method.ratio)
        changed = torch.where(self.now[:, None, None].to(device), changed, own)
        return torch.cat([changed, output[self.rows :]]) if len(output) > self.rows else changed

    def _valid(self, length: int) -> Tensor:
        """The newest positions that are not padding.  -> (rows, length)"""
        import torch

        given = self.run.model_kwargs.get("attention_mask")
        short = length - self.mask.shape[1]  # tokens run with the prompt, or fewer than it has: all of them text
        if given is None or short < 0:
            return self.mask.new_ones(self.rows, length)
        prompt = given[:, : self.mask.shape[1]].bool().to(self.mask.device)
        return torch.nn.functional.pad(prompt, (0, short), value=True)
