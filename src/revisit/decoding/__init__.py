"""How a decoding method meets transformers' generate()."""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: the methods' settings need neither torch nor transformers.
_WHERE = {"generate": "loop", "decode": "loop", "Run": "run", "Method": "method", "Trace": "trace"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'revisit.decoding' has no attribute {name!r}")
    return getattr(importlib.import_module(f"revisit.decoding.{_WHERE[name]}"), name)
