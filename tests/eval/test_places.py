"""`--data download`: Hub datasets are fetched once into the cache folder, then read from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from revisit.errors import RevisitError
from revisit.eval.benchmarks.io import data
from revisit.eval.benchmarks.io.places import resolve_data


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the Hub; each request makes the folder it would make."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    requests: list[Any] = []

    def get(benchmark: str, folder: Path, source: str | None, limit: int | None) -> None:
        if not folder.is_dir():
            requests.append((benchmark, source, limit))
            folder.mkdir(parents=True)
            (folder / "source.json").write_text(json.dumps({"benchmark": benchmark}))

    monkeypatch.setattr(data, "get", get)
    return requests


def test_fetched_once(fetched: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = resolve_data("download", "mmmu", 5)
    assert first == tmp_path / "cache/data-mmmu"
    assert "Downloading mmmu from its Hub dataset" in caplog.text
    caplog.clear()
    assert resolve_data("download", "mmmu") == first
    assert caplog.text == ""
    other = resolve_data("download:me/MME", "mme", 5)
    assert other.name.startswith("data-mme-")
    assert other.parent == first.parent
    assert fetched == [("mmmu", None, None), ("mme", "me/MME", None)]


def test_a_missing_folder_raises(fetched: list[Any]) -> None:
    with pytest.raises(RevisitError, match="data folder 'nowhere' does not exist"):
        resolve_data("nowhere", "pope")
    assert fetched == []
