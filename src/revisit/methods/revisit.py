"""ReVisiT (Cho et al.): refine each step by the vision token that agrees most with what the model is about to say.

1. Keep the plausible tokens, p >= alpha · max p.
2. Project the hidden states of all vision tokens, at the chosen layers, through the LM head onto that set, and pick the
   one whose distribution is nearest to the output distribution.
3. Multiply the two distributions and renormalise.

No training, no extra forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from revisit.errors import RevisitError, unknown
from revisit.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.core import Projector, Refinement
    from revisit.decoding import Run
    from revisit.methods.base import Refine
    from revisit.vision import Bank

LAYER_SETS = ("last", "all", "low", "high")


@dataclass(frozen=True)
class ReVisiT(Method):
    """Settings of ReVisiT; the defaults are the paper's.

    alpha: how unlikely a token may be, relative to the likeliest, and still be considered.
    layers: hidden states to look at: "last", "all" (every second layer and the last), "low", "high", or indices,
        where 0 is the projector's output and the number of decoder layers is the final state.
    divergence: "jsd" (the paper's equation), "official" (what the released code computes), "kl", "cosine".
    select: the vision token with the "min" or "max" divergence, or a "random" one (seeded by `seed`).
    fusion: "poe" multiplies, log P + weight · log Q; "interpolation" mixes, (1 − weight) · P + weight · Q.
    weight: strength of the vision side; 1 for "poe" and 0.5 for "interpolation" unless given.
    vocabulary: "subset" (the plausible tokens) or "full" (no constraint; an ablation).
    norm: apply the decoder's "final" norm to states of intermediate layers, or "none".
    normalize: return a distribution; the released code returns the unnormalised sum.
    precision: "float32", or "model" to round vision distributions like the released code.
    """

    alpha: float = 1e-5
    layers: Literal["last", "all", "low", "high"] | tuple[int, ...] = "last"
    divergence: Literal["jsd", "official", "kl", "cosine"] = "jsd"
    select: Literal["min", "max", "random"] = "min"
    fusion: Literal["poe", "interpolation"] = "poe"
    weight: float | None = None
    vocabulary: Literal["subset", "full"] = "subset"
    norm: Literal["none", "final"] = "none"
    normalize: bool = True
    precision: Literal["float32", "model"] = "float32"
    seed: int = 0

    name = "revisit"
    summary = "refine by the vision token that agrees most with the output distribution"
    cost = "1.0×, no extra forward"
    source = "Cho et al., ReVisiT, arXiv:2506.09522"

    def __post_init__(self) -> None:
        if self.weight is None:
            object.__setattr__(self, "weight", 1.0 if self.fusion == "poe" else 0.5)
        self.check_range("alpha", 0, 1, low_open=True)
        self.check_range("weight", 0, 1 if self.fusion == "interpolation" else float("inf"))
        for name in ("divergence", "select", "fusion", "vocabulary", "norm", "precision"):
            self.check_choice(name)
        object.__setattr__(self, "layers", check_layers(self.layers))

    @classmethod
    def paper(cls, **overrides: Any) -> ReVisiT:
        """The paper's method and defaults."""
        return cls(**overrides)

    @classmethod
    def official(cls, **overrides: Any) -> ReVisiT:
        """The released code, to the token: its divergence, its rounding, its unnormalised scores."""
        return cls(**{"divergence": "official", "normalize": False, "precision": "model", **overrides})

    @classmethod
    def recommended(cls, model: Any, **overrides: Any) -> ReVisiT:
        """The paper's choice of layers for a model (or model type): all for the Qwen-VL family, last for the others."""
        kind = model if isinstance(model, str) else model.config.model_type
        return cls(**{"layers": "all" if kind.startswith("qwen") else "last", **overrides})

    def step(self, logits: Tensor, vision: Projector, *, normalize: bool, uniform: float) -> Refinement:
        """One step of one sequence with these settings: logits (V,) and its vision rows."""
        from revisit.core import refine

        return refine(
            logits,
            vision,
            alpha=self.alpha,
            divergence=self.divergence,
            how=self.select,
            fusion=self.fusion,
            weight=float(self.weight or 0),
            full_vocabulary=self.vocabulary == "full",
            normalize=normalize,
            model_dtype=self.precision == "model",
            uniform=uniform,
        )

    def begin(self, run: Run) -> Refine:
        from revisit.core import scatter
        from revisit.vision import resolve_layers

        mask = run.look()
        layers = resolve_layers(self.layers, run.anatomy.depth, run.anatomy.tied)
        capture = run.capture(mask, layers, final_norm=self.norm == "final")
        banks: list[Bank] = []
        draws = random.Random(self.seed)

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            if not banks:
                banks.extend(run.banks(capture, logits, model_dtype=self.precision == "model"))
            uniform = draws.random()  # one draw a step, so that a row does not depend on its neighbours
            scores = logits.clone()
            for row in run.active(input_ids):
                bank = banks[run.item(row)]
                if bank.rows == 0:  # no image in this row: decoded as the model would
                    run.note(row)
                    continue
                result = self.step(
                    logits[row].to(bank.head.device),
                    bank,
                    normalize=self.normalize or run.beams,  # beams are compared with each other
                    uniform=uniform,
                )
                scores[row] = scatter(result, logits.shape[-1]).to(logits.device)
                run.note_refinement(row, result, bank)
            return scores

        return refine


def check_layers(layers: str | int | Sequence[int]) -> Any:
    """A named layer set, or a tuple of indices; one clear sentence otherwise."""
    if isinstance(layers, str):
        if layers not in LAYER_SETS:
            raise unknown("layer set", layers, LAYER_SETS)
        return layers
    indices = (layers,) if isinstance(layers, int) else tuple(layers)
    if not indices or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
        raise RevisitError(
            f"ReVisiT: layers must be one of {', '.join(LAYER_SETS)} or a list of layer numbers, not {layers!r}."
        )
    if min(indices) < 0:
        raise RevisitError(
            f"ReVisiT: layer {min(indices)} does not exist; layers are numbered from 0 (projector output)."
        )
    return indices
