"""Which words of a text do the vision tokens support? What `revisit.check` computes.

The picture, the prompt and the text run through the model once (teacher forcing). A word is supported if some vision tokens say
it: read through the model's own head, they give its first token a high probability over the whole vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.benchmarks.chair_words import WORDS
from revisit.errors import RevisitError
from revisit.explain.forcing import force
from revisit.explain.prefill import logit_slices
from revisit.explain.tokens import Span, token_spans, token_text, word_tokens, writers
from revisit.models.geometry import Layout, layout
from revisit.models.parts import Head, vision_token_ids
from revisit.models.prompts import refuse_image_tokens
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
    """A word of the text. Of words that were not to be checked, only the support is known.

    Attributes:
        text: The word as written.
        start: Where it begins in the text.
        end: Where it ends, excluded.
        support: How far the picture supports it, from 0 to 1.
        checkable: Whether it is among the words that were to be checked.
        vision_token: The vision token that supports it most, from 0.
        probability: The model's own probability of the word; None where it was not recorded.
        instead: A word with a larger product of the model's probability and the picture's support, if there is one.
        image: The number of the picture that the vision token belongs to, from 1.
        patch_row: The row of its patch, from 1, where the layout is known.
        patch_col: The column of its patch, from 1.
        box: The patch in pixels of the picture: left, top, right, bottom.
    """

    text: str
    start: int
    end: int
    support: float
    checkable: bool
    vision_token: int
    probability: float | None = None
    instead: str | None = None
    image: int = 1
    patch_row: int | None = None
    patch_col: int | None = None
    box: Sequence[float] | None = None


@dataclass(frozen=True)
class Written:
    """A text as the model saw it: its tokens, and what the model itself would have written."""

    text: str
    tokens: Sequence[int]
    words: Sequence[tuple[int, int, list[int]]]  # start, end and numbers of the tokens of each word
    logs: Mapping[int, float]  # by token number: log-probability of the token, where it is known
    likely: Mapping[int, Mapping[int, float]]  # by token number: the likeliest tokens there, with probabilities

    @classmethod
    def decoded(cls, tokenizer: Tokenizer, text: str, tokens: Sequence[int], recorded: RowTrace) -> Written:
        """An answer, or its beginning, with what decoding recorded about its tokens."""
        whole, spans = token_spans(tokenizer, tokens)
        shift = len(whole) - len(whole.lstrip())
        places = word_places(text, [(a - shift, b - shift) for a, b in spans])
        likely = {n: dict(zip(step.ids, step.base, strict=True)) for n, step in enumerate(recorded.records)}
        chances = ((n, likely[n].get(token)) for n, token in enumerate(tokens) if n in likely)
        return cls(text, tokens, places, {n: math.log(chance) for n, chance in chances if chance}, likely)


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
        """The text with the model's own view of the words that are asked for."""
        words = word_places(self.text, self.spans)
        places = [own for start, end, own in words if asked(self.text[start:end])]
        numbers = [n for own in places for n in own]
        logs: list[float] = []
        likely: list[dict[int, float]] = []
        for logits in logit_slices(self.head, self.states[numbers]):
            table = logits.log_softmax(-1)  # (part, V)
            written = [self.tokens[n] for n in numbers[len(logs) : len(logs) + len(table)]]
            logs += table[range(len(table)), written].tolist()
            best = table.topk(min(CANDIDATES, table.shape[-1]))
            likely += map(dict, map(zip, best.indices.tolist(), best.values.exp().tolist()))
        known = dict(zip(numbers, likely, strict=True))
        return Written(self.text, self.tokens, words, dict(zip(numbers, logs, strict=True)), known)


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
    vision_ids = vision_token_ids(model.config)
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
    refuse_image_tokens(processor, "text", text)
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise RevisitError("The model's tokenizer has no character offsets; load a fast tokenizer.")
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


class Vocabulary:
    """Which words are asked for, and which tokens of a model begin one."""

    def __init__(self, tokenizer: Tokenizer, asked: Callable[[str], bool]) -> None:
        self.tokenizer, self.asked = tokenizer, asked

    def begins(self, token: int) -> bool:
        """Whether a token begins a word that is asked for."""
        text = token_text(self.tokenizer, token)
        return text[:1].isspace() and self.asked(text.strip())

    def rivals(self, likely: Mapping[int, float], token: int) -> dict[int, float]:
        """The words that are asked for among the model's plausible tokens, but not `token`, with their probabilities."""
        least = PLAUSIBLE * max(likely.values(), default=0)
        return {t: chance for t, chance in likely.items() if chance >= least and t != token and self.begins(t)}


def support(head: Head, vocabulary: Vocabulary, written: Written, states: Tensor, places: Layout) -> list[Word]:
    """The words of a text with their support by the vision tokens' states (n, d); `places` are those of their patches."""
    if not written.words:
        return []
    texts = [written.text[start:end] for start, end, _ in written.words]
    firsts = [[written.tokens[own[0]]] for _, _, own in written.words]
    rivals = dict[int, dict[int, float]]()  # of each word that is asked for
    for n, (text, (_, _, own)) in enumerate(zip(texts, written.words, strict=True)):
        if vocabulary.asked(text):
            # A word of several tokens has the support of its first, which distinguishes most words.
            rivals[n] = vocabulary.rivals(written.likely.get(own[0], {}), written.tokens[own[0]])
            firsts[n] = first_tokens(vocabulary.tokenizer, text, written.tokens[own[0]])
    ids = sorted({token for group in (*firsts, *rivals.values()) for token in group})
    best = say(head, states, ids).topk(min(TOP, len(states)), dim=0)  # (top, ids)
    supports = dict(zip(ids, best.values.mean(0).tolist(), strict=True))
    nearest = dict(zip(ids, best.indices[0].tolist(), strict=True))
    found = []
    for n, (start, end, own) in enumerate(written.words):
        value, first = max((supports[token], token) for token in firsts[n])
        more: dict[str, Any] = {}
        if n in rivals:
            more = _patch(places, nearest[first])
            if all(token in written.logs for token in own):
                more["probability"] = math.exp(sum(written.logs[token] for token in own))
                own_score = value * math.exp(written.logs[own[0]])
                better = {t: score for t, p in rivals[n].items() if (score := supports[t] * p) > own_score}
                if better:
                    more["instead"] = token_text(vocabulary.tokenizer, max(better, key=better.__getitem__)).strip()
        found.append(Word(texts[n], start, end, value, n in rivals, nearest[first], **more))
    return found


def _patch(places: Layout, vision_token: int) -> dict[str, Any]:
    """The patch of a vision token, as fields of a `Word`."""
    region = places.region(vision_token)
    if region is None:
        return {}
    box = [round(edge, 1) for edge in region.box]
    return {"image": region.image + 1, "patch_row": region.row + 1, "patch_col": region.column + 1, "box": box}


def first_tokens(tokenizer: Tokenizer, word: str, token: int) -> list[int]:
    """The first token as written, and that of the word in lower case inside a sentence, which is how vision tokens say it."""
    return list(dict.fromkeys([token, *word_tokens(tokenizer, word.lower())[:1]]))
