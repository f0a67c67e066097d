"""Clips whose frames show their own number, as 16 black and white bars in the lower half."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av")

# Time stamps in milliseconds of a clip with a variable frame rate.
UNEVEN = list(accumulate([40, 80, 20, 120] * 25, initial=0))[:100]


def picture(number: int, width: int = 128, height: int = 64) -> np.ndarray:
    pixels = np.full((height, width, 3), 90, np.uint8)
    for bit in range(16):
        pixels[height // 2 :, bit * width // 16 : (bit + 1) * width // 16] = 255 * (number >> bit & 1)
    return pixels


def number_in(image: Any) -> int:
    """Read the number that a frame shows."""
    pixels = np.asarray(image.convert("L"))
    height, width = pixels.shape
    return sum(1 << bit for bit in range(16) if pixels[3 * height // 4, int((bit + 0.5) * width / 16)] > 128)


def make_clip(
    path: Path,
    frames: int = 100,
    codec: str = "libx264",
    stamps: Sequence[int] | None = None,
    rate: int = 25,
    size: tuple[int, int] = (128, 64),
    muxer: dict[str, str] | None = None,
) -> Path:
    """Write a clip with a key frame every 12 frames; `stamps` are times in milliseconds."""
    base = Fraction(1, 1000) if stamps else Fraction(1, rate)
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        (stream.width, stream.height), stream.pix_fmt = size, "rgb24" if codec == "apng" else "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.time_base = 12, base
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), "rgb24")
            frame.pts, frame.time_base = stamps[number] if stamps else number, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
