"""Read the predictions of vision tokens: the hidden state of each, at each layer, through the model's own head.

A reading covers the whole vocabulary or a set of words, in which case probabilities are shares within the set. The head is
applied to slices of the states, because the full table of vision tokens × layers × vocabulary would not fit into memory.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from revisit.errors import RevisitError
from revisit.explain.prefill import PromptStates, force
from revisit.forward.support import logit_slices
from revisit.models import DESCRIBE
from revisit.models.config import name_of
from revisit.models.families import resolve_layers
from revisit.models.geometry import Layout, layout_of
from revisit.models.head import Head
from revisit.models.loading import loaded_pair
from revisit.models.parts import ModelParts
from revisit.models.prompts import prepare_opened
from revisit.models.reader import open_visuals, paired
from revisit.models.tokens import token_text
from revisit.models.types import Model, Processor, Tokenizer
from revisit.pages.document import check_page, images_payload, notebook_frame, script_page, write_page
from revisit.registry import Count, validated
from revisit.video.clip import VideoLike, VisualLike, shown_images
from revisit.video.sampling import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Reading:
    """The likeliest entries of a vocabulary for every vision token at each layer, and the maps of words."""

    name: str
    entries: list[str]
    top: Tensor  # (layers, tokens, k) int64, indices of `entries`
    probabilities: Tensor  # (layers, tokens, k)
    maps: Tensor | None = None  # (layers, tokens, entries) probabilities of words

    def payload(self) -> dict[str, Any]:
        """Return the page's data: tensors in base64, maps with one byte per number."""
        return {
            "name": self.name,
            "entries": self.entries,
            "k": self.top.shape[-1],
            "top": _base64(self.top.int()),
            "chance": _base64(self.probabilities.float()),
            "words": [] if self.maps is None else self.entries,
            "maps": None if self.maps is None else _base64((self.maps * 255).round().byte()),
        }


