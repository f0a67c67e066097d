"""Which processor a model was loaded with, so that methods with words in their settings can have them tokenized."""

from __future__ import annotations

import weakref
from typing import Any

_PROCESSORS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def remember(model: Any, processor: Any) -> None:
    """Keep the processor for as long as the model lives."""
    _PROCESSORS[model] = processor


def processor_of(model: Any) -> Any | None:
    """The processor that the model was loaded with by `revisit.load`, or None."""
    return _PROCESSORS.get(model)
