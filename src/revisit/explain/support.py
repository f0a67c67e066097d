"""Which words of a text do the vision tokens support? What `revisit.check` computes.

The picture, the prompt and the text run through the model once (teacher forcing). A word is supported as far as some vision tokens
say it: read through the model's own head, they give its first token a high probability over the whole vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.benchmarks.chair_words import WORDS
from revisit.errors import RevisitError
from revisit.explain.forcing import force
from revisit.explain.prefill import logit_slices
from revisit.explain.tokens import Span, token_spans, token_text, word_tokens, writers
from revisit.models.geometry import Layout, layout
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import vision_texts
from revisit.taps.states import vision_mask

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.trace import RowTrace
    from revisit.models.types import Inputs, Model, Processor, Tokenizer

TOP = 5  # vision tokens whose mean probability is the support of a token
CANDIDATES = 20  # likeliest tokens of the model among which a better word is sought
PLAUSIBLE = 1e-3  # least probability of such a token, as a share of the likeliest one's
# A run of letters and digits, or one of the object names of two words ("hot dog"), which is not about a dog.
_NAMES = "|".join(sorted(name for name in WORDS if " " in name))
WORD = re.compile(rf"\b(?:{_NAMES})(?:e?s)?\b|[^\W_]+(?:['’-][^\W_]+)*", re.IGNORECASE)


@dataclass(frozen=True)
class Word:
    """A word of the text.

    Attributes:
        text: The word as written.
        start: Where it begins in the text.
        end: Where it ends, excluded.
        support: How far the picture supports it, from 0 to 1.
        checkable: Whether it is among the words that were to be checked.
        probability: The model's own probability of the word; None where it was not recorded.
        instead: A word with a larger product of the model's probability and the picture's support, if there is one.
        token: The vision token that supports it most.
        image: The number of the picture that the token belongs to, from 0.
        row: The row of that token's patch, where the layout is known.
        column: The column of that patch.
        box: The patch in pixels of the picture: left, top, right, bottom.
    """

    text: str
    start: int
    end: int
    support: float
    checkable: bool
    probability: float | None
    instead: str | None
    token: int
    image: int = 0
    row: int | None = None
    column: int | None = None
    box: Sequence[float] | None = None


@dataclass(frozen=True)
class Written:
    """A text as the model saw it: its tokens, and what the model itself would have written."""

    text: str
    tokens: Sequence[int]
    words: Sequence[tuple[int, int, list[int]]]  # start, end and numbers of the tokens of each word
    logs: Sequence[float | None]  # log-probability of each token, where it is known
    likely: Mapping[int, Sequence[tuple[int, float]]]  # by token number: the likeliest tokens there, with probabilities

    @classmethod
    def decoded(cls, tokenizer: Tokenizer, text: str, tokens: Sequence[int], recorded: RowTrace) -> Written:
        """An answer, or its beginning, with what decoding recorded about its tokens."""
        whole, spans = token_spans(tokenizer, tokens)
        shift = len(whole) - len(whole.lstrip())
        places = word_places(text, [(a - shift, b - shift) for a, b in spans])
        likely = {n: list(zip(step.ids, step.base, strict=True)) for n, step in enumerate(recorded.records)}
        chances = [dict(likely.get(n, ())).get(token) for n, token in enumerate(tokens)]
        return cls(text, tokens, places, [math.log(chance) if chance else None for chance in chances], likely)


@dataclass(frozen=True)
class ReadText:
    """A text that a model read after its pictures, with the states that the pass left."""

    text: str
    images: list[Image]
    tokens: list[int]
    spans: list[Span]  # of each token in the text
    states: Tensor  # (tokens, d), each of which predicts a token
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    head: Head
    layout: Layout

    @torch.no_grad()
    def written(self, asked: Callable[[str], bool]) -> Written:
        """The text with the model's own view of it: its likeliest tokens where a word that is asked for begins."""
        words = word_places(self.text, self.spans)
        starts = {own[0] for start, end, own in words if asked(self.text[start:end])}
        logs: list[float] = []
        likely: dict[int, list[tuple[int, float]]] = {}
        for logits in logit_slices(self.head, self.states):
            at, table = len(logs), logits.log_softmax(-1)  # (part, V)
            written = torch.tensor(self.tokens[at : at + len(table)], device=table.device)
            logs += table.gather(-1, written[:, None])[:, 0].tolist()
            places = [n for n in sorted(starts) if at <= n < len(logs)]
            best = table[[n - at for n in places]].topk(min(CANDIDATES, table.shape[-1]), dim=-1)
            for n, ids, values in zip(places, best.indices.tolist(), best.values.exp().tolist(), strict=True):
                likely[n] = list(zip(ids, values, strict=True))
        return Written(self.text, self.tokens, words, logs, likely)


def read_texts(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    prompts: Sequence[str],
    images: Sequence[Sequence[Image]],
    texts: Sequence[str],
    layers: Sequence[int],
) -> list[ReadText]:
    """One forward pass over texts behind their prompts; the vision tokens' states are kept at these layers.

    Args:
        model: A loaded model.
        processor: Its processor.
        inputs: The prompts, as the processor prepared them.
        prompts: The prompts as the chat template wrote them.
        images: The pictures of each prompt.
        texts: What follows each prompt.
        layers: Hidden states to keep.
    """
    vision_ids = ModelParts.of(model).vision_ids
    encoded = [encode_text(processor, before, text) for before, text in zip(prompts, texts, strict=True)]
    if any(bool(vision_mask(torch.tensor(tokens), vision_ids).any()) for tokens, _ in encoded):
        raise RevisitError("The text contains this model's image token; leave it out.")
    forced = force(model, inputs, [tokens for tokens, _ in encoded], layers)
    found = []
    for row, (text, own, read) in enumerate(zip(texts, images, forced, strict=True)):
        places = row_layout(model, processor, inputs, row, images, len(read.vision[layers[0]]))
        found.append(ReadText(text, list(own), *encoded[row], read.states, read.vision, read.head, places))
    return found


