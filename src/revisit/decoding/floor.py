"""Withhold names with little support in one call of generate(): the setting `floor` of every method."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.decoding.row_guard import RowGuard, answer_of
from revisit.errors import RevisitError
from revisit.forward.support import check_layer, name_support
from revisit.models.spelling import spelling_of
from revisit.models.thoughts import thoughts_of

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.decoding.recorder import Recorder
    from revisit.decoding.trace import RowTrace, StepRecord
    from revisit.forward.passes import Passes
    from revisit.forward.prompt import Prompt


def floor_of(method: Method, prompt: Prompt, passes: Passes, recorder: Recorder) -> Floor | None:
    """Return what withholds names in this call; None without a floor or without images."""
    if any(link.floor for link in method.links):
        raise RevisitError("Chain: floor applies to the whole chain; set it there, not in one of its methods.")
    return Floor(method, prompt, passes, recorder) if method.floor and any(prompt.vision_counts()) else None


class Floor:
    """Withhold names with little support from the answers of one call, after the method and before all other processors."""

    def __init__(self, method: Method, prompt: Prompt, passes: Passes, recorder: Recorder) -> None:
        self.method, self.prompt, self.passes, self.recorder = method, prompt, passes, recorder
        self._start = prompt.ids.shape[1]
        self._thoughts = thoughts_of(prompt.model, prompt.processor)
        self._opened = [self._thoughts is not None and self._thoughts.open_at_end(row) for row in prompt.ids.tolist()]
        self._layer = check_layer(prompt.model, prompt.parts.depth, method.floor_layer)
        self._capture = passes.capture((self._layer,))
        self._blocked: list[Tensor] = []  # of each row: the tokens that may not come next

    @cached_property
    def rows(self) -> list[RowGuard | None]:
        """What withholds names from each row; None for rows without an image."""
        head = self._capture.head(self.passes.raw)
        spelling = spelling_of(self.prompt.processor.tokenizer, self.method.names)
        rows: list[RowGuard | None] = []
        for item in self._capture.items:
            support = name_support(head, item.by_layer[self._layer], spelling) if item.tokens else None
            for _ in range(self.prompt.rows_per_item):
                rows.append(None if support is None else RowGuard(spelling, support, self.method.floor))
                if support is not None and (trace := self._trace(len(rows) - 1)) is not None:
                    trace.floor, trace.support = self.method.floor, support
        return rows

    def _trace(self, row: int) -> RowTrace | None:
        return None if self.recorder.trace is None else self.recorder.trace.rows[row]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores without the names that these texts may not continue with.  (rows, length), (rows, V) -> (rows, V)"""
        tokens, ended = input_ids[:, self._start :].tolist(), self.passes.ended
        over = [False] * len(tokens) if ended is None else ended.tolist()
        self._blocked = []
        for number, (guard, row) in enumerate(zip(self.rows, tokens, strict=True)):
            answer = None if guard is None or over[number] else answer_of(self._thoughts, row, self._opened[number])
            nothing = torch.empty(0, dtype=torch.long)
            self._blocked.append(nothing if guard is None or answer is None else guard.blocked(answer))
        kept = self.without(scores)
        for number, best in enumerate(kept.amax(-1).tolist() if self.recorder.trace is not None else ()):
            values = scores[number, self._blocked[number]].cpu()
            if count := int((values > best).sum()):
                order = values.argsort(descending=True)[:count]
                self._note(number, self._blocked[number][order].tolist(), len(tokens[number]) + 1)
        return kept

    def without(self, scores: Tensor) -> Tensor:
        """Return scores in which the blocked tokens of this step are impossible."""
        kept = scores.clone()
        for row, blocked in zip(kept, self._blocked, strict=True):
            row[blocked.to(row.device)] = -torch.inf
        return kept

    def count(self, empty: Tensor, overruled: Tensor) -> None:
        """Count the rows that were decoded by the model's own distribution, and those where that left withheld names only."""
        rows = [] if self.recorder.trace is None else self.recorder.trace.rows
        for row, is_empty, is_overruled in zip(rows, empty.tolist(), overruled.tolist(), strict=False):
            row.exhausted += is_empty
            row.overruled += is_overruled

    def _note(self, number: int, tokens: list[int], step: int) -> None:
        """Record the withheld tokens that were likelier than every other one, the likeliest first."""
        trace, guard = self._trace(number), self.rows[number]
        assert trace is not None
        assert guard is not None
        trace.prevented += [(step, category) for category in sorted(guard.categories(tokens[:1]))]
        trace.lowest_floor = max(trace.lowest_floor, guard.lowest_floor(tokens))
        if trace.records and trace.records[-1].step == step:
            trace.records[-1] = without_candidates(trace.records[-1], {*tokens})


def without_candidates(record: StepRecord, tokens: set[int]) -> StepRecord:
    """Return the record of a step in which these candidates are impossible, the likeliest of the others first."""
    left = sum(value for token, value in zip(record.ids, record.final, strict=True) if token not in tokens)
    final = [
        0.0 if token in tokens else value / (left or 1) for token, value in zip(record.ids, record.final, strict=True)
    ]
    order = sorted(range(len(final)), key=lambda place: -final[place])
    vision = None if record.vision is None else [record.vision[place] for place in order]
    ids = [record.ids[place] for place in order]
    base, final = ([values[place] for place in order] for values in (record.base, final))
    return replace(record, ids=ids, base=base, vision=vision, final=final)
