"""Which layers a set such as "all" means."""

from __future__ import annotations

from collections.abc import Sequence

from revisit.errors import RevisitError

LAYER_SETS = ("last", "all", "low", "high")


def resolve_layers(spec: str | Sequence[int], depth: int, tied: bool) -> tuple[int, ...]:
    """Indices into the hidden states for "last", "all", "low", "high" or a list; ascending, the final layer is `depth`.

    "all" means the even layers, and starts above the embedding where the head is tied to it (there the embedding
    layer would just repeat its own input).
    """
    start = 0 if not tied or depth < 2 else (2 if depth > 2 else 1)
    if isinstance(spec, str):
        chosen: list[int] = []
        if spec == "all":
            chosen = list(range(start, depth, 2))
        elif spec == "low":
            stop = depth // 2 if depth <= 40 else 20
            chosen = list(range(start, stop, 2)) or [start]
        elif spec == "high":
            chosen = list(range(depth // 2 if depth <= 40 else depth - 20, depth, 2))
        return tuple(sorted({*chosen, depth}))
    missing = [layer for layer in spec if not 0 <= layer <= depth]
    if missing:
        raise RevisitError(
            f"Layer {missing[0]} does not exist: this model's hidden states are numbered 0 (projector output) to "
            f"{depth} (final); choose layers in that range."
        )
    return tuple(sorted(set(spec)))