def encode_text(processor: Processor, before: str, text: str) -> tuple[list[int], list[Span]]:
    """The tokens that would continue a prompt with this text, and the characters of the text that each one covers."""
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The text contains {token!r}, which marks an image in this model; leave it out.")
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise RevisitError("The model's tokenizer does not say which characters a token covers; load a fast tokenizer.")
    # An answer begins with a space after "ASSISTANT:", but not after a line break or a special token.
    blank = "" if before[-1:] in ("", ">", "]") or before[-1].isspace() or text[0].isspace() else " "
    whole = tokenizer(before + blank + text, add_special_tokens=False, return_offsets_mapping=True)
    at = len(before) + len(blank)
    pairs = [
        (int(token), (max(a - at, 0), b - at))
        for token, (a, b) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        if b > at
    ]
    return [token for token, _ in pairs], [span for _, span in pairs]


def row_layout(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    row: int,
    images: Sequence[Sequence[Image]],
    tokens: int,
) -> Layout:
    """The layout of one row of a batch, from its own part of what the processor says about each image."""
    total, first = sum(map(len, images)), sum(map(len, images[:row]))
    own = {
        name: value[first : first + len(images[row])] if isinstance(value, Tensor) and len(value) == total else value
        for name, value in inputs.items()
    }
    sizes = [image.size for image in images[row]]
    return layout(model.config, getattr(processor, "image_processor", None), sizes, tokens, own)


def word_places(text: str, spans: Sequence[Span]) -> list[tuple[int, int, list[int]]]:
    """(start, end, numbers of the tokens that write it) of each word of a text."""
    found = [(*match.span(), writers(spans, *match.span())) for match in WORD.finditer(text)]
    return [place for place in found if place[2]]


@torch.no_grad()
def say(head: Head, states: Tensor, ids: Sequence[int]) -> Tensor:
    """The probability, over the whole vocabulary, that each vision token gives to some tokens.  (n, d) -> (n, ids)"""
    columns = torch.tensor(list(ids), device=head.device)
    parts = [(logits[:, columns] - logits.logsumexp(-1, keepdim=True)).exp() for logits in logit_slices(head, states)]
    return torch.cat(parts)


def support(
    head: Head,
    tokenizer: Tokenizer,
    written: Written,
    states: Tensor,
    places: Layout,
    asked: Callable[[str], bool],
) -> list[Word]:
    """The words of a text with their support by the vision tokens' states (n, d), which lie on the picture at `places`."""
    text, tokens = written.text, written.tokens
    if not written.words:
        return []
    # A word of several tokens has the support of its first, which distinguishes most words.
    firsts = [
        first_tokens(tokenizer, text[start:end], tokens[own[0]]) if asked(text[start:end]) else [tokens[own[0]]]
        for start, end, own in written.words
    ]
    rivals = [_rivals(tokenizer, written.likely.get(own[0], ()), tokens[own[0]], asked) for _, _, own in written.words]
    ids = sorted({token for group in (*firsts, *rivals) for token in group})
    number = {token: n for n, token in enumerate(ids)}
    table = say(head, states, ids)  # (vision tokens, ids)
    supports = table.topk(min(TOP, len(table)), dim=0).values.mean(0).tolist()
    best = table.argmax(0).tolist()
    found = []
    for (start, end, own), ways, others in zip(written.words, firsts, rivals, strict=True):
        value, first = max((supports[number[token]], token) for token in ways)
        region = places.region(best[number[first]])
        known = [log for n in own if (log := written.logs[n]) is not None]
        chance = math.exp(sum(known)) if len(known) == len(own) else None
        scores = {token: supports[number[token]] * p for token, p in others.items()}
        rival = max(scores, key=scores.__getitem__, default=None)
        beaten = rival is not None and chance is not None and scores[rival] > value * math.exp(known[0])
        found.append(
            Word(
                text=text[start:end],
                start=start,
                end=end,
                support=value,
                checkable=asked(text[start:end]),
                probability=chance,
                instead=token_text(tokenizer, rival).strip() if rival is not None and beaten else None,
                token=best[number[first]],
                image=0 if region is None else region.image,
                row=None if region is None else region.row,
                column=None if region is None else region.column,
                box=None if region is None else [round(edge, 1) for edge in region.box],
            )
        )
    return found


def _rivals(
    tokenizer: Tokenizer, likely: Iterable[tuple[int, float]], token: int, asked: Callable[[str], bool]
) -> dict[int, float]:
    """The words that are asked for among the model's plausible tokens, with their probabilities."""
    pairs = dict(likely)
    least = PLAUSIBLE * max(pairs.values(), default=0)
    texts = {t: token_text(tokenizer, t) for t, chance in pairs.items() if chance >= least and t != token}
    return {t: pairs[t] for t, text in texts.items() if text[:1].isspace() and asked(text.strip())}


def first_tokens(tokenizer: Tokenizer, word: str, token: int) -> list[int]:
    """The first token as written, and that of the word in lower case inside a sentence, which is how vision tokens say it."""
    return list(dict.fromkeys([token, *word_tokens(tokenizer, word.lower())[:1]]))
