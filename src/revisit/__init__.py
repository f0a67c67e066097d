"""Decoding that keeps vision-language models honest about what they see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revisit.decoding import generate
    from revisit.errors import RevisitError
    from revisit.methods.revisit import ReVisiT
    from revisit.models.images import open_image
    from revisit.models.loading import load
    from revisit.models.prompts import answers, prepare
    from revisit.trace import Trace

__version__ = "0.1.0"

# public name -> module; imported on first use, so that `import revisit` stays light
_WHERE = {
    "ReVisiT": "revisit.methods.revisit",
    "RevisitError": "revisit.errors",
    "Trace": "revisit.trace",
    "answers": "revisit.models.prompts",
    "generate": "revisit.decoding",
    "load": "revisit.models.loading",
    "open_image": "revisit.models.images",
    "prepare": "revisit.models.prompts",
}

__all__ = ["ReVisiT", "RevisitError", "Trace", "answers", "generate", "load", "open_image", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'revisit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
