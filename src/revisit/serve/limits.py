"""Limits of a server; `--limits NAME=NUMBER` changes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from revisit.registry import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine
Seconds = Annotated[float, Field(gt=0, le=1e6)]


class Limits(Settings):
    """Bounds on the size and the cost of requests."""

    body_bytes: PositiveInt = Field(default=32 << 20, description="Largest request, in bytes.")
    image_pixels: PositiveInt = Field(default=64_000_000, description="Pixels in all images of a request.")
    video_seconds: PositiveInt = Field(default=600, description="Longest video.")
    video_frames: PositiveInt = Field(
        default=64, description="Frames sampled from a video; `image_pixels` includes theirs."
    )
    held_bytes: PositiveInt = Field(
        default=1 << 30, description="Memory for the bodies and images of all requests; beyond it, status 429."
    )
    prompt_tokens: PositiveInt = Field(default=8192, description="Longest prompt, images included.")
    new_tokens: PositiveInt = Field(default=1024, description="Longest answer; requests for more get this length.")
    work: PositiveInt = Field(
        default=65_536,
        description="Rows that one request may run: tokens × choices × beams × (1 + candidates of a beam).",
    )
    batch: PositiveInt = Field(default=16, description="Rows decoded together; each beam is a row.")
    queue: PositiveInt = Field(default=512, description="Requests waiting; beyond it, status 429.")
    connections: PositiveInt = Field(default=512, description="Open connections; beyond it, status 503.")
    seconds: Seconds = Field(default=300.0, description="Longest wait for an answer.")
    read_seconds: Seconds = Field(default=30.0, description="Longest time to receive and check a request.")
