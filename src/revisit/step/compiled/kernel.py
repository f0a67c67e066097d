"""The usual step as one call of compiled code (kernel.c), for float32 and bfloat16 models on a CPU.

It is optional: torch computes the step if the library was not built or is turned off (`REVISIT_KERNEL=0`), and also, with one
warning, if the library cannot be loaded or was built from another source.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revisit import settings
from revisit.models.parts import Projection
from revisit.step import reference
from revisit.step.interface import Item, RowStates, Step, StepOutput
from revisit.step.rule import Rule

HERE = Path(__file__).resolve().parent
ENABLED = settings.compiled_step()
COLUMNS = 16384  # most columns that are kept for an item
ADAPTIVE = {"agreement": 1, "uncertainty": 2, "both": 3}


def library() -> Any | None:
    """Return the compiled library, or None if it is switched off, was not built or cannot be used."""
    return _load(str(HERE)) if ENABLED else None


@functools.cache
def _load(folder: str) -> Any | None:
    built = sorted(Path(folder).glob("_kernel*.so"))
    if not built:
        return None
    try:
        source = hashlib.sha256(Path(folder, "kernel.c").read_bytes()).hexdigest()
        loaded = ctypes.CDLL(str(built[-1]))
        loaded.revisit_source.restype = ctypes.c_char_p
        if loaded.revisit_source().decode() != source:
            raise OSError("it was built from another source")
    except (OSError, AttributeError) as error:
        reason = str(error).split("\n")[0][:200]
        warnings.warn(
            f"The compiled step of revisit cannot be used ({reason}), so torch is used instead: reinstall the package "
            "(pip install -e . in a clone), or set REVISIT_KERNEL=0.",
            stacklevel=2,
        )
        return None
    pointer, count, number, switch = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_int
    loaded.revisit_step.argtypes = [
        pointer, count, number, pointer, count, count, pointer, switch, switch, count, switch, number, switch,
        pointer, count, number, count, pointer, pointer, pointer, pointer, switch, pointer, pointer,
    ]  # fmt: skip
    loaded.revisit_step.restype = count
    return loaded


def suits(head: Projection, rule: Rule) -> bool:
    """Return whether the compiled code is available and supports this head and these settings."""
    weight = head.plain_weight
    return (
        rule.usual
        and library() is not None
        and weight is not None
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_cpu
        and weight.is_contiguous()
    )


class Columns:
    """The cache of one item's projected columns; the system allocates only the pages that are written."""

    def __init__(self, item: Item, vocabulary: int) -> None:
        self.states = item.states.float().contiguous()  # (n, d)
        self.capacity = min(COLUMNS, item.column_bytes // (4 * max(1, len(self.states))))
        self.store = torch.empty(self.capacity, len(self.states))
        self.slot_of = torch.zeros(vocabulary, dtype=torch.int32)
        self.used = torch.zeros(1, dtype=torch.int32)  # slots
        self.divergences = torch.empty(len(self.states))  # of the last step


class Row(NamedTuple):
    """The result of one row; see `StepOutput`."""

    size: int = 0
    applied: bool = False
    changed: bool = False
    state: int = -1
    weight: float = 0.0
    touched: bool = False


class CompiledStep(Step):
    """Take steps with compiled code, row by row; the reference computes the few rows that it does not support."""

    name = "compiled"

    def __init__(self, head: Projection, rule: Rule) -> None:
        weight = head.plain_weight
        assert weight is not None
        self.head, self.weight, self.rule = head, weight, rule
        self.library: Any = library()
        self.out = (ctypes.c_double * 3)()

    @torch.no_grad()
    def take(
        self,
        logits: Tensor,
        states: RowStates,
        uniform: float | Tensor = 0.0,
        ended: Tensor | None = None,
        written: Tensor | None = None,
    ) -> StepOutput:
        over = [False] * len(logits) if ended is None else ended.tolist()
        logits = logits.float().contiguous()
        scores = logits.clone()
        if written is None or not self.rule.once:
            written = torch.empty(len(logits), 0, dtype=torch.long)
        rows = [
            Row() if over[row] else self._take_row(one, scores[row], states.item(row), tokens)
            for row, (one, tokens) in enumerate(zip(logits, written.contiguous(), strict=True))
        ]
        return StepOutput(
            scores,
            sizes=torch.tensor([row.size for row in rows]),
            applied=torch.tensor([row.applied for row in rows]),
            changed=torch.tensor([row.changed for row in rows]),
            states=torch.tensor([row.state for row in rows]),
            weights=torch.tensor([row.weight for row in rows]),
            seen=torch.tensor([row.touched for row in rows]),
        )

    def _take_row(self, logits: Tensor, scores: Tensor, item: Item, written: Tensor) -> Row:
        """Write the scores (V,) of one row."""
        rule, out = self.rule, self.out
        if not len(item.states):
            return Row()
        if item.columns is None:
            item.columns = Columns(item, len(self.weight))
        columns = item.columns
        if len(logits) <= len(self.weight) and columns.capacity:
            adaptive = ADAPTIVE[rule.weight] if isinstance(rule.weight, str) else 0
            size = self.library.revisit_step(
                logits.data_ptr(), len(logits), math.log(rule.alpha), columns.states.data_ptr(), *columns.states.shape,
                self.weight.data_ptr(), self.weight.dtype == torch.bfloat16, rule.select == "max",
                min(rule.neighbors, len(columns.states)), adaptive, 0.0 if adaptive else rule.weight, rule.normalize,
                written.data_ptr(), len(written), rule.once, columns.capacity, columns.store.data_ptr(), columns.slot_of.data_ptr(),
                columns.used.data_ptr(), scores.data_ptr(), torch.get_num_threads(), out, columns.divergences.data_ptr(),
            )  # fmt: skip
            if size > 0:
                return Row(size, out[0] >= 0, out[1] > 0, int(out[0]), out[2], True)
        result = reference.refine_row(logits, columns.states, self.head, rule, written=written)
        scores.copy_(reference.scatter(result, logits))
        if result is None:
            return Row()
        return Row(result.size, result.applied, result.changed, result.state, result.weight, True)
