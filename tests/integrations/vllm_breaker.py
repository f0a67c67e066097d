"""A worker extension (`--worker-extension-cls`) that makes the step of some requests fail in the worker: those with this alpha."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from revisit.integrations.vllm.worker import Row, Worker

BREAKS = 0.123
take_step = Worker._take_step


def broken(self: Worker, logits: Any, rule: Any, group: Sequence[Row]) -> None:
    if rule.alpha == BREAKS:
        raise ArithmeticError("a test breaks this step")
    take_step(self, logits, rule, group)


Worker._take_step = broken  # type: ignore[method-assign]


class Breaker:
    """vLLM imports this module for it, in every worker; that is enough."""
