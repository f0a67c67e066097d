"""The compiled loops of the engine (kernel.c), where they were built and the tensors suit them.

They are optional: without a C compiler the package installs all the same, and the engine uses torch. `REVISIT_KERNEL=0`
switches them off. They work on float32 tensors in the CPU's memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit import settings
from revisit.step.engine_formulas import Refinement

if TYPE_CHECKING:
    from revisit.step.engine import Books, Rule

PANEL = 96  # head rows that are projected at a time
LANES = 16  # rows taken at once by a thread; its scratch holds so many numbers a column
SHORT_LANES = 32  # the same for rows of 16-bit integers


def _load() -> ctypes.CDLL | None:
    if not settings.compiled_step():
        return None
    here = Path(__file__).resolve().parent
    built = [path for suffix in EXTENSION_SUFFIXES if (path := here / f"_kernel{suffix}").exists()]
    if not built:
        return None
    library = ctypes.CDLL(str(built[0]))
    library.revisit_source.restype = ctypes.c_char_p
    if library.revisit_source().decode() != hashlib.sha256((here / "kernel.c").read_bytes()).hexdigest():
        warnings.warn(
            "The compiled loops of revisit are not those of its source, so they are not used: install the package again "
            "(pip install -e . in a clone).",
            stacklevel=2,
        )
        return None
    pointer, count, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.revisit_plausible.argtypes = [pointer, count, ctypes.c_double, pointer, count]
    library.revisit_plausible.restype = count
    library.revisit_project.argtypes = [
        pointer, count, count, pointer, pointer, count, pointer, pointer, pointer, threads,
    ]  # fmt: skip
    library.revisit_project.restype = None
    library.revisit_divergences.argtypes = [pointer, count, pointer, pointer, count, pointer, pointer, threads]
    library.revisit_divergences.restype = None
    library.revisit_look_up.argtypes = [
        pointer, pointer, pointer, ctypes.c_int64, pointer, count, pointer, pointer, pointer,
    ]  # fmt: skip
    library.revisit_look_up.restype = count
    clock = ctypes.c_int64
    library.revisit_enter.argtypes = [
        pointer, pointer, pointer, pointer, count, count, clock, clock, pointer, pointer, count, pointer, pointer, pointer,
    ]  # fmt: skip
    library.revisit_enter.restype = None
    library.revisit_nearest.argtypes = [
        pointer, count, ctypes.c_int, ctypes.c_float, ctypes.c_float, pointer, count,
    ]  # fmt: skip
    library.revisit_nearest.restype = count
    library.revisit_shorten.argtypes = [pointer, count, count, pointer, pointer, threads]
    library.revisit_shorten.restype = None
    library.revisit_project_short.argtypes = [
        pointer, count, count, pointer, pointer, count, pointer, pointer, pointer, pointer, threads, threads,
    ]  # fmt: skip
    library.revisit_project_short.restype = None
    library.revisit_divergences_short.argtypes = [
        pointer, pointer, pointer, count, pointer, pointer, count, pointer, pointer, threads,
    ]  # fmt: skip
    library.revisit_divergences_short.restype = None
    library.revisit_room.argtypes = [count, count, threads]
    library.revisit_room.restype = count
    library.revisit_steps.argtypes = [pointer, count, threads]
    library.revisit_steps.restype = None
    return library


_LIBRARY = _load()


def available() -> bool:
    """Whether the loops were built and not switched off."""
    return _LIBRARY is not None


def suits(*tensors: Tensor) -> bool:
    """Whether the loops can read these tensors: float32, on the CPU, contiguous."""
    return _LIBRARY is not None and all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)


def plausible(logits: Tensor, alpha: float) -> Tensor | None:
    """The ids of `core.plausible` on the log-probabilities of (V,) logits; None where only those can decide.  -> (k,)"""
    assert _LIBRARY is not None
    ids = torch.empty(logits.numel(), dtype=torch.long)  # untouched memory costs nothing
    count = _LIBRARY.revisit_plausible(
        logits.data_ptr(), logits.numel(), math.log(alpha), ids.data_ptr(), logits.numel()
    )
    return None if count < 0 else ids[:count].clone()


def project(states: Tensor, head: Tensor, ids: Tensor, store: Tensor, slots: Tensor) -> None:
    """Write the logits of all states for some tokens into rows of a store.  (n, d), (V, d), (k,), (capacity, n), (k,)"""
    assert _LIBRARY is not None
    assert states.shape[1] == head.shape[1]
    scratch = torch.empty(min(PANEL, len(ids) + 2), -(-states.shape[1] // 8) * 8)
    _LIBRARY.revisit_project(
        states.data_ptr(), len(states), states.shape[1], head.data_ptr(), ids.data_ptr(), len(ids),
        store.data_ptr(), slots.data_ptr(), scratch.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def columns(states: Tensor, head: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A store of just these tokens' columns, and the slots, in order.  (n, d), (V, d), (k,) -> (k, n), (k,)"""
    store, slots = torch.empty((len(ids), len(states))), torch.arange(len(ids))
    project(states, head, ids, store, slots)
    return store, slots


