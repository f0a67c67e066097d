"""Damaged videos are read or raise one sentence."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest

from revisit.errors import RevisitError
from revisit.video.reading import open_video
from revisit.video.sampling import Sampling
from video_clips import make_clip

CLIPS = {
    "a.mp4": "libx264",
    "b.mkv": "libx264",
    "c.avi": "mpeg4",
    "d.ts": "mpeg2video",
    "e.webm": "libvpx-vp9",
    "f.flv": "flv1",
    "h.apng": "apng",
}
SAMPLINGS = (Sampling(), Sampling(frames=64), Sampling(fps=1e-9), Sampling(fps=1000))


def damaged(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Return a file with some bytes changed, missing, too many, or of another file."""
    changed, start = bytearray(data), dice.randrange(len(data))
    match dice.randrange(6):
        case 0:
            del changed[start:]
        case 1:
            changed[start : start + dice.randrange(3000)] = other[dice.randrange(len(other)) :]
        case 2:
            changed[start : start + 4] = struct.pack(">I", dice.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)))
        case kind:
            end = (len(data), min(len(data), 400), len(data))[kind - 3]
            for _ in range(dice.randrange(1, 20)):
                changed[dice.randrange(end - 2000 if kind == 5 and end > 2000 else 0, end)] = dice.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.faults)])
@pytest.mark.filterwarnings("ignore:Invalid APNG")
def test_damaged_videos_are_read_or_rejected(count: int, tmp_path: Path) -> None:
    files = [make_clip(tmp_path / name, 40, codec).read_bytes() for name, codec in CLIPS.items()]
    found: Counter[str] = Counter()
    for number in range(count):
        dice = random.Random(number)
        data = damaged(dice.choice(files), dice.choice(files), dice)
        try:
            video = open_video(data, dice.choice(SAMPLINGS))
        except RevisitError as error:
            found["rejected" if "\n" not in str(error) else f"no sentence: {error}"] += 1
        else:
            sound = len(video.pixels) == len(video.times) and [*video.times] == sorted(video.times)
            found["read" if sound else f"wrong times of clip {number}"] += 1
    assert set(found) == {"read", "rejected"}, found
    assert min(found["read"], found["rejected"]) > count / 10, found
