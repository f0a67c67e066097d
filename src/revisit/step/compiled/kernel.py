"""The usual step as one call of compiled code (kernel.c), for float32 states on a CPU.

It is optional: where the library is missing, broken, of another machine or of another source, torch takes the step, and
one warning says why. `REVISIT_KERNEL=0` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import struct
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revisit import settings
from revisit.models.head import Projection
from revisit.step import reference
from revisit.step.batched import Step
from revisit.step.rule import Rule

HERE = Path(__file__).resolve().parent
COLUMNS = 2816  # most columns that are kept of an item
COLUMN_BYTES = 256 << 20  # most memory for the columns of all items of a run
ADAPTIVE = {"agreement": 1, "uncertainty": 2, "both": 3}


def library() -> Any | None:
    """The compiled code; None where it is switched off, was not built or cannot be used."""
    return _load(str(HERE)) if settings.compiled_step() else None


@functools.cache
def _load(folder: str) -> Any | None:
    built = [path for suffix in EXTENSION_SUFFIXES if (path := Path(folder, f"_kernel{suffix}")).exists()]
    if not built:
        return None
    try:
        source = hashlib.sha256(Path(folder, "kernel.c").read_bytes()).hexdigest()
        _check_whole(built[0])
        loaded = ctypes.CDLL(str(built[0]))
        loaded.revisit_source.restype = ctypes.c_char_p
        if loaded.revisit_source().decode() != source:
            raise OSError("it was built from another source")
    except (OSError, AttributeError) as error:
        reason = str(error).split("\n")[0][:200]
        warnings.warn(
            f"The compiled step of revisit cannot be used ({reason}), so torch takes its place: install the package again "
            "(pip install -e . in a clone), or set REVISIT_KERNEL=0.",
            stacklevel=2,
        )
        return None
    pointer, count, number, switch = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_int
    loaded.revisit_step.argtypes = [
        pointer, count, number, pointer, count, count, pointer, switch, count, switch, number, switch, count,
        pointer, pointer, pointer, pointer, switch, pointer,
    ]  # fmt: skip
    loaded.revisit_step.restype = count
    return loaded


def _check_whole(path: Path) -> None:
    """OSError unless the file is as long as its own headers say: loading a truncated library can kill the process."""
    data = path.read_bytes()
    if len(data) < 64:
        raise OSError(f"{path.name} is empty or cut off")
    if data[:4] == b"\x7fELF" and data[4] == 2:
        order = "<" if data[5] == 1 else ">"
        (start,) = struct.unpack(f"{order}Q", data[40:48])  # of the section headers, which lie at the end
        size, count = struct.unpack(f"{order}HH", data[58:62])
        if len(data) < start + size * count:
            raise OSError(f"{path.name} is cut off")


def suits(states: Tensor, head: Projection, rule: Rule) -> bool:
    """Whether the compiled code is there and takes steps of this kind."""
    usual = rule.divergence == "jsd" and rule.fusion == "poe" and rule.select in ("min", "max")
    if not usual or rule.full_vocabulary or rule.model_dtype or library() is None:
        return False
    weight = head.plain_weight
    plain = weight is not None and weight.dtype == torch.float32 and weight.is_cpu and weight.is_contiguous()
    return plain and states.dtype == torch.float32 and states.is_cpu


class Columns:
    """Memory of one item's projected columns; only what is touched is real."""

    def __init__(self, states: Tensor, vocabulary: int, share: int) -> None:
        self.states = states.contiguous()  # (n, d)
        self.capacity = min(COLUMNS, share // (4 * max(1, len(states))))
        self.store = torch.empty(self.capacity, len(states))
        self.slot_of = torch.zeros(vocabulary, dtype=torch.int32)
        self.books = torch.zeros(3 * self.capacity + 2, dtype=torch.int32)


class CompiledStep:
    """Takes the steps of one run by compiled code, row by row; the few that it does not take go to the reference."""

    def __init__(self, items: Sequence[Tensor], head: Projection, rule: Rule, copies: int) -> None:
        weight = head.plain_weight
        assert weight is not None
        self.head, self.weight, self.rule, self.copies = head, weight, rule, copies
        self.items = [Columns(item, len(weight), COLUMN_BYTES // len(items)) for item in items]
        self.library: Any = library()
        self.told = (ctypes.c_double * 3)()

    @torch.no_grad()
    def __call__(self, logits: Tensor, uniform: float | Tensor = 0.0, ended: Tensor | None = None) -> Step:
        over = [False] * len(logits) if ended is None else ended.tolist()
        return self.take(logits, [None if over[row] else self.items[row // self.copies] for row in range(len(logits))])

    def take(self, logits: Tensor, items: Sequence[Columns | None]) -> Step:
        """One step of rows (B, V) that look at these items; rows with None are left as they are."""
        logits = logits.float().contiguous()
        scores = logits.clone()
        outcomes = [self._row(*row) for row in zip(logits, scores, items, strict=True)]
        sizes, applied, changed, states, weights, seen = (torch.tensor(x) for x in zip(*outcomes, strict=True))
        return Step(scores, sizes, applied, changed, states, weights, seen)

    def _row(self, logits: Tensor, scores: Tensor, item: Columns | None) -> tuple[int, bool, bool, int, float, bool]:
        """Write the scores (V,) of one row: size, applied, changed, state, weight, and whether it was touched."""
        rule, told = self.rule, self.told
        if item is None or not len(item.states):
            return 0, False, False, -1, 0.0, False
        if len(logits) <= len(self.weight) and item.capacity:
            adaptive = ADAPTIVE[rule.weight] if isinstance(rule.weight, str) else 0
            size = self.library.revisit_step(
                logits.data_ptr(), len(logits), math.log(rule.alpha), item.states.data_ptr(), *item.states.shape,
                self.weight.data_ptr(), rule.select == "max", min(rule.neighbors, len(item.states)), adaptive,
                0.0 if adaptive else rule.weight, rule.normalize, item.capacity, item.store.data_ptr(),
                item.slot_of.data_ptr(), item.books.data_ptr(), scores.data_ptr(), torch.get_num_threads(), told,
            )  # fmt: skip
            if size > 0:
                return size, told[0] >= 0, told[1] > 0, int(told[0]), told[2], True
        result = reference.refine(logits, item.states, self.head, rule)
        scores.copy_(reference.scatter(result, logits))
        if result is None:
            return 0, False, False, -1, 0.0, False
        return result.size, result.applied, result.changed, result.state, result.weight, True
