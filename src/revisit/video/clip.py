"""Videos as models get them: some frames, each with its time and its index in the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from PIL import Image as pil
from PIL.Image import Image

from revisit.errors import RevisitError
from revisit.io.images import ImageLike, open_image
from revisit.video.sampling import Sampling

# A path, bytes or a data URI of a video file, a list of frames, a list of (frame, time) pairs, or a `Video`.
VideoLike: TypeAlias = Any


TIME = "revisit_time"  # the entry of `Image.info` with the time of a frame


@dataclass(frozen=True)
class Video:
    """Frames of a video, in the order of time.

    Attributes:
        pixels: The frames, (frames, height, width, 3), upright.
        times: The time of each frame in seconds, from its own time stamp.
        indices: The index of each frame among all frames of the stream.
        duration: The length of the whole video in seconds.
        decoded: How many frames were decoded to read these.
        total: How many frames the whole video has.
    """

    pixels: np.ndarray = field(repr=False)
    times: tuple[float, ...]
    indices: tuple[int, ...]
    duration: float
    decoded: int = 0
    total: int = 0

    @classmethod
    def of(cls, frames: Sequence[ImageLike], times: Sequence[float]) -> Video:
        """Return a video of these frames, which are opened as images are."""
        seconds = tuple(float(time) for time in times)
        if not len(frames) or len(frames) != len(seconds):
            raise RevisitError(
                f"A video needs frames with a time for each, not {len(frames)} frames and {len(seconds)} times."
            )
        if not all(a <= b < float("inf") for a, b in pairwise((-float("inf"), *seconds))):
            raise RevisitError("The times of a video's frames must be seconds in ascending order.")
        opened = [open_image(frame) for frame in frames]
        if sizes := {frame.size for frame in opened} - {opened[0].size}:
            raise RevisitError(f"The frames of a video must have one size, not {opened[0].size} and {sizes.pop()}.")
        step = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 1.0
        pixels = np.stack([np.asarray(frame) for frame in opened])
        return cls(pixels, seconds, tuple(range(len(opened))), seconds[-1] - seconds[0] + step, total=len(opened))

    @property
    def size(self) -> tuple[int, int]:
        """The width and the height of the frames."""
        return self.pixels.shape[2], self.pixels.shape[1]

    @property
    def frames(self) -> list[Image]:
        """The frames as images, whose `info` has the time of each."""
        images = [pil.fromarray(frame) for frame in self.pixels]
        for image, time in zip(images, self.times, strict=True):
            image.info[TIME] = time
        return images

    def sampled(self, sampling: Sampling) -> Video:
        """Return a video of some of the frames."""
        return self.pick(sampling.choose(self.times, self.times[0] + self.duration))

    def pick(self, numbers: Sequence[int]) -> Video:
        """Return a video of the frames with these numbers, in this order."""
        times, indices = tuple(self.times[n] for n in numbers), tuple(self.indices[n] for n in numbers)
        return replace(self, pixels=self.pixels[list(numbers)], times=times, indices=indices)

    def metadata(self) -> dict[str, Any]:
        """Return what processors compute times from, in milliseconds, so that times are right for any frame rate."""
        return {
            "fps": 1000.0,
            "frames_indices": [round(time * 1000) for time in self.times],
            "total_num_frames": max(round(self.duration * 1000), 1),
            "duration": self.duration,
            "width": self.size[0],
            "height": self.size[1],
        }

    def listing(self) -> list[dict[str, float]]:
        """Return the index and the time of each frame, as logs store them."""
        return [{"index": i, "time": round(time, 6)} for i, time in zip(self.indices, self.times, strict=True)]


Visual: TypeAlias = Image | Video  # an opened image or video of a prompt


def pixel_count(visual: Visual) -> int:
    """Return the number of pixels of an image, or of all frames of a video."""
    return visual.pixels.size // 3 if isinstance(visual, Video) else visual.width * visual.height


def shown_images(visuals: Sequence[Visual]) -> list[Image]:
    """Return images and the frames of videos, as layouts number them."""
    return [image for visual in visuals for image in (visual.frames if isinstance(visual, Video) else [visual])]


def frames_listing(visuals: Sequence[Visual]) -> list[dict[str, float]]:
    """Return the index and the time of every frame of all videos, as logs store them."""
    return [entry for visual in visuals if isinstance(visual, Video) for entry in visual.listing()]
