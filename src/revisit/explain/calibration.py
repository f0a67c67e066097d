"""Measure how well a model checks texts, and recommend the settings for its generation_config.json.

The model describes images whose objects are known. The first half of the images selects the layer whose support best separates
present from absent objects (AUROC), and the threshold that best flags absent ones (F1). The second half measures the AUROC.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from revisit.decoding.decode import decode
from revisit.decoding.method import METHODS
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.explain.check import settings_of
from revisit.explain.checkable import is_object
from revisit.explain.support import read_texts, support
from revisit.explain.sweep import auroc, best_threshold
from revisit.io.images import open_image
from revisit.models import DESCRIBE
from revisit.models.parts import ModelParts
from revisit.models.prompts import chat_text, encode
from revisit.words import category, object_words

if TYPE_CHECKING:
    from revisit.io.images import ImageLike
    from revisit.models.types import Model, Processor


class Calibration(NamedTuple):
    """The recommended settings of `check` for a model, and how they were measured."""

    layer: int  # the hidden state whose vision tokens are read
    threshold: float  # words with less support are flagged
    auroc: float  # of support for present against absent objects, on images that chose neither
    words: int  # object words in the model's captions of these images
    absent: int  # words that name an absent object


def calibrate(
    model: Model,
    processor: Processor,
    images: Sequence[ImageLike],
    objects: Sequence[Collection[str]],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 512,
    advance: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Recommend a layer and a threshold for `check` from images and the COCO categories of the objects in each.

    `advance` is called with the number of images after each batch. Raises RevisitError if the captions of either half name only
    present objects, or only absent ones.
    """
    plain, settings = METHODS.get("greedy"), Decoding(max_new_tokens=max_new_tokens)
    layers, half = candidate_layers(model), len(images) // 2
    supports: tuple[list[list[float]], list[list[float]]] = ([], [])  # of each half: one row per object word
    present: tuple[list[bool], list[bool]] = ([], [])
    for start in range(0, len(images), batch_size):
        batch = [[open_image(image)] for image in images[start : start + batch_size]]
        prompts = [chat_text(processor, DESCRIBE, batch[0])] * len(batch)
        inputs = encode(processor, prompts, batch, model.device)
        captions = [answer.text for answer in decode(model, processor, inputs, plain, settings)]
        kept = [row for row, caption in enumerate(captions) if object_words().search(caption)]
        if kept:
            batch, prompts = [batch[row] for row in kept], prompts[: len(kept)]
            inputs = encode(processor, prompts, batch, model.device)
            texts = read_texts(model, processor, inputs, prompts, batch, [captions[row] for row in kept], layers)
            for row, text in zip(kept, texts, strict=True):
                number = start + row
                by_layer = [support(text, layer, processor.tokenizer, is_object) for layer in layers]
                for word, *others in zip(*by_layer, strict=True):
                    if word.checkable:
                        supports[number >= half].append([word.support, *(other.support for other in others)])
                        present[number >= half].append(category(word.text) in objects[number])
        advance(min(batch_size, len(images) - start))
    if any(len(set(labels)) < 2 for labels in present):
        raise RevisitError(
            "The captions of each half of the images must name present and absent objects; use more images."
        )
    (first, second), (labels, held_out) = map(np.array, supports), map(np.array, present)
    best = max(range(len(layers)), key=lambda n: auroc(first[:, n], labels))
    return Calibration(
        layers[best],
        best_threshold(first[:, best], labels),
        auroc(second[:, best], held_out),
        len(held_out),
        int((~held_out).sum()),
    )


def candidate_layers(model: Model) -> list[int]:
    """Return the layer that `check` reads, and up to eleven from the first to the last."""
    depth = ModelParts.of(model).depth
    return sorted({settings_of(model)[0], *(n * depth // 10 for n in range(11))})
