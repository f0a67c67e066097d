"""Read sampled frames of a video file with PyAV.

The packets are listed first, without decoding, which gives the time of every frame and the groups of pictures. Then only the groups
that hold sampled frames are decoded. Memory is bounded by the sampled frames.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image as pil

from revisit.errors import RevisitError, need
from revisit.io.images import DAMAGE, FORMATS, MAX_PIXELS
from revisit.video.clip import Video
from revisit.video.sampling import BOUNDS, Bounds

if TYPE_CHECKING:
    from revisit.video.sampling import Sampling

logger = logging.getLogger(__name__)

MAX_BYTES = 4_000_000_000
# Other formats can name further files or addresses to read.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,ogg,flv,asf,gif,apng"
UNTIMED = ("avi",)  # formats with a constant frame rate instead of time stamps
ANIMATIONS = ("gif", "apng")
CLOCKED = ("mpegts", "mpeg")  # formats whose time stamps begin anywhere


@dataclass(frozen=True)
class Timeline:
    """All frames of a stream in the order of display, listed by its packets.

    Attributes:
        times: The time of each frame in seconds.
        end: The time at which the last frame ends.
        stamps: The time stamp of each frame; empty if time stamps do not identify frames.
        keys: (index, time stamp, where to seek) of the frames at which decoding can begin.
    """

    times: np.ndarray
    end: float
    stamps: np.ndarray
    keys: list[tuple[int, int, int]]

    @property
    def duration(self) -> float:
        """The length of the video in seconds."""
        return self.end - float(self.times[0])


class Frames:
    """Collects the pixels of wanted frames in one array."""

    def __init__(self, stream: Any, indices: Sequence[int]) -> None:
        self.stream, self.indices = stream, np.array(indices)
        self.width, self.height = stream.width, stream.height  # frames of a damaged stream can have other sizes
        self.pixels = np.empty(0)
        self.missing = set(indices)
        self.decoded = 0

    def keep(self, index: int, frame: Any) -> None:
        """Store a decoded frame as RGB, as a player shows it."""
        image = frame.to_ndarray(format="rgb24", width=self.width, height=self.height)
        image = np.rot90(image, frame.rotation // 90)
        if not self.pixels.size:
            self.pixels = np.empty((len(self.indices), *image.shape), np.uint8)
        self.pixels[self.indices == index] = image
        self.missing.discard(index)


def read_video(file: BinaryIO, what: str, sampling: Sampling, bounds: Bounds = BOUNDS) -> Video:
    """Read the sampled frames of a video file; messages call it "the video `what`"."""
    with _opened(file, what, bounds) as (container, stream, timeline):
        indices = sampling.choose(timeline.times.tolist(), timeline.end)
        pixels = len(indices) * stream.width * stream.height
        if len(indices) > bounds.frames or pixels > bounds.pixels:
            raise RevisitError(
                f"{len(indices)} frames of the video {what} have {pixels:,} pixels; at most {bounds.frames} frames with {bounds.pixels:,} "
                "pixels are allowed: choose fewer."
            )
        frames = Frames(stream, indices)
        if timeline.keys:
            _decode_groups(container, timeline, frames)
        if frames.missing:
            _decode_all(container, frames)
        if frames.missing:
            raise RevisitError(
                f"The video {what} is damaged: its frame {min(frames.missing)} cannot be decoded; get a complete copy."
            )
    times, total = tuple(timeline.times[indices].tolist()), len(timeline.times)
    logger.info(
        "Video %s: decoded %d of its %d frames (%.1f %%).", what, frames.decoded, total, 100 * frames.decoded / total
    )
    return Video(frames.pixels, times, tuple(indices), timeline.duration, frames.decoded, total)


def list_frames(file: BinaryIO, what: str, sampling: Sampling) -> list[tuple[int, float]]:
    """Return the index and the time of each sampled frame, without decoding any."""
    with _opened(file, what, BOUNDS) as (_, _, timeline):
        times = timeline.times.tolist()
        return [(index, times[index]) for index in sampling.choose(times, timeline.end)]


@contextmanager
def _opened(file: BinaryIO, what: str, bounds: Bounds) -> Iterator[tuple[Any, Any, Timeline]]:
    """Open a video file within the limits: its container, its video stream and the frames of that."""
    need("av")
    import av

    if file.seek(0, 2) > MAX_BYTES:
        raise RevisitError(f"The video {what} has more than the {MAX_BYTES:,} bytes allowed; cut it first.")
    file.seek(0)
    try:
        with av.open(file, "r", options={"format_whitelist": CONTAINERS}) as container:
            if not container.streams.video:
                raise RevisitError(f"The file {what} has no video stream; check that it is the right file.")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise RevisitError(
                    f"The video {what} has {stream.width}×{stream.height} pixels, more than the {MAX_PIXELS:,} allowed."
                )
            _check_duration((container.duration or 0) / 1_000_000, bounds, what)
            timeline = _list_frames(container, stream, what)
            _check_duration(timeline.duration, bounds, what)
            yield container, stream, timeline
    except RevisitError:
        raise
    except (av.FFmpegError, *DAMAGE, TypeError, IndexError):
        raise _unreadable(file, what) from None


def _unreadable(file: BinaryIO, what: str) -> RevisitError:
    """Return the error for a file that FFmpeg cannot read."""
    file.seek(0)
    try:
        with pil.open(file, formats=FORMATS) as image:
            return RevisitError(f"The file {what} is an image ({image.format}), not a video: pass it as an image.")
    except DAMAGE:
        return RevisitError(
            f"The video {what} is truncated, damaged or in an unsupported format; get a complete copy, or convert it to MP4."
        )


def _check_duration(seconds: float, bounds: Bounds, what: str) -> None:
    if seconds > bounds.seconds:
        raise RevisitError(
            f"The video {what} lasts {timedelta(seconds=round(seconds))}, longer than the {timedelta(seconds=bounds.seconds)} allowed "
            "(hours:minutes:seconds); cut it first."
        )


def _list_frames(container: Any, stream: Any, what: str) -> Timeline:
    """List the frames of a stream by its packets, without decoding."""
    stamped, complete, count, end = array("q"), True, 0, 0
    keys: list[tuple[int, int]] = []
    for packet in container.demux(stream):
        count += bool(packet.size)
        complete &= not packet.is_corrupt
        if packet.size and not packet.is_discard:
            stamped.append(-1 if packet.pts is None else packet.pts)
            end = max(end, stamped[-1] + (packet.duration or 0))
            if packet.is_keyframe:
                keys.append((stamped[-1], stamped[-1] if packet.dts is None else packet.dts))
    if not stamped:
        raise RevisitError(f"The video {what} has no frame; get a complete copy.")
    if len(stamped) == 1 and container.format.name in ANIMATIONS:
        raise RevisitError(f"The file {what} is an image, not a video: pass it as an image.")
    if count < stream.frames or not complete:
        raise _truncated(what)
    stamps = np.sort(np.array(stamped))
    if container.format.name in UNTIMED or not (np.diff(stamps) > 0).all():
        step = 1 / float(stream.average_rate or stream.guessed_rate or 25)
        return Timeline(np.arange(len(stamps)) * step, len(stamps) * step, np.empty(0), [])
    unit = float(stream.time_base)
    origin = container.start_time / 1_000_000 if container.format.name in CLOCKED and container.start_time else 0.0
    times = np.round(stamps * unit - origin, 6)
    mean = float(times[-1] - times[0]) / max(len(times) - 1, 1)  # the last frame lasts as long if it has no duration
    last = end * unit - origin if end > stamps[-1] else float(times[-1]) + mean
    if _declared_end(stream) > last + 1:
        raise _truncated(what)
    return Timeline(times, last, stamps, sorted((int(np.searchsorted(stamps, pts)), pts, seek) for pts, seek in keys))


def _declared_end(stream: Any) -> float:
    """Return the end of a stream in seconds by its tag in Matroska files; 0 without one."""
    hours, minutes, seconds = (stream.metadata.get("DURATION") or "0:0:0").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _truncated(what: str) -> RevisitError:
    return RevisitError(f"The video {what} is truncated: frames at its end are missing; get a complete copy.")


def _decode_groups(container: Any, timeline: Timeline, frames: Frames) -> None:
    """Decode only the groups of pictures that hold wanted frames; stop at the first frame that is not found."""
    starts = [start for start, *_ in timeline.keys]
    at = -1
    decoded: Iterator[tuple[int, Any]] = iter(())
    for want in sorted(frames.missing):
        key = max(bisect_right(starts, want) - 1, 0)
        if at < 0 or starts[key] > at:
            decoded = _decode_from(container, frames, timeline, key)
        for at, frame in decoded:
            if at == want:
                frames.keep(want, frame)
            if at >= want:
                break
        if want in frames.missing:
            break


def _decode_from(container: Any, frames: Frames, timeline: Timeline, key: int) -> Iterator[tuple[int, Any]]:
    """Decode from a key frame on, and yield the frames with their indices."""
    _, stamp, seek = timeline.keys[key]
    container.seek(seek, stream=frames.stream)
    for packet in dropwhile(lambda packet: packet.pts != stamp, container.demux(frames.stream)):
        for frame in packet.decode():
            frames.decoded += 1
            yield int(np.searchsorted(timeline.stamps, frame.pts)), frame


def _decode_all(container: Any, frames: Frames) -> None:
    """Decode a stream without usable time stamps from its beginning."""
    container.seek(0)
    for index, frame in enumerate(islice(container.decode(frames.stream), max(frames.missing) + 1)):
        frames.decoded += 1
        if index in frames.missing:
            frames.keep(index, frame)