def find(books: Books, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Books.find`."""
    assert _LIBRARY is not None
    slots, missing, places, fresh = torch.empty((4, len(ids)), dtype=torch.long).unbind()
    arrays = books.slot_of.data_ptr(), books.id_in.data_ptr(), books.used_at.data_ptr(), books.uses.data_ptr()
    lacking = _LIBRARY.revisit_look_up(
        arrays[0], arrays[2], arrays[3], books.clock, ids.data_ptr(), len(ids),
        slots.data_ptr(), missing.data_ptr(), places.data_ptr(),
    )  # fmt: skip
    if lacking:
        keys = torch.empty(books.held, dtype=torch.long)
        _LIBRARY.revisit_enter(
            *arrays, books.capacity, books.held, books.clock, books.CREDIT, missing.data_ptr(), places.data_ptr(), lacking,
            slots.data_ptr(), fresh.data_ptr(), keys.data_ptr(),
        )  # fmt: skip
    return slots, missing[:lacking], fresh[:lacking]


def divergences(store: Tensor, slots: Tensor, log_p: Tensor) -> Tensor:
    """Jensen–Shannon divergences of all rows of a store from P, to within rounding.  (capacity, n), (k,), (k,) -> (n,)"""
    assert _LIBRARY is not None
    threads = min(torch.get_num_threads(), -(-store.shape[1] // LANES))
    scratch, out = torch.empty((1 + threads * LANES) * len(slots)), torch.empty(store.shape[1])
    _LIBRARY.revisit_divergences(
        store.data_ptr(), store.shape[1], slots.data_ptr(), log_p.data_ptr(), len(slots),
        scratch.data_ptr(), out.data_ptr(), threads,
    )  # fmt: skip
    return out


def nearest(divergences: Tensor, largest: bool, scale: float, rounding: float, room: int) -> tuple[int, Tensor]:
    """The row of the least (or largest) divergence, first on ties, and all rows that rounding could have put before it.

    -1 if all are NaN.
    """
    assert _LIBRARY is not None
    rows = torch.empty(room + 1, dtype=torch.long)
    found = _LIBRARY.revisit_nearest(
        divergences.data_ptr(), len(divergences), largest, scale, rounding, rows.data_ptr(), room
    )
    return int(rows[room]) if found else -1, rows[:found]


class _Item(ctypes.Structure):
    """What `revisit_steps` knows of an item and of a step of it; kernel.c has the same fields in the same order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "head", "shorts", "scales", "store", "column_scales")),
        *((name, ctypes.c_void_p) for name in ("slot_of", "id_in", "used_at", "uses")),
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "scores", "ids", "vectors", "divergences", "integers", "scratch")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("height", "width", "vocabulary", "capacity", "held", "clock", "credit", "given")
        ),
        ("log_alpha", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("weight", "rounding")),
        *((name, ctypes.c_int32) for name in ("largest", "normalize")),
        *((name, ctypes.c_int64) for name in ("count", "row", "near", "projected", "exact", "moved")),
    ]


class Shorts:
    """States as 16-bit integers, and a store for their columns as such: for ranking, with errors that are known."""

    def __init__(self, states: Tensor, capacity: int) -> None:
        assert _LIBRARY is not None
        height, width = -(-len(states) // SHORT_LANES) * SHORT_LANES, -(-states.shape[1] // 2) * 2
        self.states = torch.empty((height, width), dtype=torch.int16)  # in the order that kernel.c likes
        self.scales = torch.empty((height, 4))  # kernel.c's `scale` of each row
        self.store = torch.empty((capacity, height), dtype=torch.int16)  # memory is touched only as columns arrive
        self.column_scales = torch.empty((capacity, 4))
        _LIBRARY.revisit_shorten(
            states.data_ptr(), *states.shape, self.states.data_ptr(), self.scales.data_ptr(), torch.get_num_threads()
        )

    @staticmethod
    def column_bytes(rows: int) -> int:
        return 2 * -(-rows // SHORT_LANES) * SHORT_LANES

    def project(self, height: int, head: Tensor, ids: Tensor, slots: Tensor, plain: bool = False) -> None:
        """Columns of some tokens into these slots; `plain` without instructions that only some processors have."""
        assert _LIBRARY is not None
        scratch = torch.empty((PANEL, self.states.shape[1]), dtype=torch.int16)
        _LIBRARY.revisit_project_short(
            self.states.data_ptr(), height, head.shape[1], head.data_ptr(), ids.data_ptr(), len(ids), self.store.data_ptr(),
            self.column_scales.data_ptr(), slots.data_ptr(), scratch.data_ptr(), torch.get_num_threads(), plain,
        )  # fmt: skip

    def divergences(self, height: int, slots: Tensor, log_p: Tensor) -> Tensor:
        """Divergences of all rows from P over the columns in these slots, as the integers have them.  -> (height,)"""
        assert _LIBRARY is not None
        threads = torch.get_num_threads()
        scratch, out = torch.empty((1 + threads * SHORT_LANES) * len(slots)), torch.empty(height)
        _LIBRARY.revisit_divergences_short(
            self.store.data_ptr(), self.scales.data_ptr(), self.column_scales.data_ptr(), height, slots.data_ptr(),
            log_p.data_ptr(), len(slots), scratch.data_ptr(), out.data_ptr(), threads,
        )  # fmt: skip
        return out


class Stepper:
    """The usual step of one item (Jensen–Shannon divergence, product of experts), for `take`."""

    def __init__(self, books: Books, states: Tensor, head: Tensor, rule: Rule, rounding: float) -> None:
        assert states.shape[1] == head.shape[1]
        books.grow(len(head))
        self.shorts = Shorts(states, books.capacity)
        self.books, self.kept, self.item = books, (states, head), _Item()
        self.asked = self.projected = 0  # columns used and columns computed, over all steps
        self.exact = 0  # rows computed in float32
        for name, tensor in (
            ("states", states), ("head", head), ("shorts", self.shorts.states), ("scales", self.shorts.scales),
            ("store", self.shorts.store), ("column_scales", self.shorts.column_scales), ("slot_of", books.slot_of),
            ("id_in", books.id_in), ("used_at", books.used_at), ("uses", books.uses),
        ):  # fmt: skip
            setattr(self.item, name, tensor.data_ptr())
        self.item.height, self.item.width = states.shape
        self.item.capacity, self.item.credit = books.capacity, books.CREDIT
        self.item.log_alpha, self.item.weight, self.item.rounding = math.log(rule.alpha), rule.weight, rounding
        self.item.largest, self.item.normalize = rule.how == "max", rule.normalize

    @staticmethod
    def takes(rule: Rule) -> bool:
        """Whether the settings are the usual ones."""
        plain = rule.divergence == "jsd" and rule.fusion == "poe" and rule.how in ("min", "max")
        return plain and not (rule.full_vocabulary or rule.model_dtype)

    def reads(self, logits: Tensor) -> bool:
        """Whether it can take a step of these (V,) logits."""
        return suits(logits) and len(logits) <= len(self.kept[1])

    def begin(self, logits: Tensor, scores: Tensor | None, area: Area, threads: int) -> _Item:
        """The item with a step to be taken."""
        item, books = self.item, self.books
        area.grow(books.capacity, item.width, threads)
        books.clock += 1
        self.area, self.made = area, Taken(books.capacity, item.height)
        start = self.made.memory.data_ptr()
        item.ids, item.vectors, item.divergences = start, start + 8 * books.capacity, start + 20 * books.capacity
        item.logits, item.scores = logits.data_ptr(), None if scores is None else scores.data_ptr()
        item.integers, item.scratch = area.integers.data_ptr(), area.scratch.data_ptr()
        item.vocabulary, item.held, item.clock, item.given = len(logits), books.held, books.clock, 0
        return item

    def take(self, logits: Tensor, ids: Tensor, room: Room) -> Taken | None:
        """The step of (V,) logits whose plausible ids, ascending and more than one, are known."""
        assert _LIBRARY is not None
        threads = torch.get_num_threads()
        item = self.begin(logits, None, room.area(0), threads)
        self.made.memory[: 8 * len(ids)] = ids.view(torch.uint8)
        item.given = len(ids)
        _LIBRARY.revisit_steps((ctypes.c_void_p * 1)(ctypes.addressof(item)), 1, threads)
        return self.end()

    def end(self) -> Taken | None:
        """What became of it."""
        item, books, made = self.item, self.books, self.made
        books.held = min(books.capacity, books.held + item.projected)
        self.projected += item.projected
        self.exact += item.exact
        self.asked += item.count if item.count > 1 else 0
        made.size, made.row, made.moved = item.count, item.row, bool(item.moved)
        made.near = self.area.integers[: item.near].clone() if item.near > 1 else None
        return made if item.count else None


class Taken:
    """A step by the compiled code; its vectors become tensors only if they are asked for."""

    def __init__(self, capacity: int, height: int) -> None:
        self.memory = torch.empty(20 * capacity + 4 * height, dtype=torch.uint8)  # what is not touched costs nothing
        self.capacity, self.size, self.row, self.moved = capacity, 0, -1, False
        self.near: Tensor | None = None  # rows within rounding of the best, if several: then none is selected yet

    @property
    def applied(self) -> bool:
        """Whether a vision row was used."""
        return self.row >= 0

    def materialize(self) -> Refinement:
        """All of it. Only divergences of rows that could have been selected are exact."""
        ids, vectors, divergences = self.memory.split(
            [8 * self.capacity, 12 * self.capacity, len(self.memory) - 20 * self.capacity]
        )
        ids = ids.view(torch.long)[: self.size]
        base, vision, final = vectors.view(torch.float32).view(3, -1)[:, : self.size].unbind()
        if self.size == 1:
            return Refinement(ids, base, base, base, -1, None)
        return Refinement(ids, base, vision, final, self.row, divergences.view(torch.float32))


def take(jobs: Sequence[tuple[Stepper, Tensor, Tensor | None]], room: Room) -> list[Taken | None]:
    """One step of each of several items, of (V,) logits; None where it is not a usual one and must be taken another way.

    Where a row was selected, it is also written to the scores (V,), -inf outside the plausible set.
    """
    assert _LIBRARY is not None
    threads = torch.get_num_threads()
    items = [job[0].begin(job[1], job[2], room.area(i), threads) for i, job in enumerate(jobs)]
    pointers = (ctypes.c_void_p * len(items))(*map(ctypes.addressof, items))
    _LIBRARY.revisit_steps(pointers, len(items), threads)
    return [stepper.end() for stepper, *_ in jobs]


class Area:
    """Memory that a step uses and leaves, whatever item it is of; only what is touched is real."""

    NEAR = 65  # integers for the rows that are compared again

    def __init__(self) -> None:
        self.integers, self.scratch = torch.empty(0, dtype=torch.long), torch.empty(0)

    def grow(self, capacity: int, width: int, threads: int) -> None:
        """At least enough for a store of this many columns, states of this width and so many threads."""
        assert _LIBRARY is not None
        numbers = _LIBRARY.revisit_room(capacity, width, threads)
        if len(self.integers) < 5 * capacity + self.NEAR or len(self.scratch) < numbers:
            self.integers = torch.empty(max(5 * capacity + self.NEAR, len(self.integers)), dtype=torch.long)
            self.scratch = torch.empty(max(numbers, len(self.scratch)))


class Room:
    """As many areas as steps are taken in one call."""

    def __init__(self) -> None:
        self.areas: list[Area] = []

    def area(self, number: int) -> Area:
        while len(self.areas) <= number:
            self.areas.append(Area())
        return self.areas[number]
