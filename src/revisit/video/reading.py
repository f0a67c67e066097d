"""Read sampled frames of a video file with PyAV, or take them from a list.

The packets are listed first, without decoding, which gives the time of every frame and the groups of pictures. Then only the groups
that hold sampled frames are decoded. Memory is bounded by the sampled frames.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from itertools import chain, dropwhile, groupby
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as pil

from revisit.errors import RevisitError, need
from revisit.io.files import local_path
from revisit.io.images import DAMAGE, FORMATS, MAX_PIXELS, data_uri_bytes
from revisit.video.clip import Video, VideoLike
from revisit.video.sampling import Bounds, Sampling

logger = logging.getLogger(__name__)

MAX_BYTES = 4_000_000_000
# Other formats can name further files or addresses to read.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,ogg,flv,asf,gif,apng"
BOUNDS = Bounds()


def open_video(source: VideoLike, sampling: Sampling, bounds: Bounds = BOUNDS) -> Video:
    """Read the sampled frames of a video.

    Args:
        source: A path, bytes or a data URI of a video file; a list of frames, or of (frame, time) pairs; or a `Video`. Frames
            without times are a second apart, or as far apart as `fps` implies.
        sampling: Which frames to read.
        bounds: Limits on files.

    Raises:
        RevisitError: The video cannot be read, or is too large.
    """
    if isinstance(source, Video):
        return source.sampled(sampling)
    if isinstance(source, (list, tuple, np.ndarray)):
        if len(source) and all(map(is_timed, source)):
            return Video.of([frame for frame, _ in source], [time for _, time in source]).sampled(sampling)
        video = Video.of(list(source), [number / (sampling.fps or 1.0) for number in range(len(source))])
        return video.sampled(Sampling(sampling.frames))
    if isinstance(source, (bytes, bytearray)):
        return read_video(BytesIO(source), "given as bytes", sampling, bounds)
    if not isinstance(source, (str, os.PathLike)):
        raise RevisitError(f"A video must be a path, bytes, a list of frames or a Video, not {type(source).__name__}.")
    name = os.fspath(source)
    if name.startswith("data:"):
        return read_video(BytesIO(data_uri_bytes(name, "video", "mp4")), "in the data URI", sampling, bounds)
    if name.startswith(("http://", "https://")):
        raise RevisitError(f"{name[:200]!r} is a URL, which is not downloaded: save the video first.")
    if not os.path.isfile(local_path(name)):
        raise RevisitError(f"There is no video file {name[:200]!r}; check the path.")
    with local_path(name).open("rb") as file:
        return read_video(file, repr(name), sampling, bounds)


def is_timed(value: object) -> bool:
    """Return whether a value is a pair of a frame and its time."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))


def as_videos(entry: VideoLike | Sequence[VideoLike] | None) -> list[VideoLike]:
    """Return the videos of one prompt as a list; a list of frames is one video, a list of names is several."""
    if entry is None:
        return []
    if not isinstance(entry, (list, tuple)):
        return [entry]
    frames = any(
        isinstance(value, pil.Image) or is_timed(value) or getattr(value, "ndim", 4) < 4 for value in entry[:1]
    )
    return [entry] if frames else list(entry)


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


