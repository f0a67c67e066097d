"""Where the published data and the golden cases are; tests that need them say so when they are absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published data files."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"published data files are not at {path}")
    return path


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Reads a golden file by name."""

    def read(name: str) -> Any:
        path = SHARED / "golden" / f"{name}.json"
        if not path.exists():
            pytest.skip(f"golden cases are not at {path}")
        return json.loads(path.read_text("utf-8"))

    return read


@pytest.fixture
def nltk_data(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NLTK data as a user would point to it."""
    path = shared_data / "nltk_data"
    monkeypatch.setenv("NLTK_DATA", str(path))
    return path
