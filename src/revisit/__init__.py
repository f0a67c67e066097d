"""Decoding that keeps vision-language models honest about what they see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers know; at run time the methods' classes are found in their package
    from revisit import methods as methods
    from revisit.benchmarks.base import Benchmark as Benchmark
    from revisit.decoding.loop import generate as generate
    from revisit.decoding.method import Method as Method
    from revisit.decoding.trace import Trace as Trace
    from revisit.errors import RevisitError as RevisitError
    from revisit.explain.ask import Answer as Answer
    from revisit.explain.ask import ask as ask
    from revisit.explain.ask import ask_many as ask_many
    from revisit.explain.check import Check as Check
    from revisit.explain.check import check as check
    from revisit.explain.check import check_many as check_many
    from revisit.methods.apc import APC as APC
    from revisit.methods.avisc import AvisC as AvisC
    from revisit.methods.chain import Chain as Chain
    from revisit.methods.code import CODE as CODE
    from revisit.methods.deco import DeCo as DeCo
    from revisit.methods.dola import DoLa as DoLa
    from revisit.methods.flb import FLB as FLB
    from revisit.methods.icd import ICD as ICD
    from revisit.methods.m3id import M3ID as M3ID
    from revisit.methods.memvr import MemVR as MemVR
    from revisit.methods.middle_layers import MiddleLayers as MiddleLayers
    from revisit.methods.only import ONLY as ONLY
    from revisit.methods.opera import OPERA as OPERA
    from revisit.methods.pai import PAI as PAI
    from revisit.methods.revisit import ReVisiT as ReVisiT
    from revisit.methods.ritual import RITUAL as RITUAL
    from revisit.methods.sadt import SADT as SADT
    from revisit.methods.sid import SID as SID
    from revisit.methods.vaf import VAF as VAF
    from revisit.methods.vcd import VCD as VCD
    from revisit.methods.vista import VISTA as VISTA
    from revisit.models.images import open_image as open_image
    from revisit.models.loading import load as load
    from revisit.models.prompts import answers as answers
    from revisit.models.prompts import prepare as prepare
    from revisit.registry import Registry

__version__ = "0.2.0"

# public name -> module; imported on first use, so that `import revisit` stays light
_WHERE = {
    "Answer": "revisit.explain.ask",
    "Benchmark": "revisit.benchmarks.base",
    "Check": "revisit.explain.check",
    "Method": "revisit.decoding.method",
    "RevisitError": "revisit.errors",
    "Trace": "revisit.decoding.trace",
    "answers": "revisit.models.prompts",
    "ask": "revisit.explain.ask",
    "ask_many": "revisit.explain.ask",
    "check": "revisit.explain.check",
    "check_many": "revisit.explain.check",
    "generate": "revisit.decoding.loop",
    "load": "revisit.models.loading",
    "open_image": "revisit.models.images",
    "prepare": "revisit.models.prompts",
}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return importlib.import_module("revisit.methods")
    if name == "__all__":
        return [entry for entry in __dir__() if not entry.startswith("_")]
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    else:
        value = _methods().by_class_name(name) if name[:1].isupper() else None
        if value is None:
            raise AttributeError(f"module 'revisit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    classes = (cls.__name__ for cls in _methods().built_in().values())
    return sorted({*_WHERE, *classes, "methods", "__version__"})


def _methods() -> Registry[Method]:
    from revisit.decoding.method import METHODS

    return METHODS
