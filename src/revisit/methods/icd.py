"""ICD (Wang et al.): contrast with the same image under an instruction that invites hallucination.

1. Run the model a second time with a disturbing sentence right after the image.
2. score = (1 + alpha)·l − alpha·l_disturbed on the plausible tokens, p >= beta · max p.

The authors disturb InstructBLIP's Q-Former; for models that read the image as tokens of the prompt, the sentence goes
behind it, as in the port that is usually compared with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.methods.contrastive import Contrastive, cut
from revisit.methods.prompts import Boundaries, word_ids

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run


def contrast(logits: Tensor, disturbed: Tensor, alpha: float, beta: float) -> Tensor:
    """(1 + alpha)·l − alpha·l_disturbed where l allows it, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut((1 + alpha) * logits - alpha * disturbed, logits, beta)


@dataclass(frozen=True)
class ICD(Boundaries, Contrastive):
    """Settings of ICD.

    alpha: strength of the contrast.
    beta: how unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
    sentence: what disturbs; made into token ids by `bind(processor)`.
    sentence_ids: its token ids, where there is no processor to bind.
    """

    alpha: float = 1.0
    beta: float = 0.1
    sentence: str = "You are a confused image caption model."
    sentence_ids: tuple[int, ...] = ()

    name = "icd"
    summary = "contrast with the same image under a disturbing instruction"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Wang et al., ICD, arXiv:2403.18715"

    def __post_init__(self) -> None:
        self.check_mode()
        self.check_range("alpha", 0, float("inf"))
        self.check_range("beta", 0, 1)

    @classmethod
    def official(cls, **overrides: Any) -> ICD:
        """The released alpha and beta, with the sentence for captions."""
        return cls(**overrides)

    @classmethod
    def questions(cls, **overrides: Any) -> ICD:
        """The same with the sentence for yes/no questions about objects."""
        return cls(**{"sentence": "You are a confused object detector.", **overrides})

    def bind(self, processor: Any) -> ICD:
        """This method with its sentence as token ids."""
        bound = super().bind(processor)
        return (
            bound
            if bound.sentence_ids
            else dataclasses.replace(bound, sentence_ids=word_ids(processor, bound.sentence))
        )

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.branch import add_branch
        from revisit.contrast.prompt_edits import after_image, edited

        if not self.sentence_ids:
            raise RevisitError(
                "ICD puts a sentence into the prompt and does not know its tokens: use ICD(...).bind(processor), or pass sentence_ids."
            )
        if run.inputs.get("qformer_input_ids") is not None:
            raise RevisitError(
                "ICD: this model reads its instruction in a Q-Former, which is where the method disturbs it; that is not supported, "
                "use a model that has its image in the prompt, such as LLaVA, Qwen-VL or InternVL."
            )
        mask = run.find_vision_tokens()
        self.check_ids(run, self.sentence_ids, "sentence_ids")
        words, around = run.input_ids.new_tensor(self.sentence_ids), self.boundaries(run)
        disturbed = edited(run, mask, lambda _, ids, vision: after_image(ids, vision, around, words), pixels=True)
        branch = add_branch(run, disturbed, stacked=self.stacks(run))
        combine = lambda l, other, _: contrast(l, other, self.alpha, self.beta)  # noqa: E731
        return self.contrasted(run, branch, mask.any(-1), combine)
