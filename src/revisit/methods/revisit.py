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

from revisit.decoding.method import Method
from revisit.errors import RevisitError, unknown
from revisit.models import families

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.loop import Run
    from revisit.decoding.method import Refine
    from revisit.step.engine import Outcome, Rule
    from revisit.step.reference import Projector, Refinement
    from revisit.taps.vision import Bank

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
        self.check_seed()
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
        """The settings recommended for a model, or for a model type.

        A model's own recommendation (`revisit` in its generation_config.json) comes first; otherwise the paper's choice
        of layers: all for the Qwen-VL family, last for the others.
        """
        kind = model if isinstance(model, str) else model.config.model_type
        own = getattr(getattr(model, "generation_config", None), "revisit", None) or {}
        return cls(**{"layers": families.of(kind).layers, **own, **overrides})

    def rule(self, *, normalize: bool) -> Rule:
        """These settings as those of one step."""
        from revisit.step.engine import Rule

        return Rule(
            alpha=self.alpha,
            divergence=self.divergence,
            how=self.select,
            fusion=self.fusion,
            weight=float(self.weight or 0),
            full_vocabulary=self.vocabulary == "full",
            normalize=normalize,
            model_dtype=self.precision == "model",
        )

    def step(self, logits: Tensor, vision: Projector, *, normalize: bool, uniform: float) -> Refinement:
        """One step of one sequence with these settings, by the reference: logits (V,) and its vision rows."""
        return self.rule(normalize=normalize).reference(logits, vision, uniform)

    def begin(self, run: Run) -> Refine:
        from revisit.step import batched as accelerator
        from revisit.step.engine import Batch
        from revisit.taps.vision import resolve_layers

        mask = run.find_vision_tokens()
        layers = resolve_layers(self.layers, run.parts.depth, run.parts.tied)
        capture = run.capture(mask, layers, final_norm=self.norm == "final")
        rule = self.rule(normalize=self.normalize or run.beams)  # beams are compared with each other
        draws = random.Random(self.seed)
        banks: list[Bank] = []
        batch: Batch | None = None

        def note(row: int, result: Outcome | None) -> None:
            if result is None:  # no image in this row: decoded as the model would
                run.note(row)
            else:
                run.note_refinement(row, result, banks[run.item(row)])

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal batch
            if batch is None:
                banks.extend(run.banks(capture, logits, model_dtype=rule.model_dtype))
                batch = Batch(banks, rule, run.copies, all_divergences=run.trace.record)
            uniform = draws.random()  # one draw a step, so that a row does not depend on its neighbours
            here = logits.to(run.parts.head.device)
            if run.trace.record or rule.full_vocabulary or accelerator.waiting_is_free(here.device):
                scores = batch.refine(here, run.active(input_ids), uniform, note)
            else:
                fixed = batch.refine_without_waiting(here, uniform)
                run.note_later(input_ids, fixed.sizes, fixed.applied, fixed.changed)
                scores = fixed.scores
            return scores.to(logits.device)

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
