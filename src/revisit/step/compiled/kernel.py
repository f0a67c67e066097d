"""ReVisiT's usual step in C (kernel.c), for float32 and bfloat16 models on a CPU.

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
from typing import Any

import torch
from torch import Tensor

from revisit import settings
from revisit.models.head import Projection
from revisit.step.interface import ItemStates, RowDetail, RowSummary, StepInput, StepOutput
from revisit.step.reference import ReferenceStep
from revisit.step.rule import Rule

HERE = Path(__file__).resolve().parent
ENABLED = settings.compiled_step()
COLUMNS = 16384  # most columns in an item's cache
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
        and not rule.once
        and library() is not None
        and weight is not None
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_cpu
        and weight.is_contiguous()
    )


class Columns:
    """A cache of one item's projected columns; the system allocates only the pages that are written."""

    def __init__(self, item: ItemStates, vocabulary: int) -> None:
        self.states = item.states.float().contiguous()  # (n, d)
        self.capacity = min(COLUMNS, item.column_bytes // (4 * max(1, len(self.states))))
        self.store = torch.empty(self.capacity, len(self.states))
        self.slot_of = torch.zeros(vocabulary, dtype=torch.int32)
        self.used = torch.zeros(1, dtype=torch.int32)  # slots
        self.divergences = torch.empty(len(self.states))  # of the last step


class CompiledStep(ReferenceStep):
    """The compiled code, applied row by row; the reference computes the few rows that it does not support."""

    name = "compiled"

    def __init__(self, head: Projection, rule: Rule) -> None:
        super().__init__(head, rule)
        assert head.plain_weight is not None
        self.weight = head.plain_weight
        self.library: Any = library()
        self.out = (ctypes.c_double * 3)()

    def take(self, inputs: StepInput) -> StepOutput:
        return super().take(inputs._replace(logits=inputs.logits.float().contiguous()))

    def take_row(self, inputs: StepInput, row: int, scores: Tensor) -> RowDetail | RowSummary | None:
        rule, out, logits, item = self.rule, self.out, inputs.logits[row], inputs.states.item(row)
        if not len(item.states):
            return None
        if item.columns is None:
            item.columns = Columns(item, len(self.weight))
        columns = item.columns
        if len(logits) <= len(self.weight) and columns.capacity:
            adaptive = ADAPTIVE[rule.weight] if isinstance(rule.weight, str) else 0
            size = self.library.revisit_step(
                logits.data_ptr(), len(logits), math.log(rule.alpha), columns.states.data_ptr(), *columns.states.shape,
                self.weight.data_ptr(), self.weight.dtype == torch.bfloat16, rule.select == "max",
                min(rule.neighbors, len(columns.states)), adaptive, 0.0 if adaptive else rule.weight, rule.normalize,
                None, 0, 0.0, columns.capacity, columns.store.data_ptr(), columns.slot_of.data_ptr(), columns.used.data_ptr(),
                scores.data_ptr(), torch.get_num_threads(), out, columns.divergences.data_ptr(),
            )  # fmt: skip
            if size > 0:
                return RowSummary(size, out[0] >= 0, out[1] > 0, int(out[0]), out[2])
        return super().take_row(inputs, row, scores)
