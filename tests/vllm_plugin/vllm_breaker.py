"""A worker extension (`--worker-extension-cls`) that makes the steps of requests with a certain alpha fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from revisit.vllm.states import Row
from revisit.vllm.worker import Worker

BREAKS = 0.123
take_step = Worker._take_step


def broken(self: Worker, logits: Any, group: Sequence[Row]) -> None:
    if group[0].request.group.settings.rule.alpha == BREAKS:
        raise ArithmeticError("a test breaks this step")
    take_step(self, logits, group)


Worker._take_step = broken  # type: ignore[method-assign]


class Breaker:
    """Imported by vLLM in every worker, which loads this module."""
