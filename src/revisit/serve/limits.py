"""What a server accepts: bounds on everything a client controls, which a file can change (`--limits FILE`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from revisit.registry import Settings

ECHO = 200  # characters of a client's input that an error message may repeat

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


class Limits(Settings):
    """The limits of one server."""

    # What one request may hold; all of it is checked before anything is tokenized or decoded.
    body_bytes: Count = Field(default=16 << 20, description="Largest request, in bytes.")
    json_values: Count = Field(
        default=200_000, description="Most commas and brackets in a request's JSON, counted before it is parsed."
    )
    messages: Count = Field(default=256, description="Most messages in a request.")
    parts: Count = Field(default=64, description="Most texts and images in one message.")
    characters: Count = Field(default=65_536, description="Most characters in all texts of a request.")
    settings: Count = Field(default=64, description="Most values in the method's settings, those in lists included.")
    setting_characters: Count = Field(default=2_000, description="Longest text among the method's settings.")
    chain_links: Count = Field(default=4, description="Most methods in a chain.")
    images: Count = Field(default=8, description="Most images in a request.")
    image_pixels: Count = Field(default=40_000_000, description="Largest image, in pixels.")
    request_pixels: Count = Field(default=80_000_000, description="Most pixels in all images of a request.")
    prompt_tokens: Count = Field(default=8192, description="Longest prompt, images included.")
    new_tokens: Count = Field(default=1024, description="Longest answer; requests for more get this length.")
    default_new_tokens: Count = Field(default=256, description="Longest answer if a request sets no length.")
    # What all requests may hold together.
    queue: Count = Field(default=512, description="Requests waiting; further ones get status 429.")
    held_bytes: Count = Field(
        default=256 << 20,
        description="Most bytes in all requests that are arriving or being read; further ones get status 429.",
    )
    held_pixels: Count = Field(
        default=400_000_000,
        description="Most pixels in the images of all waiting and running requests; further ones get status 429.",
    )
    batch: Count = Field(default=16, description="Requests decoded together.")
    connections: Count = Field(
        default=1024,
        description="Open connections (fewer if the system allows few open files); further ones displace slow clients.",
    )
    # Time, in seconds.
    seconds: Seconds = Field(default=300.0, description="Longest wait for an answer.")
    read_seconds: Seconds = Field(default=20.0, description="Longest time to check a request and decode its images.")
    header_seconds: Seconds = Field(default=10.0, description="Time for a client to send a request's headers.")
    body_seconds: Seconds = Field(default=30.0, description="Time for a client to send a request's body.")
    write_seconds: Seconds = Field(default=30.0, description="Time for a client that stopped reading its answer.")
    idle_seconds: Seconds = Field(default=15.0, description="Time an unused connection is kept open.")
    batch_wait: float = Field(default=0.01, ge=0, description="How long a batch waits for further requests.")


# The page is for one person with large photos.
UI_LIMITS = Limits(
    body_bytes=64 << 20,
    image_pixels=100_000_000,
    request_pixels=100_000_000,
    queue=8,
    connections=128,
)
