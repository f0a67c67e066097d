"""What the vision tokens say: each one's hidden state, at each layer, through the model's own head.

A reading is over a vocabulary: all of it, or a set of words (then probabilities are shares within the set). The full
table of vision tokens × layers × vocabulary is never held: the head is applied to slices, of which the best survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.explain.prefill import logit_slices, prefill_states, unfamiliar_images
from revisit.explain.tokens import token_text
from revisit.models.config import name_of
from revisit.models.families import resolve_layers
from revisit.models.geometry import Layout, layout_of
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import prepare

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Model, Processor, Tokenizer

MOST_MAPS = 32  # words of one set whose heat maps are kept


@dataclass
class Reading:
    """What every vision token says over one vocabulary: the best `k` entries at each layer, and maps of some words."""

    name: str
    entries: list[str]  # what `top` numbers
    top: Tensor  # (layers, tokens, k) int64, numbers of entries
    chance: Tensor  # (layers, tokens, k) their probabilities
    words: list[str] = field(default_factory=list)
    maps: Tensor | None = None  # (layers, tokens, words) probabilities


@dataclass
class Lens:
    """The readings of one image (or several in one prompt)."""

    images: list[Image]
    layout: Layout
    model: str
    layers: tuple[int, ...]
    readings: list[Reading]
    notes: list[str] = field(default_factory=list)
    unfamiliar: tuple[int, ...] = ()  # numbers of the images that the embedded model cannot know


@torch.no_grad()
def read_vision_tokens(
    model: Model,
    processor: Processor,
    images: Sequence[Image],
    sets: Mapping[str, Sequence[str]] | None = None,
    *,
    prompt: str = "Describe the image.",
    layers: str | Sequence[int] | None = None,
    norm: str = "none",
    best: int = 5,
    model_name: str = "",
) -> Lens:
    """Read the vision tokens over the full vocabulary and over each named set of words.

    Args:
        model: A loaded model.
        processor: Its processor.
        images: The images of one prompt.
        sets: Names of word sets and their words.
        prompt: The text of the prompt.
        layers: Hidden states as in ReVisiT; all of them by default.
        norm: "final" applies the decoder's final norm to the layers below the last.
        best: How many of the best entries to keep for each vision token.
        model_name: What to call the model.

    Returns:
        The readings, the full vocabulary's first.

    Raises:
        RevisitError: If a word set has fewer than two words that are single tokens, or the model keeps no vision tokens.
    """
    if norm not in ("none", "final"):
        raise RevisitError(f"norm must be 'none' or 'final', not {norm!r}.")
    parts = ModelParts.of(model)
    chosen = resolve_layers(range(parts.depth + 1) if layers is None else layers, parts.depth, parts.tied)
    inputs = prepare(processor, [prompt], [list(images)], model.device)
    head, seen = prefill_states(model, inputs, chosen, final_norm=norm == "final")
    tokenizer = processor.tokenizer
    notes: list[str] = []
    readings = [whole_vocabulary(head, seen.states, tokenizer, best)]
    for name, words in (sets or {}).items():
        variants, left_out = single_tokens(tokenizer, words)
        if left_out:
            which = ", ".join(left_out) if len(left_out) <= 8 else f"{len(left_out)} of {len(words)} words"
            notes.append(f"{name}: left out {which}, because the tokenizer has no single token for it.")
        if len(variants) < 2:
            listed = ", ".join(map(repr, left_out[:8])) + (", …" if len(left_out) > 8 else "")
            raise RevisitError(
                f"{name} needs at least two words that are single tokens of this model; the tokenizer has no single token for "
                f"{listed}. Use other words."
            )
        readings.append(_among(head, seen.states, name, variants, best))
    name = model_name or name_of(model)
    layout = layout_of(model, processor, images, inputs)
    unfamiliar = unfamiliar_images(name, seen, len(images))
    return Lens(list(images), layout, name, chosen, readings, notes, unfamiliar)


@torch.no_grad()
def whole_vocabulary(head: Head, states: Tensor, tokenizer: Tokenizer, best: int) -> Reading:
    """The best entries of the whole vocabulary; states are (layers, tokens, d)."""
    ids, chances = [], []
    for logits in logit_slices(head, states.flatten(0, 1)):  # (part, V)
        top = logits.topk(min(best, logits.shape[-1]), dim=-1)
        ids.append(top.indices.cpu())
        chances.append((top.values - logits.logsumexp(-1, keepdim=True)).exp().cpu())
    used, numbers = torch.cat(ids).unique(return_inverse=True)  # numbers: (layers·tokens, k)
    entries = [token_text(tokenizer, int(i)) for i in used]
    shape = (*states.shape[:2], -1)
    return Reading("all tokens", entries, numbers.view(shape), torch.cat(chances).view(shape))


@torch.no_grad()
def _among(head: Head, states: Tensor, name: str, variants: dict[str, list[int]], best: int) -> Reading:
    """Shares within a set of words; a word with several spellings has the sum of theirs."""
    words = list(variants)
    ids = torch.tensor([i for word in words for i in variants[word]], device=head.device)
    owner = torch.tensor([n for n, word in enumerate(words) for _ in variants[word]], device=head.device)
    shares = head.logits(states.flatten(0, 1), ids).float().softmax(-1)  # (layers·tokens, spellings)
    table = torch.zeros(len(shares), len(words), device=head.device).index_add_(-1, owner, shares)
    table = table.view(*states.shape[:2], len(words)).cpu()  # (layers, tokens, words)
    chance, top = table.topk(min(best, len(words)), dim=-1)
    kept = list(range(len(words)))
    if len(words) > MOST_MAPS:
        kept = table[-1].amax(0).topk(MOST_MAPS).indices.tolist()
    return Reading(name, words, top, chance, [words[k] for k in kept], table[..., kept])


def single_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """The spellings (with a space in front, and without) of each word that are single tokens; and the words without any."""
    found: dict[str, list[int]] = {}
    left_out = []
    unknown = tokenizer.unk_token_id
    for word in dict.fromkeys(w.strip() for w in words if w.strip()):
        spellings = []
        for text in (f" {word}", word):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] != unknown and ids[0] not in spellings:
                spellings.append(ids[0])
        if spellings:
            found[word] = spellings
        else:
            left_out.append(word)
    return found, left_out
