"""MemVR (Zou et al.): where a middle layer is uncertain, give its feed-forward network the image again.

A layer's input at the newest position goes through the final norm and the head; its uncertainty is the entropy of the ten
likeliest tokens, divided by ln 10. In each forward, the first layer above a threshold acts: the network's output at all positions
becomes (1 − ratio)·FFN(x) + ratio·c·x·Vᵀ·V. V are the vision tokens at the decoder's input, and c gives both terms the same
mean size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.forward.states import hooks_paused, known_head, normed
from revisit.registry import Share

CANDIDATES = 10  # tokens whose entropy is measured


def uncertainty(logits: Tensor) -> Tensor:
    """Return the entropy of the ten likeliest tokens among themselves, 1 if they are equally likely.  (..., V) -> (...)"""
    count = min(CANDIDATES, logits.shape[-1])
    p = logits.topk(count, dim=-1).values.softmax(-1)
    return -(p * p.log()).nan_to_num(0.0).sum(-1) / math.log(CANDIDATES)


def retraced(x: Tensor, output: Tensor, vision: Tensor, valid: Tensor, ratio: float) -> Tensor:
    """Mix a network's output with its input projected onto the vision tokens.

    (rows, q, d) input and output, (rows, n, d) vision tokens or zeros, (rows, q) positions that are not padding.
    """
    projected = (x.float() @ vision.mT) @ vision  # (rows, q, d)
    valid = valid[..., None]
    own, other = ((states.abs() * valid).sum((1, 2), keepdim=True) for states in (output.float(), projected))
    scaled = projected * (own / other)
    return ((1 - ratio) * output + ratio * scaled).to(output.dtype)


class MemVR(Method):
    """MemVR; the defaults are those of its documentation.

    Args:
        ratio: Weight of the vision tokens in the mixture.
        threshold: Uncertainty, from 0 to 1, above which a layer acts.
        layers: Decoder layers (from 0) that may act: "middle" (7 to 16 of 32, scaled to the decoder's depth),
            "released" (these numbers in decoders that have them), or numbers.

    At most one layer acts in a forward.
    """

    ratio: Share = 0.12
    threshold: Share = 0.75
    layers: Literal["middle", "released"] | LayerNumbers = "middle"

    name = "memvr"
    summary = "where a middle layer is uncertain, mix the image into its feed-forward network again"
    cost = "1 forward; a head row at each of the middle layers"
    source = "Zou et al., MemVR, arXiv:2410.03577"
    released = {"layers": "released"}
    changes_forward = True
    needs_cache = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        layers = layers_of(self, 7, 16, prompt.parts.depth, 1)
        retracing = Retracing(self, prompt, passes, layers)
        return lambda input_ids, logits: StepResult(logits, acted=retracing.acted)


class Retracing:
    """The hooks of one call, which measure the uncertainty of each layer and change the first uncertain one."""

    def __init__(self, method: MemVR, prompt: Prompt, passes: Passes, layers: tuple[int, ...]) -> None:
        self.method, self.prompt, self.parts, self.mask = method, prompt, prompt.parts, prompt.vision
        prompt.check_empty_cache()
        self.vision: Tensor | None = None  # (rows, n, d) the vision tokens, zeros in rows with fewer
        self.acted = torch.zeros_like(prompt.has_image)  # (rows,) whether a layer has acted in the running forward
        self.acting = self.acted  # (rows,) whether the running layer acts
        self.x: Tensor | None = None  # (rows, q, d) input of the running layer's network
        self.head = known_head(self.parts)
        passes.on_input(self.parts.layers[0], self._start)
        for layer in layers:
            passes.on_input(self.parts.layers[layer], self._measure)
            passes.on_input(self.parts.mlps[layer], self._keep)
            passes.on_output(self.parts.mlps[layer], self._mix)

    def _start(self, states: Tensor) -> None:
        self.acted = torch.zeros_like(self.acted)
        if self.vision is None:
            counts = self.mask.sum(-1)
            vision = states.new_zeros(len(counts), int(counts.max()), states.shape[-1], dtype=torch.float32)
            places = torch.arange(vision.shape[1], device=states.device) < counts[:, None].to(states.device)
            vision[places] = states[self.mask.to(states.device)].float()
            self.vision = vision

    def _measure(self, states: Tensor) -> None:
        with hooks_paused():
            state = normed(self.parts.final_norm, states[:, -1:])
            logits = self.head.all_logits(state[:, 0].to(self.head.device))  # (rows, V)
        uncertain = (uncertainty(logits) > self.method.threshold).to(self.acted.device)
        self.acting = uncertain & ~self.acted & self.prompt.has_image
        self.acted = self.acted | self.acting

    def _keep(self, states: Tensor) -> None:
        self.x = states

    def _mix(self, output: Tensor) -> Tensor | None:
        x, self.x = self.x, None
        if x is None or (self.acting.is_cpu and not bool(self.acting.any())):
            return None
        assert self.vision is not None
        device = output.device
        changed = retraced(x, output, self.vision.to(device), self._valid(x.shape[1]).to(device), self.method.ratio)
        return torch.where(self.acting[:, None, None].to(device), changed, output)

    def _valid(self, length: int) -> Tensor:
        """Return which of the newest positions are not padding.  -> (rows, length)"""
        later = length - self.mask.shape[1]  # tokens after the prompt; negative if only a part of the prompt is run
        if later < 0:
            return self.mask.new_ones(len(self.mask), length)
        return torch.nn.functional.pad(self.prompt.real, (0, later), value=True)
