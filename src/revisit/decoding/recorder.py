"""Counters and records of a running decode.

Counters stay on the device while the call runs and are read when it ends, so that counting never makes the host wait.
Records of every step (`Trace(record=True)`) are read step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.decoding.trace import RowTrace, StepRecord, Trace, add_text
from revisit.models.types import Tokenizer

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.hooks.states import VisionStates
    from revisit.step.interface import RowDetail


FLUSH_STEPS = 1024  # steps whose counters stay on the device before they are read


class EndedRows:
    """Keeps track, on the device, of the rows that have ended."""

    def __init__(self, prompt_length: int, beams: bool) -> None:
        self.prompt_length, self.beams = prompt_length, beams
        self._ended: Tensor | None = None  # (rows,)

    def add(self, rows: Tensor) -> None:
        """Add rows that the loop has ended. Beam search replaces ended beams, so none are added there."""
        if not self.beams:
            self._ended = rows if self._ended is None else self._ended | rows

    def forget(self) -> None:
        """Forget all ended rows, because the loop has stepped back."""
        self._ended = None

    def before(self, input_ids: Tensor) -> Tensor | None:
        """Return the rows that had ended before this step, (rows,), or None at the first step."""
        return None if input_ids.shape[1] == self.prompt_length else self._ended


class Recorder:
    """Fills a trace. A chain has one recorder for the whole and one for each of its methods."""

    def __init__(self, trace: Trace, method: Method, rows: int, ended: EndedRows, stack: ExitStack) -> None:
        self.trace, self.ended, self.stack = trace, ended, stack
        trace.method = {"name": method.name, **method.settings()}
        trace.rows = [RowTrace() for _ in range(rows)]
        trace.layers, trace.links, trace.drafted, trace.accepted = (), [], 0, 0
        self.noted = False  # whether the current step has been counted
        # of each step: sizes, applied, changed, seen, ended, in phase
        self._unread: list[tuple[Tensor | None, ...]] = []
        self._links: list[Recorder] = []
        self._marks: list[list[RowTrace]] = []  # the rows before each step since the last call of `accept`
        stack.callback(self.flush)

    @property
    def records(self) -> bool:
        """Whether every step is recorded, rather than only counted."""
        return self.trace.record

    def link(self, method: Method) -> Recorder:
        """Return a recorder for one method of a chain, which counts steps without recording them."""
        trace = Trace()
        self.trace.links.append(trace)
        self._links.append(Recorder(trace, method, len(self.trace.rows), self.ended, self.stack))
        return self._links[-1]

    def active(self, input_ids: Tensor) -> list[int]:
        """Return the rows that had not ended before this step; the host waits for them."""
        ended = self.ended.before(input_ids)
        over = [False] * len(input_ids) if ended is None else ended.tolist()
        return [row for row, has_ended in enumerate(over) if not has_ended]

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

        A set is not counted if its size is 0 or the row has no image (`seen` is false).
        """
        self.noted = True
        if len(self._unread) == FLUSH_STEPS:
            self.flush()
        self._unread.append((sizes, applied, changed, seen, self.ended.before(input_ids), None))

    def note(
        self,
        row: int,
        *,
        applied: bool = False,
        changed: bool = False,
        outside: bool = False,
        plausible_tokens: int | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """Count one step of one row, and keep its record."""
        self.noted = True
        counters = self.trace.rows[row]
        counters.step_count += 1
        counters.applied += applied
        counters.changed += changed
        counters.outside += outside
        if plausible_tokens is not None:
            counters.plausible_tokens.append(plausible_tokens)
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
        """Count, and on request record, a step of all rows that turned the logits `base` into `scores`.

        Args:
            input_ids: (rows, length).
            base: (rows, V) logits before the method.
            scores: (rows, V) scores after it; a row's plausible set is where they are finite.
            other: (rows, V) logits that were contrasted with.
            acted: (rows,) where the method had something to do; everywhere by default.
            layer: (rows,) index into the trace's layers of the layer that each row used.
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
            self.note(row, applied=did, changed=moved, plausible_tokens=size, record=record)

    def note_plain(self, input_ids: Tensor, logits: Tensor) -> None:
        """Count, and on request record, a step that returned the logits (rows, V) unchanged."""
        if not self.records:
            self.note_later(input_ids)
            return
        for row in self.active(input_ids):
            size = int(logits[row].isfinite().sum())
            self.note(row, record=self._record_scores(row, logits[row], logits[row], None, size))

    def note_detail(self, row: int, detail: RowDetail | None, states: VisionStates) -> None:
        """Count, and on request record, one row of ReVisiT's step; None for a row that was left unchanged."""
        if detail is None:
            self.note(row)
            return
        record = self._record(row, detail, states) if self.records else None
        self.note(row, applied=detail.applied, changed=detail.changed, plausible_tokens=detail.size, record=record)

    def before_phase(self) -> list[RowTrace]:
        """Return the rows to pass to `limit` after a step of a method with a phase."""
        return [row.copy() for row in self.trace.rows] if self.records else []

    def limit(self, in_phase: Tensor, input_ids: Tensor, logits: Tensor, before: list[RowTrace]) -> None:
        """Count the last step as outside the phase for the rows where `in_phase` (rows,) is false."""
        if not self.records:
            self._unread[-1] = (*self._unread[-1][:-1], in_phase)
            return
        acts = in_phase.tolist()
        for row in self.active(input_ids):
            if not acts[row]:
                self.trace.rows[row] = before[row]
                size = int(logits[row].isfinite().sum())
                self.note(row, outside=True, record=self._record_scores(row, logits[row], logits[row], None, size))

    def mark(self) -> None:
        """Keep the counters as they are before a step whose token may be rejected."""
        self.flush()
        self._marks.append([row.copy() for row in self.trace.rows])
        for link in self._links:
            link.mark()

    def accept(self, tokens: int) -> None:
        """Undo the steps since the last call of `accept`, except the first `tokens`."""
        self.flush()
        self.trace.drafted += len(self._marks) - 1
        self.trace.accepted += tokens - 1
        if tokens < len(self._marks):
            self.trace.rows[:] = self._marks[tokens]
        self._marks.clear()
        for link in self._links:
            link.accept(tokens)

    def step_back(self, length: int) -> None:
        """Step back to `length` tokens per row: steps stay counted, and records of later tokens are dropped."""
        self.ended.forget()
        for row in self.trace.rows:
            del row.records[length - self.ended.prompt_length + 1 :]

    # -- the end ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Read the counters that are still on the device into the trace."""
        columns = [read_together(column) for column in zip(*self._unread, strict=True)]
        self._unread = []
        for sizes, applied, changed, seen, ended, in_phase in zip(*columns, strict=True):
            for row in range(len(self.trace.rows)):
                if ended is not None and ended[row]:
                    continue
                if in_phase is not None and not in_phase[row]:
                    self.note(row, outside=True)
                else:
                    size = sizes[row] if sizes is not None and (seen is None or seen[row]) else 0
                    did, moved = (values is not None and bool(values[row]) for values in (applied, changed))
                    self.note(row, applied=did, changed=moved, plausible_tokens=size or None)

    def finish(self, sequences: Tensor, tokenizer: Tokenizer | None = None) -> None:
        """Fill in the token that was chosen at each recorded step; not for beams, because they are reordered."""
        if not self.records or self.ended.beams:
            return
        for row, tokens in zip(self.trace.rows, sequences[:, self.ended.prompt_length :].tolist(), strict=True):
            for record, token in zip(row.records, tokens, strict=False):
                record.token = token
        if tokenizer is not None:
            add_text(self.trace, tokenizer)

    # -- records ----------------------------------------------------------------------------------------------------

    def _record_scores(self, row: int, base: Tensor, scores: Tensor, other: Tensor | None, size: int) -> StepRecord:
        """Return the candidates of one step with distributions over the row's plausible set."""
        outside = ~scores.isfinite()
        before, after = (x.masked_fill(outside, -torch.inf).softmax(-1) for x in (base.float(), scores.float()))
        order = with_favorite(after.topk(min(size, self.trace.candidates)).indices, before.argmax())
        contrasted = (
            None if other is None else other.float().masked_fill(outside, -torch.inf).softmax(-1)[order].tolist()
        )
        return StepRecord(
            step=self.trace.rows[row].step_count + 1,
            token=None,
            ids=order.tolist(),
            base=before[order].tolist(),
            vision=contrasted,
            final=after[order].tolist(),
            plausible_tokens=size,
        )

    def _record(self, row: int, result: RowDetail, states: VisionStates) -> StepRecord:
        final = result.final.softmax(-1)
        best = final.argsort(descending=True, stable=True)[: self.trace.candidates]
        order = with_favorite(best, result.base.argmax())
        record = StepRecord(
            step=self.trace.rows[row].step_count + 1,
            token=None,
            ids=result.ids[order].tolist(),
            base=result.base.exp()[order].tolist(),
            vision=None,
            final=final[order].tolist(),
            plausible_tokens=len(result.ids),
        )
        if result.applied and result.divergences is not None:
            record.vision = result.vision.exp()[order].tolist()
            record.layer, record.vision_token = states.layer_and_token(result.state)
            record.divergence = float(result.divergences[result.state])
            record.divergences = result.divergences.float().cpu().view(len(states.layers), states.tokens)
            record.weight = result.weight
        return record


def with_favorite(order: Tensor, favorite: Tensor) -> Tensor:
    """Return the best candidates, with the model's own favorite in place of the last if it is not among them."""
    return order if bool((order == favorite).any()) else torch.cat([order[:-1], favorite[None]])


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the values of many small tensors of one shape, read from the device at once; None stays None."""
    known = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack([tensor.to(known[0].device) for tensor in known]).tolist() if known else ())
    return [None if tensor is None else next(values) for tensor in tensors]
