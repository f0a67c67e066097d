"""Open videos: files, lists of frames, and frames with times."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from revisit.errors import RevisitError
from revisit.video.clip import Video, VideoLike
from revisit.video.reading import read_video
from revisit.video.sampling import BOUNDS, Bounds, Sampling


def open_video(source: VideoLike, sampling: Sampling) -> Video:
    """Read the sampled frames of a video.

    Args:
        source: A path, bytes or a data URI of a video file; a list of frames, or of (frame, time) pairs; or a `Video`. Frames
            without times are a second apart, or as far apart as `fps` implies.
        sampling: Which frames to read.

    Raises:
        RevisitError: The video cannot be read, or is too large.
    """
    if isinstance(source, Video):
        return source.sampled(sampling) if sampling.given else source
    if isinstance(source, (list, tuple, np.ndarray)):
        return _from_frames(source, sampling)
    if isinstance(source, (bytes, bytearray)):
        return read_video(BytesIO(source), "given as bytes", sampling)
    if not isinstance(source, (str, os.PathLike)):
        raise RevisitError(f"A video must be a path, bytes, a list of frames or a Video, not {type(source).__name__}.")
    name = os.fspath(source)
    if name.startswith("data:"):
        return video_from_data_uri(name, sampling)
    if name.startswith(("http://", "https://")):
        raise RevisitError(f"{name[:200]!r} is a URL, which is not downloaded: save the video first.")
    if not os.path.isfile(Path(name).expanduser()):
        raise RevisitError(f"There is no video file {name[:200]!r}; check the path.")
    with Path(name).expanduser().open("rb") as file:
        return read_video(file, repr(name), sampling)


def video_from_data_uri(uri: str, sampling: Sampling, bounds: Bounds = BOUNDS) -> Video:
    """Read the sampled frames of a video in a `data:video/...;base64,` URI."""
    return read_video(BytesIO(_payload(uri)), "in the data URI", sampling, bounds)


def _payload(uri: str) -> bytes:
    header, _, payload = uri.partition(",")
    if not header.startswith("data:video/") or not header.endswith(";base64"):
        raise RevisitError("A video must be a base64 data URI such as data:video/mp4;base64,…")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:
        raise RevisitError("The video's data URI is not valid base64.") from None


def _from_frames(source: Any, sampling: Sampling) -> Video:
    """Return a video of a list of frames, or of (frame, time) pairs."""
    frames, times = list(source), [number / (sampling.fps or 1.0) for number in range(len(source))]
    if frames and all(map(is_timed, frames)):
        frames, times = [frame for frame, _ in source], [time for _, time in source]
    else:
        sampling = Sampling(frames=sampling.frames)
    video = Video.of(frames, times)
    return video.sampled(sampling) if sampling.given else video


def is_timed(value: object) -> bool:
    """Return whether a value is a pair of a frame and its time."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))


def as_videos(entry: VideoLike | Sequence[VideoLike] | None) -> list[VideoLike]:
    """Return the videos of one prompt as a list; a list of frames is one video, a list of names is several."""
    if entry is None:
        return []
    if not isinstance(entry, (list, tuple)):
        return [entry]
    frames = any(isinstance(value, Image) or is_timed(value) or getattr(value, "ndim", 4) < 4 for value in entry[:1])
    return [entry] if frames else list(entry)
