"""Test whether a model uses its image: a photo against a blank image of the same size, one prefill each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from revisit.explain.prefill import logit_slices, watch_prefill
from revisit.explain.tokens import token_text
from revisit.hooks.forcing import last_logits
from revisit.models import DESCRIBE
from revisit.models.parts import Head, ModelParts
from revisit.models.prompts import prepare

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

GRAY = (127, 127, 127)
SAME = 1e-4  # a relative difference of states, or a distance of distributions, that rounding can make


@dataclass(frozen=True)
class Sight:
    """What changes when a blank image replaces the photo."""

    vision_tokens: int
    states: float  # share of the vision tokens whose final state changes
    next_token: float  # total variation distance between the two distributions of the answer's first token
    words: tuple[str, ...]  # favored more for the photo than for the blank image, the strongest first
    broken: str = ""  # the defect in one sentence, if there is one


@torch.no_grad()
def check_sight(model: Model, processor: Processor, photo: Image.Image, *, prompt: str = DESCRIBE) -> Sight:
    """Compare a model's prefill of a photo with that of a blank image of the same size."""
    parts = ModelParts.of(model)
    found = []
    for image in (photo, Image.new("RGB", photo.size, GRAY)):
        inputs = prepare(processor, [prompt], [[image]], model.device)
        with watch_prefill(model, inputs, (parts.depth,)) as seen:
            logits = model(**inputs, use_cache=False, **last_logits(model)).logits
        found.append((seen.states[0].float(), logits[0, -1].float().softmax(-1)))
    (states, answer), (blank_states, blank_answer) = found
    change = (states - blank_states).norm(dim=-1) / blank_states.norm(dim=-1).clamp_min(1e-12)  # (tokens,)
    share = float((change > SAME).float().mean())
    distance = float((answer - blank_answer).abs().sum() / 2)
    broken = ""
    if not bool(states.isfinite().all()):
        broken = "The vision path is broken: the states of vision tokens are not finite; load the model in float32."
    elif share == 0:
        broken = (
            "The vision path is broken: the vision tokens are the same for the photo and for a blank image, so the vision tower or "
            "its projector ignores the pixels; check that their weights were loaded."
        )
    elif distance < SAME:
        broken = (
            "The vision path is broken: the vision tokens differ between the photo and a blank image, but the answer's first token "
            "does not, so the decoder does not use them; check the attention mask and the chat template."
        )
    difference = _mean(parts.head, states) - _mean(parts.head, blank_states)
    order = difference.topk(min(200, len(difference))).indices.tolist()
    texts = [token_text(processor.tokenizer, number).strip() for number in order]
    words = tuple(dict.fromkeys(text for text in texts if len(text) > 2 and text.isalpha()))[:8]
    return Sight(len(states), share, distance, words, broken)


def _mean(head: Head, states: Tensor) -> Tensor:
    """Return the mean distribution of states over the vocabulary.  (n, d) -> (V,)"""
    return torch.cat([logits.softmax(-1) for logits in logit_slices(head, states)]).mean(0)
