"""What a server accepts: one frozen object that checks itself, from which the flags of the command line are made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from revisit.errors import RevisitError

ECHO = 200  # characters of a client's input that an error message may repeat


def _limit(default: float, flag: str, help: str) -> Any:
    return field(default=default, metadata={"flag": flag, "help": help})


@dataclass(frozen=True)
class Limits:
    """Bounds on everything a client controls; each has a flag of `revisit serve` (and of `revisit ui`, where it acts)."""

    # What one request may hold; all of it is checked before anything is tokenized or decoded.
    body_bytes: int = _limit(16 << 20, "--max-body", "Largest request, in bytes.")
    json_values: int = _limit(
        200_000, "--max-values", "Most commas and brackets in a request's JSON, counted before it is parsed."
    )
    messages: int = _limit(256, "--max-messages", "Most messages in a request.")
    parts: int = _limit(64, "--max-parts", "Most texts and images in one message.")
    characters: int = _limit(65_536, "--max-characters", "Most characters in all texts of a request.")
    settings: int = _limit(64, "--max-settings", "Most values in the method's settings, those in lists included.")
    setting_characters: int = _limit(2_000, "--max-setting-characters", "Longest text among the method's settings.")
    chain_links: int = _limit(4, "--max-chain", "Most methods in a chain.")
    images: int = _limit(8, "--max-images", "Most images in a request.")
    image_pixels: int = _limit(40_000_000, "--max-pixels", "Largest image, in pixels.")
    request_pixels: int = _limit(80_000_000, "--max-request-pixels", "Most pixels in all images of a request.")
    prompt_tokens: int = _limit(8192, "--max-prompt-tokens", "Longest prompt, images included.")
    new_tokens: int = _limit(1024, "--max-new-tokens", "Longest answer a request may ask for.")
    default_new_tokens: int = _limit(256, "--default-new-tokens", "Longest answer where a request names no length.")
    # What all requests may hold together.
    queue: int = _limit(512, "--max-queue", "Requests waiting; more are told to come back.")
    held_bytes: int = _limit(
        256 << 20, "--max-held-bytes", "Most bytes in all requests that are arriving or being read."
    )
    held_pixels: int = _limit(
        400_000_000,
        "--max-held-pixels",
        "Most pixels in the decoded images of all requests that wait; more are told to come back.",
    )
    batch: int = _limit(16, "--max-batch", "Requests decoded together.")
    connections: int = _limit(1024, "--max-connections", "Open connections; fewer where the system allows few files.")
    client_connections: int = _limit(512, "--max-client-connections", "Open connections of one address.")
    health_connections: int = _limit(16, "--health-connections", "Further connections that only /health may use.")
    # Time.
    seconds: float = _limit(300.0, "--max-seconds", "Longest wait for an answer.")
    read_seconds: float = _limit(20.0, "--read-seconds", "Longest time to check a request and decode its images.")
    header_seconds: float = _limit(10.0, "--header-seconds", "Time for a client to send a request's headers.")
    body_seconds: float = _limit(30.0, "--body-seconds", "Time for a client to send a request's body.")
    write_seconds: float = _limit(30.0, "--write-seconds", "Time for a client that stopped reading its answer.")
    idle_seconds: float = _limit(15.0, "--idle-seconds", "Time an unused connection is kept open.")
    batch_wait: float = _limit(
        0.01, "--batch-wait", "Seconds that a batch waits for further requests before it is decoded."
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value, low = getattr(self, f.name), smallest(f.name)
            if not low <= value < float("inf"):
                raise RevisitError(f"The limit {f.name} must be at least {low:g} and finite, not {value!r}.")
        if self.default_new_tokens > self.new_tokens:
            raise RevisitError(
                f"default_new_tokens ({self.default_new_tokens}) must not be more than new_tokens ({self.new_tokens})."
            )


def smallest(name: str) -> float:
    """The least a limit may be."""
    if name in ("batch_wait", "health_connections"):
        return 0
    return 1e-9 if name.endswith("seconds") else 1


DEFAULTS: dict[str, float] = vars(Limits())
_CHAT_ONLY = (
    "messages",
    "parts",
    "images",
    "request_pixels",
    "held_pixels",
    "default_new_tokens",
    "batch",
    "batch_wait",
)
# What the page's server heeds, with its own defaults where they differ.
UI_LIMITS: dict[str, float] = {name: value for name, value in DEFAULTS.items() if name not in _CHAT_ONLY} | {
    "body_bytes": 64 << 20,
    "image_pixels": 100_000_000,
    "queue": 8,
    "connections": 128,
    "client_connections": 64,
}
