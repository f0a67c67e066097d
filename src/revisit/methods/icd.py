"""ICD (Wang et al.): contrast with the same image under an instruction that invites hallucination.

The second pass has a disturbing sentence as its system message, and score = (1 + alpha)·l − alpha·l_disturbed on the plausible
tokens, p >= beta · max p. This is what the authors' code does for LLaVA. SID's code, which many comparisons use, puts its
sentence right after the image instead: `place="image"`.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import Step
from revisit.decoding.prompt_edits import (
    Edit,
    EditItem,
    around_image,
    edited,
    has_chat_format,
    image_edges,
    image_span,
    new_tokens,
    text_ids,
)
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.models import families
from revisit.models.families import Edges, Family
from revisit.models.types import Processor
from revisit.registry import Share, Strength


class ICD(Contrastive):
    """ICD; the defaults are those of its program for LLaVA.

    Args:
        alpha: Strength of the contrast.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        sentence: The disturbing sentence. The authors try five; this is their most confusing one.
        place: Where it goes: as the "system" message, or right after the "image". In a prompt without a user's turn, the
            system message is its beginning.
        constraint: Drop implausible tokens "always", or only when "sampling" as in SID's code.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    sentence: Annotated[str, Field(min_length=1, max_length=2000)] = (
        "You are a confused objects detector to provide a fuzzy overview or impression of the image."
    )
    place: Literal["system", "image"] = "system"
    constraint: Literal["always", "sampling"] = "always"

    name = "icd"
    summary = "contrast with the same image under a disturbing instruction"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Wang et al., ICD, arXiv:2403.18715"

    @classmethod
    def sid(cls, **overrides: Any) -> ICD:
        """Return SID's version for captions: its sentence right after the image, and its effective alpha."""
        sentence = "You are a confused image caption model."
        return cls(**{"sentence": sentence, "place": "image", "alpha": 0.5, "constraint": "sampling", **overrides})

    @classmethod
    def questions(cls, **overrides: Any) -> ICD:
        """Return SID's version for yes/no questions about objects."""
        return cls.sid(**{"sentence": "You are a confused object detector.", **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        edit = self._after_image(prompt) if self.place == "image" else self._as_system(prompt)
        other = passes.contrast(edited(prompt, edit, pixels=True), self.mode)
        beta = self.beta if self.constraint == "always" or prompt.config.do_sample else 0.0
        return self.contrasted(prompt, other, lambda l, disturbed, _: contrast(l, disturbed, self.alpha, beta))

    def _after_image(self, prompt: Prompt) -> EditItem:
        edges = image_edges(prompt)
        spaced = space_after_image(prompt.processor, families.of(prompt.model.config.model_type))
        sentence = sentence_ids(prompt, self.sentence + ("" if spaced else "\n"))
        return lambda _item, ids, vision: after_image(ids, vision, edges, sentence)

    def _as_system(self, prompt: Prompt) -> EditItem:
        family = families.of(prompt.model.config.model_type)
        system, user = (text_ids(prompt, ids) for ids in system_turn(prompt.processor, family, self.sentence))
        sentence = sentence_ids(prompt, self.sentence + " ")
        bos = prompt.config.bos_token_id
        return lambda _item, ids, _vision: with_beginning(ids, sentence, system, user, bos)


# -- the sentence in a prompt ---------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def sentence_ids(prompt: Prompt, sentence: str) -> Tensor:
    """Return the token ids of a sentence without special tokens.  -> (n,)"""
    ids = prompt.processor.tokenizer(sentence, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RevisitError(f"The processor's tokenizer returns no tokens for {sentence!r}.")
    return text_ids(prompt, ids)


def after_image(ids: Tensor, vision: Tensor, edges: Edges, words: Tensor) -> Edit:
    """Insert words right after the last image."""
    span = image_span(ids, vision, edges).nonzero().squeeze(-1)
    at = int(span[-1]) + 1 if len(span) else 0
    columns = torch.arange(len(ids), device=ids.device)
    return torch.cat([columns[:at], new_tokens(words), columns[at:]])


def with_beginning(ids: Tensor, words: Tensor, system: Tensor, user: Tensor, bos: int | None) -> Edit:
    """Use words as the system message.

    Everything before the first user's turn, which begins with the tokens `user`, is replaced by `system`, the tokens of the new
    system message. If no such turn is found or `system` is empty, the words are inserted at the beginning, after the BOS token.
    """
    at = find_tokens(ids, user)
    if at is None or not len(system):
        at = int(len(ids) > 0 and bos is not None and int(ids[0]) == bos)
        system = torch.cat([ids[:at], words])
    return torch.cat([new_tokens(system), torch.arange(at, len(ids), device=ids.device)])


def find_tokens(ids: Tensor, pattern: Tensor) -> int | None:
    """Return the first position of a sequence of tokens, or None.  (n,), (k,)"""
    if not len(pattern) or len(pattern) > len(ids):
        return None
    places = (ids.unfold(0, len(pattern), 1) == pattern).all(-1).nonzero().flatten()
    return int(places[0]) if len(places) else None


def system_turn(processor: Processor, family: Family, words: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before the first user's turn with words as the system message, and those that open that turn.

    Both are empty if the processor has no chat format, or one without system messages.
    """
    if not has_chat_format(processor):
        return (), ()
    plain, _ = around_image(processor, family, words)
    try:
        with_words, _ = around_image(processor, family, "?", words)
    except RevisitError as error:
        logger.info("The chat format has no system message (%s).", error)
        return (), ()
    same = 0  # equal tokens at the end
    while same < min(len(plain), len(with_words)) and plain[-1 - same] == with_words[-1 - same]:
        same += 1
    if not same or with_words == plain:
        return (), ()
    return with_words[:-same], with_words[-same:]


def space_after_image(processor: Processor, family: Family) -> bool:
    """Return whether the processor's chat format has white space between an image and the question after it."""
    tokenizer = processor.tokenizer
    _, tail = around_image(processor, family, "?")
    return bool(str(tokenizer.decode(list(tail)))[:1].isspace())
