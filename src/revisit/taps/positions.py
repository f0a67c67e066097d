"""The position state that Qwen-VL and its relatives keep on the model object between forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

STATE = "rope_deltas"  # (rows, 1): how far positions are ahead of, or behind, the number of tokens


@contextlib.contextmanager
def saved_positions(model: Any, *, clear: bool = False) -> Iterator[None]:
    """Give back the position state as it was; `clear` starts without any."""
    kept = [(module, getattr(module, STATE)) for module in model.modules() if hasattr(module, STATE)]
    try:
        if clear:
            for module, _ in kept:
                setattr(module, STATE, None)
        yield
    finally:
        for module, deltas in kept:
            setattr(module, STATE, deltas)
