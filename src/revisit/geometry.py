"""Where each vision token lies on the image it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ImageGrid:
    """The vision tokens first .. first + rows·columns of a row form this grid over one image, row by row."""

    first: int
    rows: int
    columns: int

    def place(self, index: int) -> tuple[int, int] | None:
        """(row, column) of the row's vision token `index`, or None if it belongs to another image."""
        offset = index - self.first
        if not 0 <= offset < self.rows * self.columns:
            return None
        return divmod(offset, self.columns)


def grids(runs: list[int], inputs: dict[str, Any], merge: int = 2) -> list[ImageGrid]:
    """Grids for consecutive runs of vision tokens; a run whose shape nothing declares is taken to be a square, if it is one."""
    found: list[ImageGrid] = []
    first = 0
    for count in runs:
        side = math.isqrt(count)
        if side * side == count:
            found.append(ImageGrid(first, side, side))
        first += count
    return found
