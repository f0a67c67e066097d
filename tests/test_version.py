"""The version stands in one place."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import revisit

ROOT = Path(__file__).parents[1]


def test_the_installed_package_has_the_version_of_the_source() -> None:
    assert version("revisit-decoding") == revisit.__version__


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_project_file_takes_it_from_the_source() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "revisit.__version__"}


def test_no_other_file_repeats_it() -> None:
    for name in ("CITATION.cff", "setup.py", "README.md"):
        assert revisit.__version__ not in (ROOT / name).read_text("utf-8"), name
