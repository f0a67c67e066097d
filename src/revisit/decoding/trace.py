"""What happened during a decode: counters always, a full record of every step on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.models.geometry import ImageGrid


@dataclass
class StepRecord:
    """One step of one row. Probabilities run over `ids`, the plausible set, most probable (final) first."""

    step: int
    token: int | None  # what the loop then chose; None until known
    ids: list[int]
    base: list[float]  # probability before the method
    vision: list[float] | None  # of the selected vision token, or of the contrast branch; None on identity steps
    final: list[float]  # probability after the method
    set_size: int  # size of the whole plausible set; `ids` may be cut to the best
    layer: int | None = None  # index into the decoder's hidden states: 0 is the projector's output
    index: int | None = None  # which vision token of the row, 0-based
    divergence: float | None = None
    divergences: Tensor | None = None  # (layers, vision tokens), float32 on the CPU
    weight: float | None = None  # of the vision side in the fusion

    @property
    def changed(self) -> bool:
        """Whether the method's favourite differs from the model's own."""
        return self.ids[0] != self.ids[max(range(len(self.base)), key=self.base.__getitem__)]


@dataclass
class RowTrace:
    """Counters of one row (one beam of one item, in beam search)."""

    vision_tokens: int = 0
    steps: int = 0  # steps seen until the row ended
    applied: int = 0  # steps where the method had something to decide and decided it
    changed: int = 0  # steps where its arg-max differs from the model's
    set_sizes: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    grids: list[ImageGrid] = field(default_factory=list)  # one per image of the row, where the layout is known


@dataclass
class Trace:
    """Pass one to `generate` to see what a method did.

    With `record=True` every step keeps its candidates (the best `candidates` of them), its selected vision token and
    all divergences. A trace describes one call: it is emptied when the next one begins.
    """

    record: bool = False
    candidates: int = 64
    rows: list[RowTrace] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    links: list[Trace] = field(default_factory=list)  # of a chain: the counters of each of its methods

    def summary(self) -> dict[str, Any]:
        """Totals over all rows."""
        sizes = [size for row in self.rows for size in row.set_sizes]
        return {
            "rows": len(self.rows),
            "rows_without_image": sum(row.vision_tokens == 0 for row in self.rows),
            "vision_tokens": sum(row.vision_tokens for row in self.rows),
            "steps": sum(row.steps for row in self.rows),
            "applied": sum(row.applied for row in self.rows),
            "changed": sum(row.changed for row in self.rows),
            "median_set_size": median(sizes) if sizes else None,
            "largest_set_size": max(sizes, default=None),
        }
