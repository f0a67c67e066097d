"""Frames of files: the right ones, at the right times, without decoding the rest."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from revisit.errors import RevisitError
from revisit.video import reading
from revisit.video.clip import Video
from revisit.video.reading import open_video
from revisit.video.sampling import Sampling
from video_clips import UNEVEN, av, make_clip, number_in, picture

EIGHT = Sampling(8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {}),
        ("a.mkv", {}),
        ("a.ts", {}),
        ("a.avi", {"codec": "mpeg4"}),
        ("a.webm", {"codec": "libvpx-vp9"}),
        ("all_keys.apng", {"codec": "apng"}),
        ("fragments.mp4", {"muxer": {"movflags": "frag_keyframe+empty_moov"}}),
        ("uneven.mp4", {"stamps": UNEVEN}),
        ("uneven.mkv", {"stamps": UNEVEN}),
    ],
)
@pytest.mark.parametrize("sampling", [EIGHT, Sampling(fps=3.0), Sampling(100)])
def test_every_sampled_frame_has_its_own_index_and_time(
    tmp_path: Path, name: str, options: dict, sampling: Sampling
) -> None:
    video = open_video(make_clip(tmp_path / name, **options), sampling)

    assert [number_in(frame) for frame in video.frames] == list(video.indices)
    stamps = options.get("stamps") or [40 * number for number in range(100)]
    shift = 0.08 if name == "fragments.mp4" else 0  # its time stamps begin there
    assert video.times == pytest.approx([stamps[index] / 1000 + shift for index in video.indices], abs=1e-3)
    assert video.total == 100
    assert sorted(set(video.indices)) == list(video.indices)


def test_frames_are_in_the_middle_of_equal_parts() -> None:
    times = [number / 25 for number in range(100)]  # 4 s

    assert EIGHT.choose(times, 4.0) == [6, 18, 31, 43, 56, 68, 81, 93]
    assert Sampling(fps=2).choose(times, 4.0) == EIGHT.choose(times, 4.0)
    assert Sampling(3).choose([0.0, 3.9, 3.95, 3.98], 4.0) == [0, 1, 2]  # the first frame is visible at all three times
    assert Sampling(4).choose([0.0, 1.0], 2.0) == [0, 0, 1, 1]  # exactly four


def test_only_the_groups_of_pictures_with_sampled_frames_are_decoded(tmp_path: Path) -> None:
    video = open_video(make_clip(tmp_path / "clip.mp4", frames=600), Sampling(4))

    groups = {index // 12 for index in video.indices}
    assert video.decoded == sum(max(i % 12 for i in video.indices if i // 12 == group) + 1 for group in groups)
    assert video.decoded <= 12 * len(groups)


def test_a_rotated_clip_is_upright(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", size=(128, 64))
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 44  # of the track: a quarter turn clockwise, as phones write it
    one, straight = 1 << 16, struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    assert data[matrix : matrix + 36] == straight
    data[matrix : matrix + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)

    (frame,) = open_video(path, Sampling(1)).frames
    assert frame.size == (64, 128)
    assert number_in(frame.rotate(90, expand=True)) == 50


def broken(folder: Path, what: str) -> Path:
    path = folder / "clip.mp4"
    if what == "image":
        Image.fromarray(picture(3)).save(path, "PNG")
    elif what == "text":
        path.write_text("#EXTM3U\nhttp://127.0.0.1/secret.ts\n")
    elif what == "truncated":
        make_clip(path, muxer={"movflags": "faststart"})
        path.write_bytes(path.read_bytes()[:-900])
    elif what == "truncated mkv":
        path = make_clip(folder / "clip.mkv")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif what == "sound":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
    elif what == "hours":
        make_clip(path, frames=3, stamps=[0, 1000, 36_000_000])
    return path


@pytest.mark.parametrize(
    ("what", "key"),
    [
        ("image", "image"),
        ("text", "format"),
        ("truncated", "truncated"),
        ("truncated mkv", "truncated"),
        ("sound", "no video stream"),
        ("hours", "lasts 10:0"),
        ("nothing", "no video file"),
    ],
)
def test_files_that_cannot_be_read_give_one_sentence(tmp_path: Path, what: str, key: str) -> None:
    with pytest.raises(RevisitError, match=key) as error:
        open_video(broken(tmp_path, what), EIGHT)
    assert "\n" not in str(error.value)


def test_bytes_and_data_uris_are_read_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    data = make_clip(tmp_path / "clip.mp4").read_bytes()
    uri = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"

    assert open_video(uri, EIGHT).indices == open_video(data, EIGHT).indices == (6, 18, 31, 43, 56, 68, 81, 93)
    monkeypatch.setattr(reading, "MAX_BYTES", 100)
    with pytest.raises(RevisitError, match="bytes"):
        open_video(data, EIGHT)


def test_lists_of_frames_keep_their_times() -> None:
    frames = [Image.fromarray(picture(number)) for number in range(6)]

    assert open_video(frames, Sampling()).times == (0, 1, 2, 3, 4, 5)
    assert open_video(frames, Sampling(fps=4)).times == (0, 0.25, 0.5, 0.75, 1, 1.25)
    assert open_video(frames, Sampling(3)).indices == (1, 3, 5)
    timed = open_video(list(zip(frames, (0.5, 0.75, 2, 3, 4, 9.5), strict=True)), Sampling())
    assert timed.times == (0.5, 0.75, 2, 3, 4, 9.5)
    assert [number_in(frame) for frame in timed.pick([4, 0]).frames] == [4, 0]
    assert timed.metadata()["frames_indices"][:2] == [500, 750]
    with pytest.raises(RevisitError, match="ascending"):
        Video.of(frames[:2], (1, math.nan))
    with pytest.raises(RevisitError, match="one size"):
        Video.of([frames[0], frames[1].resize((8, 8))], (0, 1))


@pytest.mark.parametrize("wrong", [{"frames": 0}, {"frames": 10_000}, {"fps": 0.0}, {"frames": 2, "fps": 1.0}])
def test_wrong_samplings_are_errors(wrong: dict) -> None:
    with pytest.raises(RevisitError):
        Sampling(**wrong)
