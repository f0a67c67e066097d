"""`--data hub`: fetched once into the cache folder, then read from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from revisit.benchmarks.io import hub
from revisit.errors import RevisitError
from revisit.evaluation.config import resolve_data


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the hub; each request makes the folder it would make."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    requests: list[Any] = []

    def get(benchmark: str, folder: Path, source: str | None, split: str | None, limit: int | None) -> None:
        if not folder.is_dir():
            requests.append((benchmark, source, split, limit))
            folder.mkdir(parents=True)
            (folder / "source.json").write_text(json.dumps({"benchmark": benchmark}))

    monkeypatch.setattr(hub, "get", get)
    return requests


def test_fetched_once(fetched: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = resolve_data("hub", "pope", 5)
    assert first == tmp_path / "cache/hub-pope"
    assert "Fetching pope from lmms-lab/POPE" in caplog.text
    caplog.clear()
    assert resolve_data("hub", "pope") == first
    assert caplog.text == ""
    other = resolve_data("hub:me/POPE", "pope")
    assert other != first
    assert other.parent == first.parent
    assert fetched == [("pope", None, None, None), ("pope", "me/POPE", None, None)]


def test_a_large_dataset_is_fetched_as_far_as_needed(fetched: list[Any], tmp_path: Path) -> None:
    assert resolve_data("hub", "vqav2", 50) == tmp_path / "cache/hub-vqav2-first50"
    assert resolve_data("hub", "vqav2") == tmp_path / "cache/hub-vqav2"
    assert resolve_data("hub", "vqav2", 60) == tmp_path / "cache/hub-vqav2"  # the whole one serves any limit
    assert fetched == [("vqav2", None, None, 50), ("vqav2", None, None, None)]


def test_refused(fetched: list[Any]) -> None:
    with pytest.raises(RevisitError, match="revisit data get chair DIR"):
        resolve_data("hub", "chair")
    with pytest.raises(RevisitError, match="revisit data get BENCHMARK DIR"):
        resolve_data("hub")
    assert fetched == []
