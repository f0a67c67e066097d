"""How tokens are drawn, apart from the method: length, sampling, beams."""

from __future__ import annotations

from dataclasses import dataclass

from revisit.errors import RevisitError


@dataclass(frozen=True)
class Decoding:
    """How text is drawn, apart from the method. Without `temperature` decoding is greedy (or beam search)."""

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    num_beams: int = 1

    def __post_init__(self) -> None:
        """Refuses values that generation would ignore or misread."""
        if self.max_new_tokens < 1:
            raise RevisitError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if self.num_beams < 1:
            raise RevisitError(f"num_beams must be at least 1, not {self.num_beams}.")
        if self.temperature is not None and self.temperature <= 0:
            raise RevisitError(
                f"temperature must be above 0, not {self.temperature}; leave it out for greedy decoding."
            )
        if self.temperature is None and (self.top_p is not None or self.top_k is not None):
            raise RevisitError("top_p and top_k act on sampling only: give a temperature as well, or leave them out.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RevisitError(f"top_p must lie in (0, 1], not {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise RevisitError(f"top_k must be at least 1, not {self.top_k}.")
        if self.temperature is not None and self.num_beams > 1:
            raise RevisitError("Sampling with beams is not offered here: give either a temperature or num_beams.")
