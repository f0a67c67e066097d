"""Counters and per-step records for one `generate()` call.

Counters stay on the device while the call runs and are read when it ends, so that counting never makes the host wait.
Records of every step (`Trace(record=True)`) are read step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from revisit.decoding.method import Method, StepResult
from revisit.decoding.trace import RowTrace, StepRecord, Trace, add_text
from revisit.errors import RevisitError
from revisit.forward.prompt import Prompt
from revisit.forward.states import VisionStates
from revisit.models.types import Tokenizer
from revisit.step.interface import RowDetail

FLUSH_STEPS = 1024  # steps whose counters stay on the device before they are read
COUNTERS = ("sizes", "applied", "changed", "seen", "ended", "in_phase", "unusable")  # (rows,) each


class EndedRows(StoppingCriteriaList):  # type: ignore[misc]
    """The call's stopping criteria, which also keep a mask of the rows that have ended, on the device."""

    def __init__(self, criteria: Sequence[StoppingCriteria], prompt_length: int, beams: bool) -> None:
        super().__init__(criteria)
        self.prompt_length, self.beams = prompt_length, beams
        self._ended: Tensor | None = None  # (rows,)

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: object) -> Tensor:
        """Return which rows end with their newest token. Ended beams are not kept, because beam search replaces them."""
        ended: Tensor = super().__call__(input_ids, scores, **kwargs)
        if not self.beams:
            self._ended = ended if self._ended is None else self._ended | ended
        return ended

    def forget(self) -> None:
        """Forget all ended rows, because the loop has stepped back."""
        self._ended = None

    def before(self, input_ids: Tensor) -> Tensor | None:
        """Return the rows that had ended before this step, (rows,), or None at the first step."""
        return None if input_ids.shape[1] == self.prompt_length else self._ended


