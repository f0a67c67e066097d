"""The public names, and what importing the package loads."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

import revisit
from revisit.decoding.method import METHODS
from revisit.eval.benchmarks.base import BENCHMARKS
from revisit.registry import Registry

HEAVY = ("torch", "transformers", "numpy", "PIL", "nltk", "scipy", "matplotlib", "pandas", "fastapi", "rich.progress")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import revisit",
        "import revisit.cli.main",
        "import revisit.models.families",
        "from revisit import methods; methods.names()",
    ],
)
def test_import_is_light(statement: str) -> None:
    assert not loaded_after(statement) & set(HEAVY)


def test_public_names() -> None:
    assert {"Method", "ReVisiT", "RevisitError", "Trace", "generate", "load"} <= set(revisit.__all__)
    for name in revisit.__all__:
        assert getattr(revisit, name) is not None
    assert callable(revisit.generate)  # not the module of a similar name


def test_methods_are_public_by_their_class_names() -> None:
    for name in METHODS.built_in:
        cls = METHODS.find(name)
        assert cls.name == name
        assert getattr(revisit, cls.__name__) is cls
        assert cls.__name__ in dir(revisit)
    with pytest.raises(AttributeError, match="Contrastive"):
        _ = revisit.Contrastive


@pytest.mark.parametrize("registry", [METHODS, BENCHMARKS], ids=lambda registry: registry.kind)
def test_every_named_class_is_in_the_table(registry: Registry[Any]) -> None:
    package = import_module(registry.package)
    modules = [import_module(f"{registry.package}.{found.name}") for found in iter_modules(package.__path__)]
    classes = {cls for module in modules for cls in vars(module).values() if isinstance(cls, type)}
    named = {cls for cls in classes if issubclass(cls, registry.base) and "name" in vars(cls)}
    assert {cls.name: f"{cls.__module__}:{cls.__name__}" for cls in named} == registry.built_in
