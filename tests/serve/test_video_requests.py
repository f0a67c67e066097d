"""Videos in requests: as one data URI, or as images with times; within limits."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_requests import read

from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.video.clip import Video
from servers import data_uri
from video_clips import make_clip, number_in, picture

LIMITS = Limits(image_pixels=100_000, video_seconds=5, video_frames=8)


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What happens?"}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


def clip_part(path: Path, **sampling: Any) -> dict[str, Any]:
    uri = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "video_url", "video_url": {"url": uri, **sampling}}


def frame_part(number: int, time: float | None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": data_uri(Image.fromarray(picture(number))), "time": time}


def test_videos_and_images_are_read_in_their_order(tmp_path: Path) -> None:
    clip = clip_part(make_clip(tmp_path / "clip.mp4"), frames=4)
    frames = [frame_part(number, number / 2) for number in (1, 2, 5)]
    request = read(body(frame_part(9, None), clip, *frames), limits=LIMITS)

    image, sampled, timed = request.images
    assert isinstance(image, Image.Image)
    assert isinstance(sampled, Video)
    assert isinstance(timed, Video)
    assert [number_in(frame) for frame in sampled.frames] == list(sampled.indices) == [12, 37, 62, 87]
    assert timed.times == (0.5, 1.0, 2.5)
    assert [number_in(frame) for frame in timed.frames] == [1, 2, 5]
    content = request.chat.messages[0].for_template()["content"]
    assert [part["type"] for part in content] == ["image", "video", "video", "text"]


def test_limits_hold_before_anything_is_decoded(tmp_path: Path) -> None:
    short = clip_part(make_clip(tmp_path / "short.mp4"))
    long = clip_part(make_clip(tmp_path / "long.mp4", stamps=[100 * number for number in range(100)]))
    wrong = {
        "longer than": body(long),
        "at most 8 frames": body({**short, "video_url": {**short["video_url"], "frames": 9}}),
        "pixels": body(short, short),
        "data URI": body({"type": "video_url", "video_url": {"url": "/etc/passwd"}}),
        "not both": body({**short, "video_url": {**short["video_url"], "frames": 2, "fps": 1}}),
        "at most 8 are allowed": body(*(frame_part(number, number) for number in range(9))),
    }
    for key, value in wrong.items():
        with pytest.raises(ApiError, match=key) as error:
            read(value, limits=LIMITS)
        assert error.value.status == 400
