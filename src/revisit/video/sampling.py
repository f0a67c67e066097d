"""Choose frames of a video, evenly spaced in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from revisit.errors import RevisitError

DEFAULT_FRAMES = 8
MAX_FRAMES = 512


@dataclass(frozen=True)
class Bounds:
    """Limits on a video, which are checked before anything is decoded."""

    seconds: float = 4 * 3600
    frames: int = MAX_FRAMES  # sampled
    pixels: int = 4_000_000_000  # in all sampled frames


@dataclass(frozen=True)
class Sampling:
    """How many frames to take from each video: a number, or a rate per second; 8 frames by default."""

    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.frames is not None and self.fps is not None:
            raise RevisitError(
                "Choose frames of a video either by their number (frames) or by their rate (fps), not both."
            )
        if self.frames is not None and not 1 <= self.frames <= MAX_FRAMES:
            raise RevisitError(f"The number of frames must be from 1 to {MAX_FRAMES}, not {self.frames}.")
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise RevisitError(f"The frames per second (fps) must be above 0, not {self.fps}.")

    @property
    def given(self) -> bool:
        """Whether a number or a rate was chosen."""
        return self.frames is not None or self.fps is not None

    def choose(self, times: Sequence[float], end: float) -> list[int]:
        """Return which of the frames with these times to take: those visible in the middle of equal parts of the video.

        No frame is taken twice unless there are too few.
        """
        count = self.frames or DEFAULT_FRAMES
        if self.fps is not None:
            count = max(round((end - times[0]) * self.fps), 1)
        if count > MAX_FRAMES:
            raise RevisitError(
                f"{self.fps:g} frames per second of this video of {end - times[0]:.0f} s would be {count:,} frames, more than the "
                f"{MAX_FRAMES} allowed: choose fewer."
            )
        part = (end - times[0]) / count
        middles = [times[0] + (number + 0.5) * part for number in range(count)]
        # Rounding must not move a middle that falls on a frame's own time to the frame before.
        chosen = [max(bisect_right(times, middle + 1e-6) - 1, 0) for middle in middles]
        if len(times) >= count:
            for n in range(1, count):
                chosen[n] = max(chosen[n], chosen[n - 1] + 1)
            chosen = [min(number, len(times) - count + n) for n, number in enumerate(chosen)]
        return chosen


EIGHT_FRAMES = Sampling()
BOUNDS = Bounds()
