"""Decoding that keeps vision-language models honest about what they see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revisit.benchmarks.base import Benchmark
    from revisit.decoding.loop import generate
    from revisit.decoding.method import Method
    from revisit.decoding.trace import Trace
    from revisit.errors import RevisitError
    from revisit.explain.ask import Answer, ask
    from revisit.explain.check import Check, check, check_many
    from revisit.methods.apc import APC
    from revisit.methods.avisc import AvisC
    from revisit.methods.chain import Chain
    from revisit.methods.code import CODE
    from revisit.methods.deco import DeCo
    from revisit.methods.dola import DoLa
    from revisit.methods.icd import ICD
    from revisit.methods.m3id import M3ID
    from revisit.methods.pai import PAI
    from revisit.methods.revisit import ReVisiT
    from revisit.methods.ritual import RITUAL
    from revisit.methods.sid import SID
    from revisit.methods.vcd import VCD
    from revisit.models.images import open_image
    from revisit.models.loading import load
    from revisit.models.prompts import answers, prepare

__version__ = "0.1.0"

# public name -> module; imported on first use, so that `import revisit` stays light
_WHERE = {
    "APC": "revisit.methods.apc",
    "Answer": "revisit.explain.ask",
    "AvisC": "revisit.methods.avisc",
    "Benchmark": "revisit.benchmarks.base",
    "CODE": "revisit.methods.code",
    "Chain": "revisit.methods.chain",
    "Check": "revisit.explain.check",
    "DeCo": "revisit.methods.deco",
    "DoLa": "revisit.methods.dola",
    "ICD": "revisit.methods.icd",
    "M3ID": "revisit.methods.m3id",
    "Method": "revisit.decoding.method",
    "PAI": "revisit.methods.pai",
    "RITUAL": "revisit.methods.ritual",
    "SID": "revisit.methods.sid",
    "VCD": "revisit.methods.vcd",
    "ReVisiT": "revisit.methods.revisit",
    "RevisitError": "revisit.errors",
    "Trace": "revisit.decoding.trace",
    "answers": "revisit.models.prompts",
    "ask": "revisit.explain.ask",
    "check": "revisit.explain.check",
    "check_many": "revisit.explain.check",
    "generate": "revisit.decoding.loop",
    "load": "revisit.models.loading",
    "open_image": "revisit.models.images",
    "prepare": "revisit.models.prompts",
}

__all__ = [
    "APC",
    "CODE",
    "ICD",
    "M3ID",
    "PAI",
    "RITUAL",
    "SID",
    "VCD",
    "Answer",
    "AvisC",
    "Benchmark",
    "Chain",
    "Check",
    "DeCo",
    "DoLa",
    "Method",
    "ReVisiT",
    "RevisitError",
    "Trace",
    "answers",
    "ask",
    "check",
    "check_many",
    "generate",
    "load",
    "open_image",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name == "methods":  # the package of that name: revisit.methods.get("vcd") needs no import of its own
        return importlib.import_module("revisit.methods")
    if name not in _WHERE:
        raise AttributeError(f"module 'revisit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
