"""Every decoding method by name; a method's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from revisit.decoding.method import Method, parse_settings
from revisit.errors import unknown

# registry name -> (module, class)
REGISTRY = {
    "greedy": ("revisit.decoding.plain", "Plain"),
    "revisit": ("revisit.methods.revisit", "ReVisiT"),
    "dola": ("revisit.methods.dola", "DoLa"),
    "vcd": ("revisit.methods.vcd", "VCD"),
    "m3id": ("revisit.methods.m3id", "M3ID"),
    "code": ("revisit.methods.code", "CODE"),
    "deco": ("revisit.methods.deco", "DeCo"),
    "icd": ("revisit.methods.icd", "ICD"),
    "pai": ("revisit.methods.pai", "PAI"),
    "sid": ("revisit.methods.sid", "SID"),
    "ritual": ("revisit.methods.ritual", "RITUAL"),
    "avisc": ("revisit.methods.avisc", "AvisC"),
    "apc": ("revisit.methods.apc", "APC"),
    "chain": ("revisit.methods.chain", "Chain"),
}


def names() -> list[str]:
    """All method names, plain decoding first."""
    return list(REGISTRY)


def find(name: str) -> type[Method]:
    """The class of a method."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    module, cls = REGISTRY[name]
    found: type[Method] = getattr(importlib.import_module(module), cls)
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
