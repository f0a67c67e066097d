"""What `import revisit` may pull in, and what it offers."""

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


def test_import_is_light() -> None:
    listing = "from revisit import methods; [methods.find(name).summary for name in methods.names()]"
    for statement in ("import revisit", "import revisit.cli.main", listing):
        modules = loaded_after(statement)
        assert not [name for name in HEAVY if name in modules], statement


def test_settings_need_no_torch() -> None:
    modules = loaded_after("from revisit import ReVisiT, Trace; ReVisiT.official(alpha=1e-3); Trace()")
    assert "torch" not in modules
    assert "transformers" not in modules


def test_public_names() -> None:
    assert {"Method", "ReVisiT", "RevisitError", "Trace", "generate", "load"} <= set(revisit.__all__)
    for name in revisit.__all__:
        assert getattr(revisit, name) is not None
    assert callable(revisit.generate)  # not the module of a similar name


def test_a_method_in_the_package_is_its_file_and_nothing_else() -> None:
    found = {cls.__name__ for cls in METHODS.built_in().values()}
    assert {"methods", "generate", "VCD", "ReVisiT"} | found <= set(dir(revisit))
    for name in found:
        assert getattr(revisit, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Contrastive'"):
        _ = revisit.Contrastive
