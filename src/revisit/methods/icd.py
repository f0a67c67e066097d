"""ICD (Wang et al.): contrast with the same image under an instruction that invites hallucination.

The second run has a disturbing sentence as its system message, and score = (1 + alpha)·l − alpha·l_disturbed on the plausible
tokens, p >= beta · max p. This is what the authors' code does for LLaVA. SID's code, which many comparisons use, puts its
sentence right after the image instead: `place="image"`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import StepFunction
from revisit.decoding.prompt_edits import (
    EditItem,
    after_image,
    edited,
    image_edges,
    space_after_image,
    system_turn,
    text_ids,
    with_beginning,
    word_ids,
)
from revisit.decoding.run import Run
from revisit.registry import Share, Strength


class ICD(Contrastive):
    """ICD; the defaults are those of its program for LLaVA.

    Args:
        alpha: Strength of the contrast.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        sentence: The disturbing sentence. The authors try five; this is their most confusing one.
        place: Its place: as the "system" message, or right after the "image". In a prompt without a user's turn it comes
            first.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    sentence: Annotated[str, Field(min_length=1, max_length=2000)] = (
        "You are a confused objects detector to provide a fuzzy overview or impression of the image."
    )
    place: Literal["system", "image"] = "system"

    name = "icd"
    summary = "contrast with the same image under a disturbing instruction"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Wang et al., ICD, arXiv:2403.18715"

    @classmethod
    def sid(cls, **overrides: Any) -> ICD:
        """Return SID's version for captions: its sentence right after the image, and its effective alpha."""
        return cls(
            **{"sentence": "You are a confused image caption model.", "place": "image", "alpha": 0.5, **overrides}
        )

    @classmethod
    def questions(cls, **overrides: Any) -> ICD:
        """Return SID's version for yes/no questions about objects."""
        return cls.sid(**{"sentence": "You are a confused object detector.", **overrides})

    def begin(self, run: Run) -> StepFunction:
        mask = run.find_vision_tokens()
        edit = self._after_image(run) if self.place == "image" else self._as_system(run)
        branch = self.branch(run, edited(run, mask, edit, pixels=True))
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: contrast(l, other, self.alpha, self.beta))

    def _after_image(self, run: Run) -> EditItem:
        around = image_edges(run)
        words = self.sentence + ("" if space_after_image(run.processor) else "\n")
        sentence = text_ids(run, word_ids(run.processor, words))
        return lambda _item, ids, vision: after_image(ids, vision, around, sentence)

    def _as_system(self, run: Run) -> EditItem:
        system, user = (text_ids(run, ids) for ids in system_turn(run.processor, self.sentence))
        sentence = text_ids(run, word_ids(run.processor, self.sentence + " "))
        bos = run.generation_config.bos_token_id
        return lambda _item, ids, _vision: with_beginning(ids, sentence, system, user, bos)
