"""ReVisiT (Cho et al.): refine each step by the vision token that agrees most with the output distribution.

Keep the plausible tokens, p >= alpha · max p. Project the hidden states of all vision tokens, at the chosen layers, through the
LM head onto that set, and select the one whose distribution is nearest to the output distribution. Multiply the two.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from torch import Tensor
from transformers import CONFIG_MAPPING

from revisit.decoding.method import LayerNumbers, Method, StepResult
from revisit.decoding.method import Step as MethodStep
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.models import families
from revisit.models.families import resolve_layers
from revisit.models.types import Configured
from revisit.registry import Seed
from revisit.step.choice import choose
from revisit.step.interface import RowStates, Step, StepInput
from revisit.step.rule import SELECTIONS_WITHOUT_COUNT, Rule


class ReVisiT(Rule, Method):
    """Refine every step by the vision token that agrees most with the output distribution.

    No training and no extra forward pass. The defaults are the paper's. `ReVisiT.recommended(model)` returns the settings for
    a model, which `method="revisit"` uses.

    Examples:
        >>> revisit.generate(model, **inputs, method=revisit.ReVisiT(alpha=1e-3, layers="all"), max_new_tokens=64)

    Args:
        alpha: Plausibility threshold relative to the likeliest token.
        layers: Hidden states of the vision tokens: "last", "all" (every second layer and the last), "low", "high", or indices,
            where 0 is the projector's output and the number of decoder layers is the final state.
        divergence: "jsd" (the paper's equation), "official" (what the released code computes), "kl", "cosine".
        select: The vision token with the "min" or "max" divergence, a "random" one, or "soft", a mixture
            of all by softmax(−divergence / 0.1).
        neighbors: Number of vision tokens that "min" and "max" select; their distributions are averaged.
        fusion: "poe" multiplies, log P + weight · log Q; "interpolation" mixes, (1 − weight) · P + weight · Q.
        weight: Strength of the vision side; by default 1 for "poe" and 0.5 for "interpolation". "agreement" is
            1 − JSD(P, Q) / ln 2 at every step, "uncertainty" is √(1 − max P), "both" is their product.
        vocabulary: "subset" (the plausible tokens) or "full" (no constraint; an ablation).
        norm: Apply the decoder's "final" norm to states of intermediate layers, or "none".
        normalize: Return a distribution; the released code returns the unnormalized sum.
        once: From 0 (off) to 1: how much less the image promotes tokens that the answer already contains. With 1, it raises the
            probability of none of them.
        precision: "float32", or "model" to round vision distributions as the released code does.
        seed: Seed of the "random" selection.
    """

    layers: Literal["last", "all", "low", "high"] | LayerNumbers = "last"
    norm: Literal["none", "final"] = "none"
    seed: Seed = 0

    name = "revisit"
    summary = "refine by the vision token that agrees most with the output distribution"
    cost = "1 forward; head columns of the plausible tokens for every vision token"
    source = "Cho et al., ReVisiT, arXiv:2506.09522"
    released = {"divergence": "official", "normalize": False, "precision": "model"}
    speculative = True

    @classmethod
    def recommended(cls, model: Configured | str, /, **overrides: Any) -> ReVisiT:
        """Return the settings recommended for a model.

        Args:
            model: A loaded model, or a model type such as "qwen2_5_vl". The entry `revisit` of a model's
                generation_config.json takes precedence over the paper's choice of layers: all for the Qwen-VL family, the last
                one for the others.
            **overrides: Settings that differ.
        """
        kind = model if isinstance(model, str) else getattr(getattr(model, "config", None), "model_type", None)
        if not isinstance(kind, str):
            raise RevisitError(f"ReVisiT.recommended needs a loaded model, or its model_type, not {model!r}.")
        if isinstance(model, str) and model not in families.FAMILIES and model not in CONFIG_MAPPING:
            raise RevisitError(f"{model!r} is not a model type such as 'qwen2_5_vl': pass the loaded model instead.")
        declared = getattr(getattr(model, "generation_config", None), "revisit", None)
        settings = {"layers": families.of(kind).layers, **cls._declared(declared)}
        if overrides.get("select") in SELECTIONS_WITHOUT_COUNT:
            settings.pop("neighbors", None)
        return cls(**{**settings, **overrides})

    @classmethod
    def _declared(cls, entry: object) -> dict[str, Any]:
        """Return the validated settings in a model's generation_config.json."""
        if entry is None:
            return {}
        where = "The entry `revisit` of the model's generation_config.json is wrong"
        if not isinstance(entry, dict):
            raise RevisitError(f"{where}: it must map settings to values.")
        try:
            method = cls(**entry)
        except (RevisitError, TypeError) as error:
            raise RevisitError(f"{where}: {str(error)[:200]}") from None
        return {name: getattr(method, name) for name in entry}

    def rule(self, *, normalize: bool | None = None) -> Rule:
        """Return the settings of one step; `normalize` overrides the method's own."""
        settings = {name: getattr(self, name) for name in Rule.model_fields}
        return Rule.model_construct(**settings if normalize is None else {**settings, "normalize": normalize})

    def begin(self, prompt: Prompt, passes: Passes) -> MethodStep:
        layers = resolve_layers(self.layers, prompt.parts.depth, prompt.parts.tied)
        capture = passes.capture(layers, final_norm=self.norm == "final")
        rule = self.rule(normalize=self.normalize or prompt.beams)  # scores of beams must be comparable
        start = prompt.ids.shape[1]
        draws = random.Random(self.seed)
        uniform: list[float] = []  # one number per step, so that a row does not depend on the others
        implementation: Step | None = None
        states: RowStates | None = None

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            nonlocal implementation, states
            if implementation is None or states is None:
                head = capture.head(passes.raw)
                states = RowStates.of_blocks(*capture.padded(), prompt.rows_per_item)
                implementation = choose(head, rule, states.states.device, "reference" if prompt.record else None)
            number = input_ids.shape[1] - start
            uniform.extend(draws.random() for _ in range(number + 1 - len(uniform)))
            device = states.states.device
            written = input_ids[:, start:].to(device) if rule.once else None
            output = implementation.take(StepInput(logits.to(device), states, uniform[number], passes.ended, written))
            scores = output.scores.to(logits.device)
            return StepResult(scores, layers=layers, comparable=True, detail=(output, capture.items))

        return step
