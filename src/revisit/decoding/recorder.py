"""Counting and recording the steps of one call.

Counters stay on the device while the call runs and are read when it ends, so that counting never makes the host wait; a
record of every step (`Trace(record=True)`) is read step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.decoding.trace import RowTrace, StepRecord, Trace

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.step.reference import Refinement
    from revisit.taps.vision import VisionStates

FLUSH_STEPS = 1024  # steps whose counters are kept on the device before they are read


class EndedRows:
    """Which rows the loop has ended, kept on the device."""

    def __init__(self, prompt_length: int, beams: bool) -> None:
        self.prompt_length, self.beams = prompt_length, beams
        self._ended: Tensor | None = None  # (rows,)

    def add(self, rows: Tensor) -> None:
        """The loop ended these rows, and goes on for the others. Beam search replaces ended beams, so none end there."""
        if not self.beams:
            self._ended = rows if self._ended is None else self._ended | rows

    def forget(self) -> None:
        """No row has ended: the loop went back."""
        self._ended = None

    def before(self, input_ids: Tensor) -> Tensor | None:
        """Rows that have ended before this step (rows,); None where no row can have."""
        return None if input_ids.shape[1] == self.prompt_length else self._ended

    def active(self, input_ids: Tensor) -> list[int]:
        """Rows that have not ended before this step, read by the host."""
        ended = self.before(input_ids)
        if ended is None:
            return list(range(input_ids.shape[0]))
        return [row for row, over in enumerate(ended.tolist()) if not over]


class Recorder:
    """Fills a trace. A chain has one for the whole and one for each of its methods."""

    def __init__(self, trace: Trace, method: Method, rows: int, ended: EndedRows, stack: ExitStack) -> None:
        self.trace, self.ended, self.stack = trace, ended, stack
        trace.method = {"name": method.name, **method.settings()}
        trace.rows = [RowTrace() for _ in range(rows)]
        trace.layers, trace.links = (), []
        self._unread: list[tuple[Tensor | None, ...]] = []  # of each step: sizes, applied, changed, seen, ended
        stack.callback(self.flush)

    @property
    def records(self) -> bool:
        """Whether every step is recorded, not only counted."""
        return self.trace.record

    def link(self, method: Method) -> Recorder:
        """A recorder for one method of a chain; it counts and does not record."""
        trace = Trace()
        self.trace.links.append(trace)
        return Recorder(trace, method, len(self.trace.rows), self.ended, self.stack)

    def active(self, input_ids: Tensor) -> list[int]:
        """Rows that have not ended before this step, read by the host."""
        return self.ended.active(input_ids)

    # -- one step ---------------------------------------------------------------------------------------------------

    def note_later(
        self,
        input_ids: Tensor,
        sizes: Tensor | None = None,
        applied: Tensor | None = None,
        changed: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        """Count one step of all rows from (rows,) tensors, without reading them now and without work for the device.

        No set is counted where the size is 0 or the row has not `seen` an image.
        """
        self._unread.append((sizes, applied, changed, seen, self.ended.before(input_ids)))
        if len(self._unread) == FLUSH_STEPS:
            self.flush()

    def note(
        self,
        row: int,
        *,
        applied: bool = False,
        changed: bool = False,
        set_size: int | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """Count one step of one row."""
        counters = self.trace.rows[row]
        counters.steps += 1
        counters.applied += applied
        counters.changed += changed
        if set_size is not None:
            counters.set_sizes.append(set_size)
        if record is not None:
            counters.records.append(record)

    def note_scores(
        self,
        input_ids: Tensor,
        base: Tensor,
        scores: Tensor,
        other: Tensor | None = None,
        acted: Tensor | None = None,
        layer: Tensor | None = None,
    ) -> None:
        """Count, and on request record, a step that turned the logits `base` into `scores`, all rows at once.

        The set of a row is where its scores are finite. `other` are the logits that were contrasted with (all (rows, V)),
        `acted` (rows,) says where the method had anything to do, `layer` (rows,) which of the trace's layers each row used.
        """
        sizes = scores.isfinite().sum(-1)
        applied = sizes > 1 if acted is None else acted.to(sizes.device) & (sizes > 1)
        changed = (scores.argmax(-1) != base.argmax(-1)) & applied
        if not self.records:
            self.note_later(input_ids, sizes, applied, changed)
            return
        counts: list[list[int]] = torch.stack([sizes, applied, changed]).tolist()
        chosen = None if layer is None else layer.tolist()
        for row in self.active(input_ids):
            size, did, moved = counts[0][row], bool(counts[1][row]), bool(counts[2][row])
            contrast = other[row] if other is not None and did else None
            record = self._record_scores(row, base[row], scores[row], contrast, size)
            record.layer = self.trace.layers[chosen[row]] if chosen is not None and did else None
            self.note(row, applied=did, changed=moved, set_size=size, record=record)

    def note_plain(self, input_ids: Tensor, logits: Tensor) -> None:
        """Count, and on request record, a step that left the logits (rows, V) as they are."""
        if not self.records:
            self.note_later(input_ids)
            return
        for row in self.active(input_ids):
            size = int(logits[row].isfinite().sum())
            self.note(row, record=self._record_scores(row, logits[row], logits[row], None, size))

    def note_refinement(self, row: int, result: Refinement | None, states: VisionStates) -> None:
        """Count, and on request record, a step that fused two distributions over a plausible set; None: left as it is."""
        if result is None:
            self.note(row)
            return
        record = self._record(row, result, states) if self.records else None
        self.note(row, applied=result.applied, changed=result.changed, set_size=result.size, record=record)

    def step_back(self, length: int) -> None:
        """The loop went back to `length` tokens a row: steps stay counted, records of later tokens are dropped."""
        self.ended.forget()
        for row in self.trace.rows:
            del row.records[length - self.ended.prompt_length + 1 :]

    # -- the end ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Read the counters that are still on the device."""
        columns = [read_together(column) for column in zip(*self._unread, strict=True)]
        self._unread = []
        for sizes, applied, changed, seen, ended in zip(*columns, strict=True):
            for row in range(len(self.trace.rows)):
                if ended is None or not ended[row]:
                    size = sizes[row] if sizes is not None and (seen is None or seen[row]) else 0
                    did, moved = (values is not None and bool(values[row]) for values in (applied, changed))
                    self.note(row, applied=did, changed=moved, set_size=size or None)

    def finish(self, sequences: Tensor, tokenizer: Any = None) -> None:
        """Fill in which token was chosen at each recorded step (not for beams: there rows change places)."""
        if not self.records or self.ended.beams:
            return
        for row, tokens in zip(self.trace.rows, sequences[:, self.ended.prompt_length :].tolist(), strict=True):
            for record, token in zip(row.records, tokens, strict=False):
                record.token = token
        if tokenizer is not None:
            self.trace.add_text(tokenizer)

    # -- records ----------------------------------------------------------------------------------------------------

    def _record_scores(self, row: int, base: Tensor, scores: Tensor, other: Tensor | None, size: int) -> StepRecord:
        """Candidates of one step; every column is a distribution over the row's set."""
        outside = ~scores.isfinite()
        before, after = (x.masked_fill(outside, -torch.inf).softmax(-1) for x in (base.float(), scores.float()))
        order = with_favorite(after.topk(min(size, self.trace.candidates)).indices, before.argmax())
        between = None if other is None else other.float().masked_fill(outside, -torch.inf).softmax(-1)[order].tolist()
        return StepRecord(
            step=self.trace.rows[row].steps + 1,
            token=None,
            ids=order.tolist(),
            base=before[order].tolist(),
            vision=between,
            final=after[order].tolist(),
            set_size=size,
        )

    def _record(self, row: int, result: Refinement, states: VisionStates) -> StepRecord:
        final = result.final.softmax(-1)
        best = final.argsort(descending=True, stable=True)[: self.trace.candidates]
        order = with_favorite(best, result.base.argmax())
        record = StepRecord(
            step=self.trace.rows[row].steps + 1,
            token=None,
            ids=result.ids[order].tolist(),
            base=result.base.exp()[order].tolist(),
            vision=None,
            final=final[order].tolist(),
            set_size=len(result.ids),
        )
        if result.applied and result.divergences is not None:
            record.vision = result.vision.exp()[order].tolist()
            record.layer, record.index = states.place(result.state)
            record.divergence = float(result.divergences[result.state])
            record.divergences = result.divergences.float().cpu().view(len(states.layers), states.tokens)
            record.weight = result.weight
        return record


def with_favorite(order: Tensor, favorite: Tensor) -> Tensor:
    """The best candidates, the last one replaced by the model's own favorite if that is not among them."""
    return order if bool((order == favorite).any()) else torch.cat([order[:-1], favorite[None]])


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The values of many small tensors of one shape, read from their device in one go; None stays None."""
    known = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack([tensor.to(known[0].device) for tensor in known]).tolist() if known else ())
    return [None if tensor is None else next(values) for tensor in tensors]
