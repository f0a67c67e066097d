"""Controls: plain decoding that cannot see an item's image, next to the methods of a run.

The score of a benchmark that a model answers without the image is weak evidence for a method's use of the image. The controls show
how much of a score, and of a gain, is left: greedy decoding without the image, with noise of its size, and with the image of another item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric

if TYPE_CHECKING:
    from PIL.Image import Image

NO_IMAGE = "no image"
ONLY_VISUAL = "only visual"  # the subset of items that plain decoding does not answer correctly without the image
CONTROLS = (NO_IMAGE, "noise image", "other image")
METHODS = ("greedy", "plausible-only")  # that a run with controls has, listed or not


def control_label(method: str, control: str) -> str:
    """Return the name of a control in tables."""
    return f"{method} [{control}]" if control else method


def is_blind(label: str) -> bool:
    """Return whether a table's row is plain decoding that cannot see the image."""
    return label.endswith(tuple(f" [{control}]" for control in CONTROLS))


def controlled(items: Sequence[Item], control: str) -> list[Item]:
    """Return the items as a control asks them; ids, hashes and gold answers stay, so that rows can be compared.

    Raises:
        RevisitError: All items have the same image, so that none can have another item's.
    """
    if control == NO_IMAGE:
        return [replace(item, images=()) for item in items]
    if control == "noise image":
        return [replace(item, noise=True) for item in items]
    found, other = [], dict[tuple[object, ...], Item]()
    for number, item in enumerate(items):
        # The nearest earlier item with other images, or else the first later one: a longer run keeps the answers of a shorter one.
        if item.images not in other:
            near = (*reversed(items[:number]), *items[number:])
            fits = next((o for o in near if o.images != item.images and len(o.images) == len(item.images)), None)
            if fits is None:
                raise RevisitError(
                    "Controls need items with different images, and all of these have the same: use a larger --limit."
                )
            other[item.images] = fits
        found.append(replace(item, images=other[item.images].images))
    return found


def noise_like(image: Image, key: str) -> Image:
    """Return uniform noise of an image's size, always the same for a key."""
    import hashlib

    import numpy as np
    from PIL import Image as images

    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    return images.fromarray(rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8))


def about_controls(values: Mapping[str, float], metric: Metric, base: str) -> list[str]:
    """Return a sentence on how much of the baseline's score, and of a method's gain, is left without the image."""
    score = {row: value for row, value in values.items() if not math.isnan(value)}
    blind = control_label(base, NO_IMAGE)
    if metric.better is None or not {base, blind} <= score.keys():
        return []
    text = f"Without the image, {metric.name} of {base} is {metric.text(score[blind])} instead of {metric.text(score[base])}"
    if metric.better == "higher" and score[base] > 0:
        text += f": {100 * score[blind] / score[base]:.0f} % of it is left"
    sign = 1 if metric.better == "higher" else -1
    gains = {row: sign * (value - score[base]) for row, value in score.items() if row != base}
    controls = {row: gain for row, gain in gains.items() if is_blind(row) or row.startswith("plausible-only")}
    bar = max(0.0, *controls.values())
    parts = [text]
    for row in gains.keys() - controls.keys():
        verb = "gains" if gains[row] > bar else "does not gain"
        parts.append(f"{row} {verb} more than every control")
    return [f"{parts[0]}. {'; '.join(sorted(parts[1:]))}".removesuffix(". ") + "."]