class Recorder:
    """Records the steps of a method in a trace, if there is one, and checks their scores.

    A chain has one recorder for the whole and one for each of its methods.
    """

    def __init__(self, trace: Trace | None, method: Method, prompt: Prompt, ended: EndedRows, stack: ExitStack) -> None:
        self.trace, self.name, self.prompt, self.ended, self.stack = trace, method.name, prompt, ended, stack
        if trace is not None:
            trace.method = {"name": method.name, **method.settings()}
            trace.rows = [RowTrace(vision_tokens=count) for count in prompt.vision_counts()]
            trace.layers, trace.links, trace.drafted, trace.accepted = (), [], 0, 0
        self._candidates = 0 if trace is None else trace.candidates  # of a record
        self._unread: list[dict[str, Tensor | None]] = []  # COUNTERS of each step
        self._unusable: set[int] = set()  # rows in which the method left no token, or returned NaN
        self._links: list[Recorder] = []
        self._marks: list[list[RowTrace]] = []  # the rows before each step since the last call of `accept`
        stack.callback(self.flush)

    def link(self, method: Method) -> Recorder:
        """Return a recorder for one method of a chain, which counts steps without recording them."""
        trace = None if self.trace is None else Trace()
        if self.trace is not None and trace is not None:
            self.trace.links.append(trace)
        self._links.append(Recorder(trace, method, self.prompt, self.ended, self.stack))
        return self._links[-1]

    # -- one step ---------------------------------------------------------------------------------------------------

    def note(self, input_ids: Tensor, base: Tensor, result: StepResult, in_phase: Tensor | None = None) -> None:
        """Check, count, and on request record a step of all rows that turned the logits `base` (rows, V) into a result.

        Rows outside the method's phase (`in_phase` (rows,) is false) are counted as such. Counters stay on the device. A step that
        returned the logits themselves, without saying where it acted, had no effect.
        """
        scores, detail, trace = result.scores, result.detail, self.trace
        step: dict[str, Tensor | None] = {"in_phase": in_phase}
        if detail is not None:
            output = detail[0]
            step |= {"sizes": output.sizes, "applied": output.applied, "changed": output.changed, "seen": output.seen}
        elif trace is not None and (scores is not base or result.acted is not None):
            step["sizes"] = sizes = scores.isfinite().sum(-1)
            step["applied"] = applied = sizes > 1
            if result.acted is not None:
                step["applied"] = applied = result.acted.to(sizes.device) & applied
            step["changed"] = (scores.argmax(-1) != base.argmax(-1)) & applied
        if detail is None and scores is not base:
            step["unusable"] = unusable_rows(base, scores)
        if trace is not None or step.get("unusable") is not None:
            if len(self._unread) == FLUSH_STEPS:
                self.flush()
            self._unread.append({**step, "ended": self.ended.before(input_ids)})
        if (unusable := step.get("unusable")) is not None and unusable.is_cpu:
            self.flush()
            self._raise_unusable()
        if trace is not None:
            trace.layers = trace.layers or result.layers
            if trace.record:
                self._record(input_ids, base, result, in_phase, step.get("applied"))

    def _record(
        self, input_ids: Tensor, base: Tensor, result: StepResult, in_phase: Tensor | None, applied: Tensor | None
    ) -> None:
        """Append the records of the rows that have not ended."""
        assert self.trace is not None
        acts = [False] * len(input_ids) if applied is None else applied.tolist()
        inside = [True] * len(input_ids) if in_phase is None else in_phase.tolist()
        layers = None if result.layer is None else result.layer.tolist()
        for row in self._active(input_ids):
            scores = result.scores[row] if inside[row] else base[row]
            if result.detail is not None and inside[row] and (detail := result.detail[0].details[row]) is not None:
                record = self._of_detail(input_ids, detail, result.detail[1][row // self.prompt.rows_per_item])
            else:
                acted = inside[row] and acts[row]
                other = result.other[row] if result.other is not None and acted else None
                record = self._of_scores(input_ids, base[row], scores, other)
                record.layer = result.layers[layers[row]] if layers is not None and acted else None
            self.trace.rows[row].records.append(record)

    def _raise_unusable(self) -> None:
        if self._unusable:
            raise RevisitError(
                f"The method {self.name!r} returned NaN, or -inf for every token, for row {min(self._unusable)} of the "
                "batch: check its formula for infinities that are subtracted and for divisions by 0, or use other settings."
            )

    # -- steps that are undone ----------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Keep the counters as they are before a step whose token may be rejected."""
        self.flush()
        if self.trace is None:
            return
        self._marks.append([row.copy() for row in self.trace.rows])
        for link in self._links:
            link.mark()

    def accept(self, tokens: int) -> None:
        """Undo the steps since the last call of `accept`, except the first `tokens`."""
        self.flush()
        if self.trace is None:
            return
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
        for row in () if self.trace is None else self.trace.rows:
            row.records = [record for record in row.records if record.step <= length - self.ended.prompt_length + 1]

    # -- the end ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Read the counters that are still on the device into the trace."""
        columns = [read_together([step.get(name) for step in self._unread]) for name in COUNTERS]
        self._unread = []
        for sizes, applied, changed, seen, ended, in_phase, unusable in zip(*columns, strict=True):
            for number in range(len(self.prompt.ids)):
                inside = in_phase is None or in_phase[number]
                if ended is not None and ended[number]:
                    continue
                if inside and unusable is not None and unusable[number]:
                    self._unusable.add(number)
                if self.trace is None:
                    continue
                row = self.trace.rows[number]
                row.step_count += 1
                if not inside:
                    row.outside += 1
                    continue
                row.applied += applied is not None and applied[number]
                row.changed += changed is not None and changed[number]
                if sizes is not None and sizes[number] and (seen is None or seen[number]):
                    row.plausible_tokens.append(sizes[number])

    def finish(self, sequences: Tensor, tokenizer: Tokenizer | None = None) -> None:
        """Check the scores of all steps, and fill in the token that was chosen at each recorded step.

        Beams have no tokens, because they are reordered.
        """
        for recorder in (self, *self._links):
            recorder.flush()
            recorder._raise_unusable()
        if self.trace is None or not self.trace.record or self.ended.beams:
            return
        for row, tokens in zip(self.trace.rows, sequences[:, self.ended.prompt_length :].tolist(), strict=True):
            for record in row.records:
                record.token = tokens[record.step - 1] if record.step <= len(tokens) else None
        if tokenizer is not None:
            add_text(self.trace, tokenizer)

    # -- records ----------------------------------------------------------------------------------------------------

    def _active(self, input_ids: Tensor) -> list[int]:
        """Return the rows that had not ended before this step; the host waits for them."""
        ended = self.ended.before(input_ids)
        over = [False] * len(input_ids) if ended is None else ended.tolist()
        return [row for row, has_ended in enumerate(over) if not has_ended]

    def _number(self, input_ids: Tensor) -> int:
        """Return the number of the step that follows these tokens, from 1."""
        return input_ids.shape[1] - self.ended.prompt_length + 1

    def _of_scores(self, input_ids: Tensor, base: Tensor, scores: Tensor, other: Tensor | None) -> StepRecord:
        """Return the record of one step, with distributions over the row's plausible set."""
        outside = ~scores.isfinite()
        size = int((~outside).sum())
        before, after = (x.masked_fill(outside, -torch.inf).softmax(-1) for x in (base.float(), scores.float()))
        order = with_favorite(after.topk(min(size, self._candidates)).indices, before.argmax())
        contrasted = (
            None if other is None else other.float().masked_fill(outside, -torch.inf).softmax(-1)[order].tolist()
        )
        return StepRecord(
            step=self._number(input_ids),
            token=None,
            ids=order.tolist(),
            base=before[order].tolist(),
            vision=contrasted,
            final=after[order].tolist(),
            plausible_tokens=size,
        )

    def _of_detail(self, input_ids: Tensor, detail: RowDetail, states: VisionStates) -> StepRecord:
        """Return the record of one step of ReVisiT, with the vision token that it selected."""
        final = detail.final.softmax(-1)
        best = final.argsort(descending=True, stable=True)[: self._candidates]
        order = with_favorite(best, detail.base.argmax())
        record = StepRecord(
            step=self._number(input_ids),
            token=None,
            ids=detail.ids[order].tolist(),
            base=detail.base.exp()[order].tolist(),
            vision=None,
            final=final[order].tolist(),
            plausible_tokens=len(detail.ids),
        )
        if detail.applied and detail.divergences is not None:
            record.vision = detail.vision.exp()[order].tolist()
            record.layer, record.vision_token = states.layer_and_token(detail.state)
            record.divergence = float(detail.divergences[detail.state])
            record.divergences = states.by_layer_and_token(detail.divergences.float().cpu())
            record.weight = detail.weight
        return record


def unusable_rows(base: Tensor, scores: Tensor) -> Tensor | None:
    """Return the rows in which a method left no token or returned NaN, (rows,); on a CPU, None if there are none."""
    usable = scores.amax(-1) > -torch.inf  # false with any NaN
    if usable.is_cpu and bool(usable.all()):
        return None
    return usable < (base.amax(-1) > -torch.inf).to(usable.device)


def with_favorite(order: Tensor, favorite: Tensor) -> Tensor:
    """Return the best candidates, with the model's own favorite in place of the last, but not of the best, if it is not among them."""
    return order if bool((order == favorite).any()) else torch.cat([order[: max(1, len(order) - 1)], favorite[None]])


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the values of many small tensors of one shape, read from the device at once; None stays None."""
    known = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack([tensor.to(known[0].device) for tensor in known]).tolist() if known else ())
    return [None if tensor is None else next(values) for tensor in tensors]
