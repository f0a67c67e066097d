"""What a server accepts, as one frozen object that checks itself."""

from __future__ import annotations

from dataclasses import dataclass, fields

from revisit.errors import RevisitError


@dataclass(frozen=True)
class Limits:
    """Bounds on everything a client controls; seconds count from the arrival of a request."""

    body_bytes: int = 16 << 20
    image_pixels: int = 40_000_000
    images: int = 8  # per request
    request_pixels: int = 80_000_000  # of all its images
    held_pixels: int = 400_000_000  # of all requests that wait or are being answered; each takes three bytes
    prompt_tokens: int = 8192  # with vision tokens
    new_tokens: int = 1024
    default_new_tokens: int = 256
    queue: int = 512  # requests waiting for the model
    batch: int = 16  # requests decoded together
    seconds: float = 300.0
    batch_wait: float = 0.01  # how long the first request of a batch waits for company
    body_seconds: float = 30.0  # for a client to send its request

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low = 0 if f.name == "batch_wait" else 1e-9 if isinstance(f.default, float) else 1
            if not value >= low:
                raise RevisitError(f"The limit {f.name} must be at least {low:g}, not {value!r}.")
        if self.default_new_tokens > self.new_tokens:
            raise RevisitError(
                f"default_new_tokens ({self.default_new_tokens}) must not be more than new_tokens ({self.new_tokens})."
            )
