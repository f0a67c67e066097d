"""Inputs that once failed: every run replays them, and a run that finds a new one adds it.

One file per kind of input, one JSON string per line. Images of `chat_requests.data_uri` are written as {image N}.
"""

from __future__ import annotations

import json
from pathlib import Path

from chat_requests import data_uri

FOLDER = Path(__file__).parent / "corpus"
IMAGES = {f"{{image {number}}}": data_uri(number) for number in range(6)}


def recall(kind: str) -> list[bytes]:
    """Return all inputs of a kind."""
    path = FOLDER / f"{kind}.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [_grow(json.loads(line)) for line in lines]


def remember(kind: str, found: bytes) -> None:
    """Add an input that failed, unless it is there."""
    if found in recall(kind):
        return
    with (FOLDER / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(_shrink(found)) + "\n")


def _grow(text: str) -> bytes:
    for name, image in IMAGES.items():
        text = text.replace(name, image)
    return text.encode("latin-1")


def _shrink(found: bytes) -> str:
    text = found.decode("latin-1")  # any bytes
    for name, image in IMAGES.items():
        text = text.replace(image, name)
    return text
