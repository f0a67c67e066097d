"""CODE (Kim et al.): contrast with the model's own description in place of the image.

The model describes the image with greedy decoding, and the second pass gets the description's tokens in place of the vision
tokens. With the bounded divergence D of the two distributions, score = (2 − D)·l − (1 − D)·l_described on the tokens with p >=
D · max p. Where the runs agree, the contrast is full and nothing is cut; where they disagree, only the top is left.
"""

from __future__ import annotations

import math
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor

from revisit.decoding.contrastive import Contrastive
from revisit.decoding.method import Step
from revisit.decoding.prompt_edits import Edit, around_image, edited, image_edges, image_span, new_tokens, text_ids
from revisit.forward.adapters import row_adapters
from revisit.forward.passes import Passes
from revisit.forward.pixels import item_digests
from revisit.forward.prompt import Prompt
from revisit.forward.states import hooks_paused, saved_positions
from revisit.models import families
from revisit.models.identity import state_of
from revisit.models.outputs import end_tokens, until_end
from revisit.models.types import Model, Processor
from revisit.registry import PositiveNumber
from revisit.step.reference import plausible

REQUEST = (
    "Provide a detailed description of the image, covering all visible elements and their interactions, so as to "
    "thoroughly answer any potential questions about the image."
)  # the authors' wording, which is part of their method


def bounded_divergence(p: Tensor, q: Tensor, power: float) -> Tensor:
    """Return ½·Σ log2(|p − q|^power + 1)·(p + q): 0 for equal, 1 for disjoint distributions.  (..., V), (..., V) -> (...)"""
    return 0.5 * (((p - q).abs().pow(power) + 1).log2() * (p + q)).sum(-1)


def contrast_description(logits: Tensor, described: Tensor, power: float) -> Tensor:
    """Return the scores, -inf where p < D · max p.  (..., V), (..., V) -> (..., V)"""
    d = bounded_divergence(logits.softmax(-1), described.softmax(-1), power).unsqueeze(-1)  # (..., 1)
    scores = logits + (1 - d) * (logits - described)
    return scores.masked_fill(~plausible(logits, d) | (logits == -math.inf), -math.inf)


class CODE(Contrastive):
    """CODE; the defaults are those of its command line.

    Args:
        power: Exponent of the difference in the divergence (cd_alpha of the released command line).
        request: The prompt for the description.
        system: The system message before it; by default that of the chat format. The released program for LLaVA-1.5 sends Vicuna's.
        description_tokens: Most tokens of a description.
        bos: Begin the description with the BOS token if the tokenizer adds one to every text, as the released code does.
    """

    power: PositiveNumber = 0.7
    request: Annotated[str, Field(min_length=1, max_length=2000)] = REQUEST
    system: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    description_tokens: Annotated[int, Field(ge=1, le=4096)] = 512
    bos: bool = False

    name = "code"
    summary = "contrast with the model's own description in place of the image"
    cost = "a description per image, then 2 rows per sequence, 2 prefills"
    source = "Kim et al., CODE, arXiv:2406.01920"
    released = {"bos": True}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        family = families.of(prompt.model.config.model_type)
        request = around_image(prompt.processor, family, self.request, self.system)
        first = starts_with_bos(prompt.processor) if self.bos else ()
        text_ids(prompt, (*request[0], *request[1], *first))  # raises for ids that are not text
        texts = descriptions(prompt, request, image_edges(prompt), self.description_tokens)
        words = [prompt.ids.new_tensor([*first, *ids]) for ids in texts]
        text = edited(prompt, lambda item, _ids, vision: in_place_of_image(vision, words[item]), pixels=False)
        other = passes.contrast(text, self.mode)
        return self.contrasted(prompt, other, lambda l, text, _: contrast_description(l, text, self.power))


# -- descriptions ---------------------------------------------------------------------------------------------------

Tokens = tuple[int, ...]

MOST = 2000  # descriptions kept for each model; with their prompts at most about 100 MB
# model -> image and request -> description
_DESCRIPTIONS: WeakKeyDictionary[Model, dict[object, Tokens]] = WeakKeyDictionary()


def descriptions(prompt: Prompt, request: tuple[Tokens, Tokens], edges: families.Edges, length: int) -> list[Tokens]:
    """Return the token ids of each item's description without the end token; () for items without an image."""
    cached = _DESCRIPTIONS.setdefault(prompt.model, {})
    ends = tuple(sorted(end_tokens(prompt.config)))
    state, adapters = state_of(prompt.model, prompt.processor), row_adapters(prompt.model) or ["same"]
    digests = item_digests(prompt)
    keys = [
        (digest, request, length, ends, state, adapters[item * len(adapters) // len(digests)])
        for item, digest in enumerate(digests)
    ]
    has_image = prompt.has_image[:: prompt.rows_per_item].tolist()
    if any(image and key not in cached for key, image in zip(keys, has_image, strict=True)):
        for key, text in zip(keys, _describe(prompt, request, edges, length), strict=True):
            cached.setdefault(key, text)
    texts = [cached[key] if image else () for key, image in zip(keys, has_image, strict=True)]
    while len(cached) > MOST:
        cached.pop(next(iter(cached)), None)
    return texts


def _describe(prompt: Prompt, request: tuple[Tokens, Tokens], edges: families.Edges, length: int) -> list[Tokens]:
    """Generate a description of every item's image."""

    def with_request(_item: int, ids: Tensor, vision: Tensor) -> Edit:
        columns = image_span(ids, vision, edges).nonzero().squeeze(-1)
        image = torch.arange(int(columns[0]), int(columns[-1]) + 1, device=ids.device)
        head, tail = (new_tokens(ids.new_tensor(part)) for part in request)
        return torch.cat([head, image, tail])

    inputs = edited(prompt, with_request, pixels=True)
    config = prompt.config
    with saved_positions(prompt.model), hooks_paused():  # of other methods in a chain
        sequences = prompt.model.generate(
            **inputs,
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            repetition_penalty=1.0,  # plain decoding, whatever the model's own settings are
            no_repeat_ngram_size=0,
            min_new_tokens=None,
        )
    ends = end_tokens(config)
    rows = (until_end(row, ends) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist())
    return [tuple(row[:-1] if row and row[-1] in ends else row) for row in rows]


def in_place_of_image(vision: Tensor, words: Tensor) -> Edit:
    """Put words in place of the first image, and remove all others; the tokens around images stay."""
    at = int(vision.nonzero()[0])
    columns = torch.arange(len(vision), device=vision.device)
    return torch.cat([columns[:at], new_tokens(words), columns[at:][~vision[at:]]])


def starts_with_bos(processor: Processor) -> tuple[int, ...]:
    """Return the id of the BOS token if the tokenizer adds it to every text, else ()."""
    tokenizer = processor.tokenizer
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ()
