"""Decoding methods that reduce object hallucination in vision-language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers. At run time, names are imported on first use, and the classes of methods are found in their package.
if TYPE_CHECKING:
    from revisit import methods as methods
    from revisit.decoding.generate import generate as generate
    from revisit.decoding.method import Method as Method
    from revisit.decoding.method import MethodLike as MethodLike
    from revisit.decoding.trace import Trace as Trace
    from revisit.errors import RevisitError as RevisitError
    from revisit.eval.benchmarks.base import Benchmark as Benchmark
    from revisit.eval.log import Log as Log
    from revisit.eval.log import read_logs as read_logs
    from revisit.eval.run import evaluate as evaluate
    from revisit.explain.ask import Answer as Answer
    from revisit.explain.ask import ask as ask
    from revisit.explain.ask import ask_many as ask_many
    from revisit.explain.check import Check as Check
    from revisit.explain.check import check as check
    from revisit.explain.check import check_many as check_many
    from revisit.explain.lens import Lens as Lens
    from revisit.explain.lens import lens as lens
    from revisit.methods.revisit import ReVisiT as ReVisiT
    from revisit.models.images import open_image as open_image
    from revisit.models.loading import load as load
    from revisit.models.prompts import generated_text as generated_text
    from revisit.models.prompts import prepare as prepare

__version__ = "0.3.0"

# public name -> module; `import revisit` imports none of them
_WHERE = {
    "Answer": "revisit.explain.ask",
    "Benchmark": "revisit.eval.benchmarks.base",
    "Check": "revisit.explain.check",
    "Lens": "revisit.explain.lens",
    "Log": "revisit.eval.log",
    "Method": "revisit.decoding.method",
    "MethodLike": "revisit.decoding.method",
    "RevisitError": "revisit.errors",
    "Trace": "revisit.decoding.trace",
    "ask": "revisit.explain.ask",
    "ask_many": "revisit.explain.ask",
    "check": "revisit.explain.check",
    "check_many": "revisit.explain.check",
    "evaluate": "revisit.eval.run",
    "generate": "revisit.decoding.generate",
    "generated_text": "revisit.models.prompts",
    "lens": "revisit.explain.lens",
    "load": "revisit.models.loading",
    "open_image": "revisit.models.images",
    "prepare": "revisit.models.prompts",
    "read_logs": "revisit.eval.log",
}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return importlib.import_module("revisit.methods")
    if name == "__all__":
        return [entry for entry in __dir__() if not entry.startswith("_")]
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    else:  # the class of a method, such as VCD
        modules = {
            cls: module for module, cls in importlib.import_module("revisit.decoding.method").METHODS.sources.values()
        }
        if name not in modules:
            raise AttributeError(f"module 'revisit' has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    registry = importlib.import_module("revisit.decoding.method").METHODS
    return sorted({*_WHERE, *(cls for _, cls in registry.sources.values()), "methods", "__version__"})
