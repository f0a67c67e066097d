"""ICD (Wang et al.): contrast with the same image under an instruction that invites hallucination.

1. Run the model a second time with a disturbing sentence in place of the system message.
2. score = (1 + alpha)·l − alpha·l_disturbed on the plausible tokens, p >= beta · max p.

That is what the authors' code does for LLaVA; for InstructBLIP they disturb the Q-Former's instruction. SID's code, which is
often compared with, puts its sentence right after the image instead: `place="image"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from revisit.errors import RevisitError
from revisit.methods.contrastive import Contrastive, contrast
from revisit.methods.prompts import Boundaries, space_after_image, system_turn, word_ids
from revisit.registry import Share, Strength

if TYPE_CHECKING:
    from revisit.contrast.prompt_edits import EditItem
    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run


class ICD(Boundaries, Contrastive):
    """Settings of ICD; the defaults are those of its program for LLaVA.

    Args:
        alpha: Strength of the contrast.
        beta: How unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
        sentence: What disturbs. The authors try five; this is their most confusing one.
        place: Where it goes: in place of the "system" message, or right after the "image". A prompt without a user's turn gets
            it at its very beginning.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    sentence: str = "You are a confused objects detector to provide a fuzzy overview or impression of the image."
    place: Literal["system", "image"] = "system"

    name = "icd"
    summary = "contrast with the same image under a disturbing instruction"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Wang et al., ICD, arXiv:2403.18715"

    @classmethod
    def sid(cls, **overrides: Any) -> ICD:
        """SID's version for captions: its sentence right after the image, and its effective alpha."""
        return cls(
            **{"sentence": "You are a confused image caption model.", "place": "image", "alpha": 0.5, **overrides}
        )

    @classmethod
    def questions(cls, **overrides: Any) -> ICD:
        """SID's version for yes/no questions about objects."""
        return cls.sid(**{"sentence": "You are a confused object detector.", **overrides})

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.prompt_edits import edited

        if run.inputs.get("qformer_input_ids") is not None:
            raise RevisitError(
                "ICD: this model reads its instruction in a Q-Former, which is not supported; use a model with its "
                "image in the prompt, such as LLaVA, Qwen-VL or InternVL."
            )
        mask = run.find_vision_tokens()
        edit = self._after_image(run) if self.place == "image" else self._as_system(run)
        branch = self.branch(run, edited(run, mask, edit, pixels=True))
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: contrast(l, other, self.alpha, self.beta))

    def _after_image(self, run: Run) -> EditItem:
        from revisit.contrast.prompt_edits import after_image

        around = self.boundaries(run)
        words = self.sentence + ("" if space_after_image(run.processor) else "\n")
        sentence = self.text_ids(run, word_ids(run.processor, words))
        return lambda _item, ids, vision: after_image(ids, vision, around, sentence)

    def _as_system(self, run: Run) -> EditItem:
        from revisit.contrast.prompt_edits import with_beginning

        system, user = (self.text_ids(run, ids) for ids in system_turn(run.processor, self.sentence))
        sentence = self.text_ids(run, word_ids(run.processor, self.sentence + " "))
        bos = run.generation_config.bos_token_id
        return lambda _item, ids, _vision: with_beginning(ids, sentence, system, user, bos)
