"""What benchmarks of videos share: their options, and prompts about one video."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import model_validator
from typing_extensions import Self

from revisit.eval.benchmarks.base import Benchmark, Item, PerUnit
from revisit.io.files import path_within
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

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        Sampling(self.frames, self.fps)
        return self

    def video_item(self, data_dir: Path, id: str, prompt: str, meta: Fields, *videos: str) -> Item:
        """Return an item about the videos at these paths in the data folder."""
        paths = tuple(path_within(data_dir, Path(video)) for video in videos)
        return Item(id, prompt, (), meta, videos=paths, sampling=Sampling(self.frames, self.fps))


def mean_of(parts: Mapping[str, PerUnit]) -> PerUnit:
    """Return the terms of the mean over parts of the mean within each part."""
    return {
        unit: (n / len(units) / len(parts), d / len(units) / len(parts))
        for units in parts.values()
        for unit, (n, d) in units.items()
    }
