"""NLTK's recorded output for the sentences of the tests, with which CHAIR is tested without NLTK's data.

Tests with the fixture `nltk_data` use NLTK itself if its data is found (NLTK_DATA, NLTK's folders, or next to the repository). With
REVISIT_RECORD=1 in the environment, its output is added to the record.
"""

from __future__ import annotations

import atexit
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from revisit.eval.benchmarks import language

FILE = Path(__file__).parent / "data" / "golden" / "language.json"


def provide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make `language` use NLTK, with its data in `folder`, or the record."""
    if folder.is_dir():
        monkeypatch.setenv("NLTK_DATA", str(folder))
    tagged, lemma = language.tagged, language.lemma
    if language.missing_packages():
        monkeypatch.setattr(language, "missing_packages", list)
        monkeypatch.setattr(language, "version", lambda: "Words as recorded from NLTK.")
        monkeypatch.setattr(language, "tagged", lambda text: [tuple(pair) for pair in _recorded("tagged", text)])
        monkeypatch.setattr(language, "lemma", lambda word, pos: _recorded("lemmas", f"{word}/{pos}"))
    elif os.environ.get("REVISIT_RECORD") == "1":
        _save_at_exit()
        monkeypatch.setattr(language, "tagged", lambda text: _add("tagged", text, tagged(text)))
        monkeypatch.setattr(language, "lemma", lambda word, pos: _add("lemmas", f"{word}/{pos}", lemma(word, pos)))


@cache
def _record() -> dict[str, dict[str, Any]]:
    return dict(json.loads(FILE.read_text("utf-8")))


def _recorded(kind: str, key: str) -> Any:
    if key not in _record()[kind]:
        pytest.skip("needs NLTK's data (`revisit data get nltk`): this text is not in tests/data/golden/language.json")
    return _record()[kind][key]


def _add(kind: str, key: str, value: Any) -> Any:
    _record()[kind][key] = value
    return value


@cache
def _save_at_exit() -> None:
    atexit.register(_save)


def _save() -> None:
    lines = []
    for kind, entries in _record().items():
        rows = [f"  {json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in sorted(entries.items())]
        lines.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(rows) + "\n }")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
