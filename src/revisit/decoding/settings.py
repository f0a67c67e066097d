"""Decoding settings that are independent of the method: length, sampling, beams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from revisit.errors import RevisitError
from revisit.registry import Beams, Count, PositiveShare, Settings, Temperature

if TYPE_CHECKING:
    from typing_extensions import Self


class CallOptions(Settings):
    """Options that are checked in every call of generate."""

    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    num_beams: Beams = 1


class Decoding(CallOptions):
    """Length, sampling and beams of an answer. Without `temperature`, decoding is greedy or beam search."""

    max_new_tokens: Count = 512
    top_k: Count | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.temperature is None and (self.top_p is not None or self.top_k is not None):
            raise RevisitError("top_p and top_k need sampling: set a temperature, or remove them.")
        if self.temperature is not None and self.num_beams > 1:
            raise RevisitError("Beam sampling is not supported here: set either a temperature or num_beams.")
        return self

    @classmethod
    def from_options(cls, sample: bool, temperature: float, top_p: float, num_beams: int = 1) -> Self:
        """Return the settings for a command's options; raise RevisitError for options without effect."""
        if not sample and (temperature != 1 or top_p != 1):
            raise RevisitError("--temperature and --top-p need --sample.")
        if not sample:
            return cls(num_beams=num_beams)
        return cls(temperature=temperature, top_p=top_p if top_p != 1 else None, num_beams=num_beams)
