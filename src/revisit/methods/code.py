"""CODE (Kim et al.): contrast with the model's own description of the image, put in the image's place.

1. The model describes the image, greedily. Descriptions are kept per image.
2. A second run reads the same prompt with the description's tokens where the vision tokens were.
3. With the bounded divergence D of the two distributions: score = (2 − D)·l − (1 − D)·l_described on the tokens with
   p >= D · max p. Where the runs agree, the contrast is full and nothing is cut; where they do not, only the top is left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from revisit.methods.contrastive import Contrastive
from revisit.methods.prompts import Boundaries, around_image, starts_with_bos
from revisit.registry import Count, PositiveNumber

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.models.types import Processor

REQUEST = (
    "Provide a detailed description of the image, covering all visible elements and their interactions, so as to "
    "thoroughly answer any potential questions about the image."
)  # the authors' wording, which is part of their method


def bounded_divergence(p: Tensor, q: Tensor, power: float) -> Tensor:
    """½·Σ log2(|p − q|^power + 1)·(p + q): 0 for equal, 1 for disjoint distributions.  (..., V), (..., V) -> (...)"""
    return 0.5 * (((p - q).abs().pow(power) + 1).log2() * (p + q)).sum(-1)


def contrast(logits: Tensor, described: Tensor, power: float) -> Tensor:
    """The scores, -inf where p < D · max p.  (..., V), (..., V) -> (..., V)"""
    p, q = logits.softmax(-1), described.softmax(-1)
    d = bounded_divergence(p, q, power).unsqueeze(-1)
    scores = logits + (1 - d) * (logits - described)
    return scores.masked_fill((p < d * p.amax(-1, keepdim=True)) | (logits == -math.inf), -math.inf)


class CODE(Boundaries, Contrastive):
    """Settings of CODE.

    Args:
        power: Of the difference in the divergence (cd_alpha of the released command line).
        request: What the model is asked for its description; made into token ids by `bind(processor)`.
        request_ids: The request in the model's chat format, as the token ids before and after the image (not needed if bound).
        description_tokens: How long a description may get.
        bos: Begin the description with this token id; the released code does, for tokenizers that write one.
    """

    power: PositiveNumber = 0.7
    request: str = REQUEST
    request_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    description_tokens: Count = 512
    bos: int | None = None

    name = "code"
    summary = "contrast with the model's own description in the image's place"
    cost = "a description per image, then 2 rows per sequence, 2 prefills"
    source = "Kim et al., CODE, arXiv:2406.01920"

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """The released command line: power 0.7, 512 tokens; `bind(processor)` then adds the BOS where it is written."""
        return cls(**{"bos": -1, **overrides})

    @property
    def needs_processor(self) -> bool:
        """Whether the tokens of the request, or of the beginning of a text, are not known yet."""
        return self.request_ids is None or self.bos == -1

    def bind(self, processor: Processor) -> CODE:
        """This method with its request, and where asked for the BOS, as token ids."""
        request = self.request_ids or around_image(processor, self.request)
        bos = starts_with_bos(processor) if self.bos == -1 else self.bos
        return self.replace(request_ids=request, bos=bos)

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.descriptions import descriptions
        from revisit.contrast.prompt_edits import edited, in_place_of_image

        assert self.request_ids is not None  # bound before
        first = () if self.bos is None else (self.bos,)
        mask = run.find_vision_tokens()
        self.check_ids(run, (*self.request_ids[0], *self.request_ids[1], *first), "request_ids or bos")
        written = descriptions(run, mask, self.request_ids, self.boundaries(run), self.description_tokens)
        words = [run.input_ids.new_tensor([*first, *ids]) for ids in written]
        text = edited(run, mask, lambda item, ids, vision: in_place_of_image(ids, vision, words[item]), pixels=False)
        branch = self.branch(run, text)
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: contrast(l, other, self.power))
