"""Choose frames of a video, evenly spaced in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revisit.errors import RevisitError

if TYPE_CHECKING:
    import numpy as np

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
            raise RevisitError("Choose frames of a video by their number (frames) or by their rate (fps), not both.")
        if self.frames is not None and not 1 <= self.frames <= MAX_FRAMES:
            raise RevisitError(f"The number of frames must be from 1 to {MAX_FRAMES}, not {self.frames}.")
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise RevisitError(f"The frames per second (fps) must be above 0, not {self.fps}.")

    @property
    def given(self) -> bool:
        """Whether a number or a rate was chosen."""
        return self != EIGHT_FRAMES

    def choose(self, times: Sequence[float] | np.ndarray, end: float) -> list[int]:
        """Return which of the frames with these times to take: those visible in the middle of equal parts of the video.

        No frame is taken twice unless there are too few.
        """
        import numpy as np  # slow to import

        count = self.frames or DEFAULT_FRAMES
        if self.fps is not None:
            count = max(round((end - times[0]) * self.fps), 1)
        if count > MAX_FRAMES:
            raise RevisitError(
                f"{self.fps:g} frames per second of this video of {end - times[0]:.0f} s would be {count:,} frames, more than the "
                f"{MAX_FRAMES} allowed: choose fewer."
            )
        order = np.arange(count)
        # Rounding must not move a middle that falls on a frame's own time to the frame before.
        middles = times[0] + (order + 0.5) * (end - times[0]) / count + 1e-6
        chosen = np.searchsorted(times, middles, side="right") - 1
        if len(times) >= count:  # the first frames that are left, then the last ones
            chosen = np.maximum.accumulate(chosen - order) + order
            chosen = np.minimum(chosen, len(times) - count + order)
        return [int(number) for number in chosen.clip(0)]


EIGHT_FRAMES = Sampling()
