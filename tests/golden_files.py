"""What the official scorers gave for our own inputs; tests/data/golden/README.md says how each file was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "golden"


def golden(name: str) -> Any:
    """A golden file by name."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
