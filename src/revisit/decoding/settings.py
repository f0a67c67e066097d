"""Decoding settings that are independent of the method: length, sampling, beams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from revisit.errors import RevisitError
from revisit.registry import Beams, Count, PositiveShare, Settings, Temperature

if TYPE_CHECKING:
    from transformers import GenerationConfig
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

    @classmethod
    def take(cls, options: dict[str, Any], config: GenerationConfig) -> Self:
        """Remove length and sampling from the arguments of a call of `generate`, and return them.

        What the arguments leave out is as in the model's generation configuration.
        """
        names = ("temperature", "top_p", "top_k")
        given = {name: value for name in names if (value := options.pop(name, None)) is not None}
        length = options.pop("max_new_tokens", None) or config.max_new_tokens or cls().max_new_tokens
        options.pop("num_beams", None)
        if not options.pop("do_sample", False):
            if given:
                raise RevisitError(f"{', '.join(given)} has no effect without do_sample=True.")
            return cls(max_new_tokens=length)
        recommended = {name: value for name in names if (value := getattr(config, name)) is not None}
        return cls(**{"temperature": 1.0, **recommended, **given, "max_new_tokens": length})
