"""Results of the official scorers for our own inputs; see tests/data/golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "golden"


def golden(name: str) -> Any:
    """Read a golden file."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
