"""NLTK's recorded output for the sentences of the tests, so that CHAIR is tested without NLTK's data.

Tests that use the fixture `nltk_data` run with NLTK itself where its data is found (NLTK_DATA, NLTK's own folders, or beside
the repository). With REVISIT_RECORD=1 in the environment the record is written anew.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

import pytest

from revisit.eval.benchmarks import language

_records: list[dict[str, Any]] = []
FILE = Path(__file__).parent / "data" / "golden" / "language.json"


def provide(monkeypatch: pytest.MonkeyPatch, beside: Path) -> None:
    """Make `language` use NLTK or the record."""
    if beside.is_dir():
        monkeypatch.setenv("NLTK_DATA", str(beside))
    record = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {"tagged": {}, "lemmas": {}}
    if not language.missing_packages():
        if os.environ.get("REVISIT_RECORD") == "1":
            _listen(monkeypatch, record)
        return

    def tagged(text: str) -> list[tuple[str, str]]:
        return [(token, tag) for token, tag in _known(record["tagged"], text)]

    def lemma(word: str, pos: str) -> str:
        return str(_known(record["lemmas"], f"{word}/{pos}"))

    monkeypatch.setattr(language, "missing_packages", list)
    monkeypatch.setattr(language, "version", lambda: "Words as recorded from NLTK.")
    monkeypatch.setattr(language, "tagged", tagged)
    monkeypatch.setattr(language, "lemma", lemma)


def _known(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        pytest.skip("needs NLTK's data (`revisit data get nltk`): this text is not in tests/data/golden/language.json")
    return record[key]


def _listen(monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> None:
    """Record NLTK's output, and write it when the process ends."""
    tagged, lemma = language.tagged, language.lemma

    def listen_tagged(text: str) -> list[tuple[str, str]]:
        record["tagged"][text] = tagged(text)
        return tagged(text)

    def listen_lemma(word: str, pos: str) -> str:
        record["lemmas"][f"{word}/{pos}"] = lemma(word, pos)
        return lemma(word, pos)

    monkeypatch.setattr(language, "tagged", listen_tagged)
    monkeypatch.setattr(language, "lemma", listen_lemma)
    if not _records:
        atexit.register(_save)
    _records.append(record)


def _save() -> None:
    record = {kind: {k: v for one in _records for k, v in one[kind].items()} for kind in ("tagged", "lemmas")}
    lines = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(value)}" for key, value in sorted(entries.items())
        )
        + "\n }"
        for kind, entries in record.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
