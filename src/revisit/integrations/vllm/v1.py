"""The adapter for vLLM's V1 model runner, whose processors follow requests by their row in the batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

from revisit.integrations.vllm import check_model, check_version
from revisit.integrations.vllm.request import admit, parse
from revisit.integrations.vllm.states import RequestStates
from revisit.integrations.vllm.tap import Row, Tap, tap_of

# A request's states hang on its own sampling parameters in the worker: the runner keeps that object for as long as the
# request lives, also while it is preempted or waits outside the batch, and drops it when the request ends.
ATTRIBUTE = "_revisit_states"


class V1(LogitsProcessor):
    """`--logits-processors revisit.integrations.vllm:V1`."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        check_version()
        check_model(vllm_config)
        self.config = vllm_config
        self.rows: dict[int, RequestStates] = {}
        self._tap: Tap | None = None

    @property
    def tap(self) -> Tap:
        if self._tap is None:
            self._tap = tap_of(self.config)
        return self._tap

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        admit(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: called before every forward."""
        if batch_update is not None:
            self._follow(batch_update)
        if self._tap is not None:
            self._tap.listening = bool(self.rows)

    def _follow(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self.rows.pop(row, None)
        for row, params, prompt_ids, _ in update.added:
            self.rows.pop(row, None)
            method = parse(params.extra_args)
            if method is None:
                continue
            states = getattr(params, ATTRIBUTE, None)
            if states is None:
                states = self.tap.open(method, prompt_ids or [])
                setattr(params, ATTRIBUTE, states)
            self.rows[row] = states
        for source, target, direction in update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = displaced

    def apply(self, logits: Tensor) -> Tensor:
        if not self.rows:
            return logits
        return self.tap.refine(logits, [Row(row, row, states) for row, states in sorted(self.rows.items())])