@dataclass
class Lens:
    """The readings of one prompt's images. Notebooks display the page.

    Attributes:
        images: The images.
        layout: The patch of each vision token.
        model: The model's name.
        layers: The hidden states that were read.
        readings: The reading of the whole vocabulary, then that of the words, if any.
        notes: Words that were left out, and why.
    """

    images: list[Image]
    layout: Layout
    model: str
    layers: tuple[int, ...]
    readings: list[Reading]
    notes: list[str] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write the page (.html); return the path."""
        return write_page(check_page(path), self._page())

    def finding(self) -> str:
        """Return the tokens that most patches predict at the last layer, in one line."""
        reading = self.readings[0]
        counts = Counter(reading.entries[number].strip() for number in reading.top[-1, :, 0].tolist())
        listed = ", ".join(f"‘{word}’ ({number})" for word, number in counts.most_common(3))
        return f"The {self.layout.tokens} patches see {listed}"

    def _page(self) -> str:
        data = {
            **images_payload(self.images, self.layout),
            "model": self.model,
            "layers": list(self.layers),
            "depth": max(self.layers),
            "tokens": self.layout.tokens,
            "notes": self.notes,
            "readings": [reading.payload() for reading in self.readings],
        }
        return script_page(
            self.finding(),
            data,
            styles=["viewer.css", "lens.css"],
            scripts=["viewer.js", "lens.js"],
            start="window.lens = new LensView(main, data);",
            meta=f"{self.model} · click a patch, or use the arrow keys; [ and ] change the layer; o shows the image alone",
        )

    def __repr__(self) -> str:
        return f"Lens({len(self.images)} images, {self.model}, layers {list(self.layers)})"

    def _repr_html_(self) -> str:
        return notebook_frame(self._page(), "The lens, layer by layer")


@validated
def lens(
    model: str | Path | Model | tuple[Model, Processor],
    image: VisualLike | Sequence[VisualLike] | None = None,
    words: Sequence[str] = (),
    *,
    video: VideoLike | Sequence[VideoLike] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    prompt: str = DESCRIBE,
    layers: str | Annotated[Sequence[int], Field(min_length=1)] | None = None,
    top: Count = 5,
) -> Lens:
    """Read which words each vision token predicts through the model's head, in one forward pass.

        looked = revisit.lens(model, "photo.jpg", ["dog", "cat", "cup"])
        looked.save("lens.html")

    Args:
        model: A Hub id, a folder, "tiny", or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, used together in one prompt.
        video: A video or a list of them, as in `ask`; each frame is an image of the page.
        frames: How many frames to take from each video; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
        words: Words to compare with each other; the whole vocabulary is always read.
        prompt: The text of the prompt.
        layers: Hidden states as in ReVisiT; all of them by default.
        top: How many of the likeliest entries to keep for each vision token.

    Returns:
        The readings.

    Raises:
        RevisitError: If fewer than two of the words are single tokens, or the model keeps no vision tokens.
    """
    sampling = Sampling(frames, fps)
    (sources,) = paired([image], [video])
    visuals = open_visuals(sources, sampling)
    loaded, processor = loaded_pair(model, "lens")
    parts = ModelParts.of(loaded)
    chosen = resolve_layers(range(parts.depth + 1) if layers is None else layers, parts.depth, parts.tied)
    variants, left_out = single_tokens(processor.tokenizer, words)
    if words and len(variants) < 2:
        problem = f"not single tokens: {', '.join(left_out)}" if left_out else f"only {words[0]} was given"
        raise RevisitError(f"The lens needs at least two words that are single tokens of this model ({problem}).")
    notes = [f"Left out, because they are not single tokens of this model: {', '.join(left_out)}."] if left_out else []
    inputs = prepare_opened(processor, [prompt], [visuals], loaded.device)
    (prompt_states,) = force(loaded, inputs, layers=chosen)
    head, states = prompt_states.head, torch.stack([prompt_states.vision[layer] for layer in chosen])
    readings = [whole_vocabulary(head, states, processor.tokenizer, top)]
    readings += [_within(head, states, variants, top)] if words else []
    layout = layout_of(loaded, processor, [visuals], inputs)
    return Lens(shown_images(visuals), layout, name_of(loaded), chosen, readings, notes)


@torch.no_grad()
def whole_vocabulary(head: Head, states: Tensor, tokenizer: Tokenizer, top: int) -> Reading:
    """Read states (layers, tokens, d) over the whole vocabulary."""
    ids, probabilities = [], []
    for logits in logit_slices(head, states.flatten(0, 1)):  # (part, V)
        best = logits.topk(min(top, logits.shape[-1]), dim=-1)
        ids.append(best.indices.cpu())
        probabilities.append((best.values - logits.logsumexp(-1, keepdim=True)).exp().cpu())
    used, numbers = torch.cat(ids).unique(return_inverse=True)  # numbers: (layers·tokens, k)
    entries = [token_text(tokenizer, int(i)) for i in used]
    shape = (*states.shape[:2], -1)
    return Reading("all tokens", entries, numbers.view(shape), torch.cat(probabilities).view(shape))


def patch_words(states: PromptStates, layer: int, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """Return the likeliest tokens of each vision token at a layer."""
    reading = whole_vocabulary(states.head, states.vision[layer][None], tokenizer, top=5)
    pairs = zip(reading.top[0].tolist(), reading.probabilities[0].tolist(), strict=True)
    return [[(reading.entries[n], p) for n, p in zip(*pair, strict=True)] for pair in pairs]


@torch.no_grad()
def _within(head: Head, states: Tensor, variants: dict[str, list[int]], top: int) -> Reading:
    """Read states over some words; the spellings of a word are added up."""
    words = list(variants)
    ids = torch.tensor([i for word in words for i in variants[word]], device=head.device)
    owner = torch.tensor([n for n, word in enumerate(words) for _ in variants[word]], device=head.device)
    shares = head.logits(states.flatten(0, 1), ids).float().softmax(-1)  # (layers·tokens, spellings)
    table = torch.zeros(len(shares), len(words), device=head.device).index_add_(-1, owner, shares)
    table = table.view(*states.shape[:2], len(words)).cpu()  # (layers, tokens, words)
    probabilities, best = table.topk(min(top, len(words)), dim=-1)
    return Reading("words", words, best, probabilities, table)


def single_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the single-token spellings of each word (with and without a leading space), and the words without any."""
    found: dict[str, list[int]] = {}
    left_out = []
    for word in dict.fromkeys(w.strip() for w in words if w.strip()):
        spellings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f" {word}", word)]
        ids = list(dict.fromkeys(s[0] for s in spellings if len(s) == 1 and s[0] != tokenizer.unk_token_id))
        if ids:
            found[word] = ids
        else:
            left_out.append(word)
    return found, left_out


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
