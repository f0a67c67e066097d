"""The public names, and what importing the package loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import revisit
from revisit.decoding.method import METHODS

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
    for name in METHODS.sources:
        cls = METHODS.find(name)
        assert cls.name == name
        assert getattr(revisit, cls.__name__) is cls
        assert cls.__name__ in dir(revisit)
    with pytest.raises(AttributeError, match="Contrastive"):
        _ = revisit.Contrastive
