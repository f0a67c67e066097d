"""Controls: plain decoding that cannot see the images of the items, or not the order of a video.

If a model can answer a benchmark without the images, a higher score does not show that a method uses them. The controls show how much of a
score, and of a gain, is left: greedy decoding without the image, with noise of its size, and with the image of another item; or without
the video, with its middle frame at all times, and with its frames shuffled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.decoding.method_id import MethodId
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from revisit.video.clip import Visual

NO_IMAGE, NO_VIDEO = "no image", "no video"
ONLY_VISUAL = "only visual"  # subset: items that plain decoding does not answer correctly without the image
CONTROLS = (NO_IMAGE, "noise image", "other image")
VIDEO_CONTROLS = (NO_VIDEO, "one frame", "shuffled frames")
REQUIRED_METHODS = ("greedy", "plausible_only")  # added to every run with controls


def controls_of(items: Sequence[Item]) -> tuple[str, ...]:
    """Return the controls for these items; the first shows nothing."""
    return VIDEO_CONTROLS if any(item.frames for item in items) else CONTROLS


def controlled(items: Sequence[Item], control: str) -> list[Item]:
    """Return the items with the images of a control. Ids and gold answers stay, so scores can be compared.

    With another item's images, that item's hash is appended, so changing those images invalidates the answers.

    Raises:
        RevisitError: All items have the same image, so there is no other one.
    """
    if control in (NO_IMAGE, NO_VIDEO):
        return [replace(item, images=(), image_hashes=(), frames=()) for item in items]
    if control != "other image":
        return [replace(item, edit=control) for item in items]
    other: dict[tuple[Path, ...], Item] = {}  # an item's images -> the item whose images replace them
    for number, item in enumerate(items):
        if item.images in other:
            continue
        # The nearest earlier item with other images, or else the first later one: a longer run keeps the answers of a shorter one.
        near = (*reversed(items[:number]), *items[number:])
        fits = (o for o in near if o.images != item.images and len(o.images) == len(item.images) and not o.error)
        found = next(fits, None)
        if found is None:
            raise RevisitError(
                "Controls need items with different images, and all of these have the same: use a larger --limit."
            )
        other[item.images] = found
    shown = [other[item.images] for item in items]
    return [
        replace(i, images=o.images, image_hashes=o.image_hashes, hash=f"{i.hash} {o.hash}")
        for i, o in zip(items, shown, strict=True)
    ]


def edited(visual: Visual, edit: str, key: str) -> Visual:
    """Return an image or video as a control shows it; the same for the same key."""
    import numpy as np

    from revisit.video.clip import Video

    if not isinstance(visual, Video):
        return noise_like(visual, key) if edit == "noise image" else visual
    count = len(visual.times)
    if edit == "one frame":  # at all times, so that the prompt stays the same
        order = np.full(count, count // 2)
    elif ((order := _generator(key).permutation(count)) == np.arange(count)).all():
        order = np.roll(order, 1)
    return replace(visual, pixels=visual.pixels[order])


def _generator(key: str) -> np.random.Generator:
    """Return a random generator for a key."""
    import numpy as np

    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))


def noise_like(image: Image, key: str) -> Image:
    """Return uniform noise of an image's size, the same for the same key."""
    import numpy as np
    from PIL import Image as images

    return images.fromarray(_generator(key).integers(0, 256, (image.height, image.width, 3), dtype=np.uint8))


def control_note(values: Mapping[MethodId, float], metric: Metric, baseline: MethodId) -> str:
    """Return a note on how much of the baseline's score, and of a method's gain, is left without the image.

    The note is empty if there is no control without the image.
    """
    known = {method: value for method, value in values.items() if not math.isnan(value)}
    blinds = [replace(baseline, control=control) for control in (NO_IMAGE, NO_VIDEO)]
    blind = next((method for method in blinds if method in known), None)
    if metric.better is None or baseline not in known or blind is None:
        return ""
    shown = metric.text(known[blind]), metric.text(known[baseline])
    note = f"Without the {blind.control.removeprefix('no ')}, {metric.name} of {baseline} is {shown[0]} instead of {shown[1]}"
    if metric.better == "higher" and known[baseline] > 0:
        note += f": {100 * known[blind] / known[baseline]:.0f} % of it is left"
    sign = 1 if metric.better == "higher" else -1
    if sign * (known[baseline] - known[blind]) <= 0:
        note += ", so this run shows the plumbing, not a method"
    gains = {method: sign * (value - known[baseline]) for method, value in known.items() if method != baseline}
    controls = {method for method in gains if method.control or method.name == "plausible_only"}
    largest = max(0.0, *(gains[method] for method in controls))
    compared = [
        f"{method} {'gains' if gains[method] > largest else 'does not gain'} more than every control"
        for method in sorted(gains.keys() - controls, key=str)
    ]
    return f"{note}. {'; '.join(compared)}.".removesuffix(" .")