def read_video(file: BinaryIO, what: str, sampling: Sampling, bounds: Bounds = BOUNDS) -> Video:
    """Read the sampled frames of a video file; messages call it "the video `what`"."""
    with _opened(file, what, bounds) as (container, stream, timeline):
        indices = sampling.choose(timeline.times, timeline.end)
        width, height = stream.width, stream.height  # frames of a damaged stream can have other sizes
        count = len(indices) * width * height
        if len(indices) > bounds.frames or count > bounds.pixels:
            raise RevisitError(
                f"{len(indices)} frames of the video {what} have {count:,} pixels; at most {bounds.frames} frames with {bounds.pixels:,} "
                "pixels are allowed: choose fewer."
            )
        missing, decoded, pixels = set(indices), 0, np.empty(0)
        for index, frame in _decode(container, stream, timeline, indices):
            decoded += 1
            if index in missing:
                image = frame.to_ndarray(format="rgb24", width=width, height=height)
                image = np.rot90(image, frame.rotation // 90)  # as a player shows it
                pixels = pixels if pixels.size else np.empty((len(indices), *image.shape), np.uint8)
                for place in (place for place, wanted in enumerate(indices) if wanted == index):
                    pixels[place] = image
                missing.discard(index)
                del image
            if not missing:
                break
        if missing:
            raise RevisitError(
                f"The video {what} is damaged: its frame {min(missing)} cannot be decoded; get a complete copy."
            )
    times, total = timeline.times, len(timeline.times)
    logger.info("Video %s: decoded %d of its %d frames (%.1f %%).", what, decoded, total, 100 * decoded / total)
    return Video(pixels, tuple(times[indices].tolist()), tuple(indices), timeline.end - float(times[0]), decoded, total)


def list_frames(file: BinaryIO, what: str, sampling: Sampling) -> list[tuple[int, float]]:
    """Return the index and the time of each sampled frame, without decoding any."""
    with _opened(file, what, BOUNDS) as (_, _, timeline):
        return [(index, float(timeline.times[index])) for index in sampling.choose(timeline.times, timeline.end)]


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
            stream.codec_context.thread_count = 1  # each thread has frames of its own
            if stream.width * stream.height > MAX_PIXELS:
                raise RevisitError(
                    f"The video {what} has {stream.width}×{stream.height} pixels, more than the {MAX_PIXELS:,} allowed."
                )
            _check_duration((container.duration or 0) / 1_000_000, bounds, what)
            timeline = _list_frames(container, stream, what)
            _check_duration(timeline.end - timeline.times[0], bounds, what)
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
    form = container.format.name
    if not stamped:
        raise RevisitError(f"The video {what} has no frame; get a complete copy.")
    if len(stamped) == 1 and form in ("gif", "apng"):
        raise RevisitError(f"The file {what} is an image, not a video: pass it as an image.")
    if count < stream.frames or not complete:
        raise _truncated(what)
    stamps = np.frombuffer(stamped, np.int64)
    stamps.sort()
    if form == "avi" or not (stamps[1:] > stamps[:-1]).all():  # a constant frame rate instead of time stamps
        step = 1 / float(stream.average_rate or stream.guessed_rate or 25)
        return Timeline(np.arange(len(stamps)) * step, len(stamps) * step, np.empty(0), [])
    unit = float(stream.time_base)
    # The time stamps of broadcasts begin anywhere.
    origin = container.start_time / 1_000_000 if form in ("mpegts", "mpeg") and container.start_time else 0.0
    times = np.round(stamps * unit - origin, 6)
    mean = float(times[-1] - times[0]) / max(len(times) - 1, 1)  # the last frame lasts as long if it has no duration
    last = end * unit - origin if end > stamps[-1] else float(times[-1]) + mean
    hours, minutes, seconds = map(float, (stream.metadata.get("DURATION") or "0:0:0").split(":"))  # in Matroska files
    if hours * 3600 + minutes * 60 + seconds > last + 1:
        raise _truncated(what)
    return Timeline(times, last, stamps, sorted((int(np.searchsorted(stamps, pts)), pts, seek) for pts, seek in keys))


def _truncated(what: str) -> RevisitError:
    return RevisitError(f"The video {what} is truncated: frames at its end are missing; get a complete copy.")


def _decode(container: Any, stream: Any, timeline: Timeline, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield frames with their indices: of the groups of pictures that hold wanted frames, and if one is not found, of the whole stream."""
    starts = np.array([start for start, *_ in timeline.keys])
    lost = not timeline.keys
    for key, group in () if lost else groupby(wanted, lambda n: max(int(np.searchsorted(starts, n, "right")) - 1, 0)):
        _, stamp, seek = timeline.keys[key]
        container.seek(seek, stream=stream)
        packets = _packets_from(stamp, container.demux(stream))
        left = set(group)
        for frame in chain.from_iterable(packet.decode() for packet in packets):
            index = int(np.searchsorted(timeline.stamps, frame.pts))
            yield index, frame
            left.discard(index)
            if not left or index > max(left):
                break
        if lost := bool(left):
            break
    if lost:
        container.seek(0)
        yield from enumerate(container.decode(stream))


def _packets_from(stamp: int, packets: Iterator[Any]) -> Iterator[Any]:
    return dropwhile(lambda packet: packet.pts != stamp, packets)
