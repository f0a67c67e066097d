"""Videos as models get them: some frames, each with its time and its index in the stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

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
        if not len(frames):
            raise RevisitError("A video needs at least one frame.")
        if not np.isfinite(times).all() or any(np.diff(times) < 0):
            raise RevisitError("The times of a video's frames must be seconds in ascending order.")
        opened = [open_image(frame) for frame in frames]
        if sizes := {frame.size for frame in opened} - {opened[0].size}:
            raise RevisitError(f"The frames of a video must have one size, not {opened[0].size} and {sizes.pop()}.")
        lasts = (
            (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0
        )  # as long as the mean of the others
        duration, numbers = float(times[-1] - times[0] + lasts), tuple(range(len(opened)))
        return cls(np.stack([np.asarray(frame) for frame in opened]), tuple(map(float, times)), numbers, duration)

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
        """Return a video of the frames that a sampling chooses; all of them if it names neither a number nor a rate."""
        if not sampling.given:
            return self
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


Visual: TypeAlias = Image | Video  # an opened image or video of a prompt
if TYPE_CHECKING:
    VisualLike: TypeAlias = ImageLike | Video  # an image, or the path of a video
else:  # not validated
    VisualLike = Any


def frame_count(visual: Visual) -> int:
    """Return the number of frames of a video; 0 for an image."""
    return len(visual.times) if isinstance(visual, Video) else 0


def pixel_count(visual: Visual) -> int:
    """Return the number of pixels of an image, or of all frames of a video."""
    return math.prod(visual.size) * max(frame_count(visual), 1)


def shown_images(visuals: Sequence[Visual]) -> list[Image]:
    """Return images and the frames of videos, as layouts number them."""
    return [image for visual in visuals for image in (visual.frames if isinstance(visual, Video) else [visual])]


def frames_listing(visuals: Sequence[Visual]) -> list[dict[str, float]]:
    """Return the index and the time of every frame of all videos, as logs store them."""
    frames = [frame for v in visuals if isinstance(v, Video) for frame in zip(v.indices, v.times, strict=True)]
    return [{"index": index, "time": round(time, 6)} for index, time in frames]
