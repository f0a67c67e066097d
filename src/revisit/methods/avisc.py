"""AvisC (Woo et al.): contrast with a run that sees only the vision tokens that draw too much attention.

1. In the prompt's run, take the layers in which the last position looks at the image most, and average its attention to
   each vision token there.
2. A second run gets the same prompt with all vision tokens blanked but the over-attended ("blind") ones, those above
   mean + sigma standard deviations.
3. score = (1 + alpha)·l − alpha·l_blind on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from revisit.errors import RevisitError
from revisit.methods.contrastive import Contrastive, cut

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.taps.attention import Call


def contrast(logits: Tensor, blind: Tensor, alpha: float, beta: float) -> Tensor:
    """(1 + alpha)·l − alpha·l_blind where l allows it, -inf elsewhere; NaN of l_blind count as l.  (..., V), (..., V) -> (..., V)"""
    blind = logits.where(blind.isnan(), blind)
    return cut((1 + alpha) * logits - alpha * blind, logits, beta)


def blind_tokens(attention: Tensor, gamma: float, sigma: float) -> Tensor:
    """Which vision tokens of one item draw too much attention.  (layers, N) -> (N,) bool

    The layers are those with the largest share of attention on the image, as few as reach gamma of the total.
    """
    share = attention.sum(-1)  # (layers,)
    share, order = (share / share.sum()).sort(descending=True, stable=True)
    chosen = order[: int((share.cumsum(0) < gamma).sum()) + 1]
    mean = attention[chosen].mean(0)  # (N,)
    return mean >= mean.mean() + sigma * mean.std()


@dataclass(frozen=True)
class AvisC(Contrastive):
    """Settings of AvisC; the defaults are those of its parser.

    alpha: strength of the contrast (the released scripts use 2.5 for AMBER and 3 for POPE).
    beta: how unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
    gamma: share of the attention on the image that the chosen layers make up.
    sigma: how many standard deviations above the mean a blind token lies (λ in the paper).
    blank: what the other vision tokens become: "zeros", "ones" or "noise" (seeded by `seed`).
    """

    alpha: float = 1.0
    beta: float = 0.1
    gamma: float = 0.5
    sigma: float = 1.0
    blank: Literal["zeros", "ones", "noise"] = "zeros"
    seed: int = 0

    name = "avisc"
    summary = "contrast with a run that sees only the over-attended vision tokens"
    cost = "2 rows per sequence, 2 prefills"
    source = "Woo et al., AvisC, arXiv:2405.17820"

    def __post_init__(self) -> None:
        self.check_mode()
        self.check_choice("blank")
        self.check_range("alpha", 0, float("inf"))
        self.check_range("beta", 0, 1)
        self.check_range("gamma", 0, 1)
        self.check_range("sigma", float("-inf"), float("inf"))
        self.check_seed()

    @classmethod
    def official(cls, **overrides: Any) -> AvisC:
        """What the released AMBER script runs: alpha 2.5."""
        return cls(**{"alpha": 2.5, **overrides})

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.branch import add_branch
        from revisit.taps.attention import watching

        mask = run.find_vision_tokens()
        branch = add_branch(run, None, stacked=self.stacks(run))
        seen: list[Tensor] = []  # one (rows, T) per layer, of the clean prefill
        hidden: list[Tensor] = []  # the positions to blank, once known
        watch, thread = contextlib.ExitStack(), threading.get_ident()
        run.stack.enter_context(watch)

        def see(call: Call) -> None:
            if not run.loop_model.contrasting and len(seen) < run.parts.depth:
                seen.append(call.last_attention()[:, : mask.shape[1]])

        def blank(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states = args[0] if args else kwargs["hidden_states"]  # (rows, q, d)
            mine = threading.get_ident() == thread and run.loop_model.contrasting
            if not mine or states.shape[1] < mask.shape[1]:
                return None  # not the contrasted prompt
            if not hidden:
                watch.close()  # the clean prefill is over
                hidden.append(self._hidden(seen, mask, run.parts.depth))
            states = self._blanked(states, hidden[0])
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

        watch.enter_context(watching(run.parts, see, "AvisC"))
        run.stack.callback(run.parts.layers[0].register_forward_pre_hook(blank, with_kwargs=True).remove)
        combine = lambda l, other, _: contrast(l, other, self.alpha, self.beta)  # noqa: E731
        return self.contrasted(run, branch, mask.any(-1), combine)

    def _hidden(self, seen: list[Tensor], mask: Tensor, depth: int) -> Tensor:
        """Positions to blank: vision tokens that are not blind.  layers × (rows, T), (rows, T) -> (rows, T)"""
        if len(seen) < depth:
            raise RevisitError(
                "AvisC: this model computes its attention without transformers' attention interface, so it could not be seen: use "
                "another method."
            )
        import torch

        attention, hide = torch.stack(seen), mask.clone()
        for row in mask.any(-1).nonzero().squeeze(-1).tolist():
            columns = mask[row].nonzero().squeeze(-1)
            if len(columns) > 1:
                hide[row, columns] = ~blind_tokens(attention[:, row, columns], self.gamma, self.sigma).to(mask.device)
        return hide

    def _blanked(self, states: Tensor, hide: Tensor) -> Tensor:
        """Input states with the hidden positions blanked; there may be later positions than the prompt's.  (rows, q, d)"""
        import torch

        if self.blank == "noise":  # counted from the prompt's end, so that padding does not move it
            draw = torch.Generator().manual_seed(self.seed)
            noise = torch.randn(hide.shape[1], states.shape[2], generator=draw).flip(0)  # (T, d)
            filler = noise.to(states.device, states.dtype)
        else:
            filler = torch.full_like(states[0, : hide.shape[1]], 0.0 if self.blank == "zeros" else 1.0)
        prompt = torch.where(hide[..., None].to(states.device), filler, states[:, : hide.shape[1]])
        return torch.cat([prompt, states[:, hide.shape[1] :]], dim=1)
