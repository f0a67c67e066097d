"""How tokens are drawn, apart from the method: length, sampling, beams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from revisit.decoding.options import Bounds, read_fields
from revisit.errors import RevisitError

MAX_BEAMS = 64
MAX_SEED = 2**63 - 1

Count = Annotated[int, Bounds(1)]
Beams = Annotated[int, Bounds(1, MAX_BEAMS)]  # each has a key-value cache of its own
Seed = Annotated[int, Bounds(0, MAX_SEED)]
Temperature = Annotated[float, Bounds(1e-5, 1e5)]  # logits divided by less could overflow
TopP = Annotated[float, Bounds(0, 1, above=True)]


@dataclass(frozen=True)
class Decoding:
    """How text is drawn, apart from the method. Without `temperature` decoding is greedy (or beam search)."""

    max_new_tokens: Count = 512
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    num_beams: Beams = 1

    def __post_init__(self) -> None:
        """Refuses values that generation would ignore or misread."""
        read_fields(self)
        if self.temperature is None and (self.top_p is not None or self.top_k is not None):
            raise RevisitError("top_p and top_k act on sampling only: give a temperature as well, or leave them out.")
        if self.temperature is not None and self.num_beams > 1:
            raise RevisitError("Sampling with beams is not offered here: give either a temperature or num_beams.")
