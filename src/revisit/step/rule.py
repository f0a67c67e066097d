"""The settings of one step, which `ReVisiT` inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from revisit.errors import RevisitError
from revisit.registry import PositiveShare, Settings

if TYPE_CHECKING:
    from typing_extensions import Self

Divergence = Literal["jsd", "official", "kl", "cosine"]
Fusion = Literal["poe", "interpolation"]
AdaptiveWeight = Literal["agreement", "uncertainty", "both"]

SELECTIONS_WITHOUT_COUNT = ("random", "soft")  # selections for which `neighbors` has no meaning


class Rule(Settings):
    """The settings of one step; the defaults are the paper's. `ReVisiT` documents them."""

    alpha: PositiveShare = 1e-5
    divergence: Divergence = "jsd"
    select: Literal["min", "max", "random", "soft"] = "min"
    fusion: Fusion = "poe"
    weight: Annotated[float, Field(ge=0, le=1000)] | AdaptiveWeight = 1.0  # 0.5 for interpolation
    vocabulary: Literal["subset", "full"] = "subset"
    normalize: bool = True
    precision: Literal["float32", "model"] = "float32"
    neighbors: Annotated[int, Field(ge=1, le=1024)] = 1
    once: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _drop_no_weight(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "weight" or value not in (None, "none")}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.fusion == "interpolation" and "weight" not in self.model_fields_set:
            self.__dict__["weight"] = 0.5  # the default, which `replace` does not keep for another fusion
        if self.fusion == "interpolation" and isinstance(self.weight, float) and self.weight > 1:
            raise RevisitError(
                f'ReVisiT: weight must be a number from 0 to 1 with fusion="interpolation", not {self.weight:g}.'
            )
        if self.neighbors > 1 and self.select in SELECTIONS_WITHOUT_COUNT:
            raise RevisitError(f'ReVisiT: neighbors needs select="min" or "max"; leave it out with "{self.select}".')
        return self

    @property
    def full_vocabulary(self) -> bool:
        """Whether every token with a probability above zero is plausible."""
        return self.vocabulary == "full"

    @property
    def threshold(self) -> float:
        """The plausibility threshold relative to the likeliest token, 0 for the full vocabulary."""
        return 0.0 if self.full_vocabulary else self.alpha

    @property
    def model_dtype(self) -> bool:
        """Whether vision logits and distributions are rounded to the model's dtype."""
        return self.precision == "model"

    @property
    def usual(self) -> bool:
        """Whether the implementations for whole batches support these settings."""
        usual = self.divergence == "jsd" and self.fusion == "poe" and self.select in ("min", "max")
        return usual and not (self.full_vocabulary or self.model_dtype)
