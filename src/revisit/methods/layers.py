"""Which decoder layers a method works on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.decoding.method import Method


def layers_of_32(first: int, last: int, depth: int, least: int = 0) -> tuple[int, ...]:
    """Decoder layers at the relative depth of `first` to `last` of LLaVA-7B's 32, the published ones; none below `least`."""
    start, end = (min(round(layer * depth / 32), depth - 1) for layer in (first, last))
    return tuple(range(min(max(start, least), end), end + 1))


def check_layers(method: Method, layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """These layers in ascending order; raises RevisitError if the decoder does not have them all."""
    if max(layers) >= depth:
        raise RevisitError(
            f"{type(method).__name__}: layer {max(layers)} does not exist: this model's layers are numbered 0 to {depth - 1}."
        )
    return tuple(sorted(layers))
