"""AvisC (Woo et al.): contrast with a run that keeps only the vision tokens that draw too much attention.

In the prefill, the last position's attention is averaged over the layers that attend to the image most. The second pass gets the
same prompt with all vision tokens blanked except those above mean + sigma standard deviations ("blind" ones), and score = (1 +
alpha)·l − alpha·l_blind on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import Step
from revisit.forward.attention import Call
from revisit.forward.contrast import Contrast
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Number, Share, Strength


def without_nan(blind: Tensor, logits: Tensor) -> Tensor:
    """Return l_blind, or l for rows in which l_blind has a NaN, as published.  (..., V), (..., V) -> (..., V)"""
    return logits.where(blind.isnan().any(-1, keepdim=True), blind)


def blind_tokens(attention: Tensor, gamma: float, sigma: float) -> Tensor:
    """Find the vision tokens of one item that draw too much attention.  (layers, N) -> (N,) bool

    Only the layers that attend to the image most are used, as few as reach gamma of the total.
    """
    share = attention.sum(-1)  # (layers,)
    share, order = (share / share.sum()).sort(descending=True, stable=True)
    chosen = order[: int((share.cumsum(0) < gamma).sum()) + 1]
    mean = attention[chosen].mean(0)  # (N,)
    return mean >= mean.mean() + sigma * mean.std()


class AvisC(Contrastive):
    """AvisC; the defaults are those of the parsers of its LLaVA programs.

    Args:
        alpha: Strength of the contrast (the released scripts pass 2.5 for AMBER and LLaVA-Bench, 1 for POPE).
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        gamma: Share of the attention on the image that the chosen layers reach.
        sigma: Standard deviations above the mean at which a token is blind (λ in the paper, lamb in its parsers; the released
            AMBER and POPE scripts pass 1.0).
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    gamma: Share = 0.5
    sigma: Number = 0.99

    name = "avisc"
    summary = "contrast with a run that keeps only the over-attended vision tokens"
    cost = "2 rows per sequence, 2 prefills"
    source = "Woo et al., AvisC, arXiv:2405.17820"
    released = {"alpha": 2.5, "sigma": 1.0}  # of the AMBER script

    @classmethod
    def pope(cls, **overrides: Any) -> AvisC:
        """Return the settings of the released POPE script: alpha 1, sigma 1."""
        return cls(**{"sigma": 1.0, **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        mask = prompt.vision
        other = passes.contrast(None, self.mode)
        seen: list[Tensor] = []  # one (rows, T) per layer, of the prefill

        def attention_hook(call: Call) -> None:
            if len(seen) < prompt.parts.depth:
                attention = call.last_attention().mean(1)[:, : mask.shape[1]]
                seen.append(attention.to(mask.device))  # layers may sit on several devices

        def hidden() -> Tensor:
            passes.check_attention()
            return self._hidden(seen, mask)

        passes.on_attention(attention_hook, prompt_only=True)
        blanker = Blanker(prompt, passes, other, hidden)

        def combine(logits: Tensor, blind: Tensor, _: int) -> Tensor:
            if prompt.config.use_cache:  # the prompt is never read again
                blanker.release()
            return contrast(logits, without_nan(blind, logits), self.alpha, self.beta)

        return self.contrasted(prompt, other, combine)

    def _hidden(self, seen: list[Tensor], mask: Tensor) -> Tensor:
        """Return the positions to blank: vision tokens that are not blind.  layers × (rows, T), (rows, T) -> (rows, T)"""
        attention, hide = torch.stack(seen), mask.clone()
        for row in mask.any(-1).nonzero().squeeze(-1).tolist():
            columns = mask[row].nonzero().squeeze(-1)
            if len(columns) > 1:
                hide[row, columns] = ~blind_tokens(attention[:, row, columns], self.gamma, self.sigma).to(mask.device)
        return hide


class Blanker:
    """Blanks positions of a contrasted prompt, at the decoder's input and wherever vision features are added later.

    Models with DeepStack add image features to the outputs of the first layers. At blanked positions, every layer but the
    first therefore reads exactly what the layer before it returned.
    """

    def __init__(self, prompt: Prompt, passes: Passes, other: Contrast, hidden: Callable[[], Tensor]) -> None:
        self.length = prompt.vision.shape[1]
        self.find_hidden = functools.cache(hidden)  # (rows, T), known once the main prefill is over
        self.previous: Tensor | None = None  # output of the layer before
        self.hooks = []
        for number, layer in enumerate(prompt.parts.layers):
            self.hooks.append(passes.on_input(layer, functools.partial(self._before, number), of=other))
            self.hooks.append(passes.on_output(layer, self._after, of=other))

    def release(self) -> None:
        """Remove the hooks."""
        while self.hooks:
            self.hooks.pop().release()

    def _before(self, number: int, states: Tensor) -> Tensor | None:
        previous, self.previous = self.previous, None
        if states.shape[1] < self.length or (number and states is previous):
            return None
        prompt, later = states.split([self.length, states.shape[1] - self.length], dim=1)
        instead = torch.zeros_like(prompt)
        if number and previous is not None:
            instead = previous[:, : self.length].to(states.device)
        hide = self.find_hidden()[..., None].to(states.device)  # (rows, T, 1)
        return torch.cat([instead.where(hide, prompt), later], dim=1)

    def _after(self, states: Tensor) -> None:
        self.previous = states if states.shape[1] >= self.length else None
