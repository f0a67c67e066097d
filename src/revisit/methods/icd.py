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
    from torch import Tensor

    from revisit.contrast.prompt_edits import Edit
    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.models.types import Processor


class ICD(Boundaries, Contrastive):
    """Settings of ICD; the defaults are those of its program for LLaVA.

    Args:
        alpha: Strength of the contrast.
        beta: How unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
        sentence: What disturbs; made into token ids by `bind(processor)`. The authors try five; this is their most confusing one.
        place: Where it goes: in place of the "system" message, or right after the "image".
        sentence_ids: Its token ids, where there is no processor to bind.
        system_ids, user_ids: For "system", the tokens of the prompt's beginning up to the user's turn, and those that open that
            turn; found by `bind(processor)`. Without them the sentence goes to the very beginning of the prompt.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    sentence: str = "You are a confused objects detector to provide a fuzzy overview or impression of the image."
    place: Literal["system", "image"] = "system"
    sentence_ids: tuple[int, ...] = ()
    system_ids: tuple[int, ...] = ()
    user_ids: tuple[int, ...] = ()

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

    @property
    def needs_processor(self) -> bool:
        """Whether the tokens of the sentence are not known yet."""
        return not self.sentence_ids

    def bind(self, processor: Processor) -> ICD:
        """This method with its sentence as token ids."""
        if self.sentence_ids:
            return self
        if self.place == "image":
            words = self.sentence + ("" if space_after_image(processor) else "\n")
            return self.replace(sentence_ids=word_ids(processor, words))
        system, user = system_turn(processor, self.sentence)
        ids = word_ids(processor, self.sentence + " ")
        return self.replace(sentence_ids=ids, system_ids=system, user_ids=user)

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.prompt_edits import after_image, edited, with_beginning

        if run.inputs.get("qformer_input_ids") is not None:
            raise RevisitError(
                "ICD: this model reads its instruction in a Q-Former, which is where the method disturbs it; that is not supported, "
                "use a model that has its image in the prompt, such as LLaVA, Qwen-VL or InternVL."
            )
        mask = run.find_vision_tokens()
        for name in ("sentence_ids", "system_ids", "user_ids"):
            self.check_ids(run, getattr(self, name), name)
        words = run.input_ids.new_tensor(self.sentence_ids)
        around = self.boundaries(run) if self.place == "image" else ()
        system, user = (run.input_ids.new_tensor(ids) for ids in (self.system_ids, self.user_ids))
        bos = run.generation_config.bos_token_id

        def edit(_item: int, ids: Tensor, vision: Tensor) -> Edit:
            if self.place == "image":
                return after_image(ids, vision, around, words)
            return with_beginning(ids, words, system, user, bos)

        disturbed = edited(run, mask, edit, pixels=True)
        branch = self.branch(run, disturbed)
        combine = lambda l, other, _: contrast(l, other, self.alpha, self.beta)  # noqa: E731
        return self.contrasted(run, branch, mask.any(-1), combine)
