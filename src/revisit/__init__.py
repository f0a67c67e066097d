"""Decoding methods that reduce object hallucination in vision-language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers. At run time, names are imported on first use, and the table in revisit/methods lists the classes of methods.
if TYPE_CHECKING:
    from revisit import methods as methods
    from revisit.decoding.generate import generate as generate
    from revisit.decoding.method import Method as Method
    from revisit.decoding.method import MethodLike as MethodLike
    from revisit.decoding.method import StepResult as StepResult
    from revisit.decoding.trace import Trace as Trace
    from revisit.errors import RevisitError as RevisitError
    from revisit.eval.benchmarks.base import Benchmark as Benchmark
    from revisit.eval.log import Log as Log
    from revisit.eval.log import read_logs as read_logs
    from revisit.eval.run import evaluate as evaluate
    from revisit.explain.ask import ExplainedAnswer as ExplainedAnswer
    from revisit.explain.ask import ask as ask
    from revisit.explain.ask import ask_many as ask_many
    from revisit.explain.captions import read_checks as read_checks
    from revisit.explain.check import check as check
    from revisit.explain.check import check_many as check_many
    from revisit.explain.checked import Check as Check
    from revisit.explain.lens import Lens as Lens
    from revisit.explain.lens import lens as lens
    from revisit.io.images import open_image as open_image
    from revisit.methods.revisit import ReVisiT as ReVisiT
    from revisit.models.loading import load as load
    from revisit.models.loading import unload as unload
    from revisit.models.outputs import generated_text as generated_text
    from revisit.models.prompts import prepare as prepare
    from revisit.step.choice import refine_logits as refine_logits

__version__ = "0.3.0"

# module -> public names; `import revisit` imports none of them
_PUBLIC = {
    "revisit.decoding.generate": ("generate",),
    "revisit.decoding.method": ("Method", "MethodLike", "StepResult"),
    "revisit.decoding.trace": ("Trace",),
    "revisit.errors": ("RevisitError",),
    "revisit.eval.benchmarks.base": ("Benchmark",),
    "revisit.eval.log": ("Log", "read_logs"),
    "revisit.eval.run": ("evaluate",),
    "revisit.explain.ask": ("ExplainedAnswer", "ask", "ask_many"),
    "revisit.explain.captions": ("read_checks",),
    "revisit.explain.check": ("check", "check_many"),
    "revisit.explain.checked": ("Check",),
    "revisit.explain.lens": ("Lens", "lens"),
    "revisit.io.images": ("open_image",),
    "revisit.models.loading": ("load", "unload"),
    "revisit.models.outputs": ("generated_text",),
    "revisit.models.prompts": ("prepare",),
    "revisit.step.choice": ("refine_logits",),
}


def _modules() -> dict[str, str]:
    """Return the module of every public name, including the classes of methods such as VCD."""
    methods = (entry.split(":") for entry in importlib.import_module("revisit.methods").BUILT_IN.values())
    return {cls: module for module, cls in methods} | {name: module for module in _PUBLIC for name in _PUBLIC[module]}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return importlib.import_module("revisit.methods")
    modules = _modules()
    if name == "__all__":
        return sorted({*modules, "methods"})
    if name not in modules:
        raise AttributeError(f"module 'revisit' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(modules[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*_modules(), "methods", "__version__"})
