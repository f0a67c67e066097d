"""Every decoding method by name; a method's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from revisit.errors import unknown
from revisit.methods.base import Method, parse_settings

# registry name -> (module, class)
REGISTRY = {
    "greedy": ("plain", "Plain"),
    "revisit": ("revisit", "ReVisiT"),
    "dola": ("dola", "DoLa"),
    "vcd": ("vcd", "VCD"),
    "m3id": ("m3id", "M3ID"),
    "code": ("code", "CODE"),
    "deco": ("deco", "DeCo"),
    "icd": ("icd", "ICD"),
    "pai": ("pai", "PAI"),
    "sid": ("sid", "SID"),
    "ritual": ("ritual", "RITUAL"),
    "avisc": ("avisc", "AvisC"),
    "apc": ("apc", "APC"),
    "chain": ("chain", "Chain"),
}


def names() -> list[str]:
    """All method names, plain decoding first."""
    return list(REGISTRY)


def find(name: str) -> type[Method]:
    """The class of a method."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    module, cls = REGISTRY[name]
    found: type[Method] = getattr(importlib.import_module(f"revisit.methods.{module}"), cls)
    return found


def get(name: str, **settings: Any) -> Method:
    """A method with the given settings; values may be strings, as typed on a command line."""
    cls = find(name)
    return cls(**parse_settings(cls, settings))


def recommended(name: str, model: Any, **settings: Any) -> Method:
    """A method with what is recommended for a loaded model, where the method knows that, and the given settings."""
    cls = find(name)
    parsed = parse_settings(cls, settings)
    made: Method = cls.recommended(model, **parsed) if hasattr(cls, "recommended") else cls(**parsed)
    return made
