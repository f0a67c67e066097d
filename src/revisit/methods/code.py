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
        power: Exponent of the difference in the divergence (cd_alpha of the released command line).
        request: What the model is asked for its description.
        description_tokens: How long a description may get.
        bos: Begin the description with the BOS token, where the tokenizer writes one, as the released code does.
    """

    power: PositiveNumber = 0.7
    request: str = REQUEST
    description_tokens: Count = 512
    bos: bool = False

    name = "code"
    summary = "contrast with the model's own description in the image's place"
    cost = "a description per image, then 2 rows per sequence, 2 prefills"
    source = "Kim et al., CODE, arXiv:2406.01920"

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """The released command line: power 0.7, 512 tokens, and a BOS where the tokenizer writes one."""
        return cls(**{"bos": True, **overrides})

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.descriptions import descriptions
        from revisit.contrast.prompt_edits import edited, in_place_of_image

        mask = run.find_vision_tokens()
        head, tail = around_image(run.processor, self.request)
        first = starts_with_bos(run.processor) if self.bos else ()
        self.text_ids(run, (*head, *tail, *first))  # checked
        written = descriptions(run, mask, (head, tail), self.boundaries(run), self.description_tokens)
        words = [run.input_ids.new_tensor([*first, *ids]) for ids in written]
        text = edited(run, mask, lambda item, ids, vision: in_place_of_image(ids, vision, words[item]), pixels=False)
        branch = self.branch(run, text)
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: contrast(l, other, self.power))
