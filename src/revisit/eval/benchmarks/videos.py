"""What benchmarks of videos share: their options, and prompts about one video."""

from __future__ import annotations

from pathlib import Path

from revisit.eval.benchmarks.base import Benchmark, Item
from revisit.io.records import Fields
from revisit.video.sampling import Sampling


class VideoBenchmark(Benchmark):
    """Questions about videos. The videos are not downloaded: `source` states where they come from.

    Args:
        frames: How many frames to take from each video, evenly spaced; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
    """

    frames: int | None = None
    fps: float | None = None

    def item(self, id: str, prompt: str, meta: Fields, *images: Path) -> Item:
        """Return an item about these videos or images."""
        return Item(id, prompt, images, meta, sampling=Sampling(self.frames, self.fps))
