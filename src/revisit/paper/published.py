"""The paper's own figures, shipped as data so that a report can print them beside ours; they are never ours."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

NAMES = {
    "greedy": "Greedy",
    "dola": "DoLa",
    "vcd": "VCD",
    "m3id": "M3ID",
    "code": "CODE",
    "sid": "SID",
    "revisit": "ReVisiT",
}


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("revisit.paper").joinpath("data/published.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def source() -> str:
    """Where the figures were printed."""
    return str(_data()["source"])


def table(name: str) -> Any:
    """One of the paper's tables: `chair`, `pope_full`, `ablation`, `projection`, …"""
    return _data()["tables"][name]


def names() -> tuple[str, ...]:
    """The tables there are."""
    return tuple(_data()["tables"])
