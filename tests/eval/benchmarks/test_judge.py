"""The judge client against a stub server: caching, resuming, retrying, refusing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from revisit.errors import RevisitError
from revisit.eval.benchmarks import judge
from revisit.eval.benchmarks.judge import Judge


def test_replies_are_kept_and_a_cut_line_is_repaired(stub_judge, tmp_path: Path):
    cache = tmp_path / "deep/judge.jsonl"
    stub_judge.replies = ["one", "two"]
    judge = Judge(stub_judge.url, "m", cache)
    assert [judge.ask("a"), judge.ask("a"), judge.ask("b")] == ["one", "one", "two"]
    assert [json.loads(line)["reply"] for line in cache.read_text().splitlines()] == ["one", "two"]
    cache.write_bytes(cache.read_bytes()[:-5])
    stub_judge.replies = ["two again"]
    again = Judge(stub_judge.url, "m", cache)
    assert [again.ask("a"), again.ask("b")] == ["one", "two again"]
    assert len(cache.read_text().splitlines()) == 2
    assert stub_judge.prompts == ["a", "b", "b"]


def test_another_model_or_temperature_asks_again(stub_judge, tmp_path: Path):
    cache = tmp_path / "judge.jsonl"
    stub_judge.replies = ["1", "2", "3"]
    asked = [Judge(stub_judge.url, m, cache, temperature=t).ask("q") for m, t in (("a", 0), ("b", 0), ("a", 0.2))]
    assert asked == ["1", "2", "3"]


def test_busy_server_is_asked_again(stub_judge):
    stub_judge.replies = [503, 429, "fine"]
    assert Judge(stub_judge.url, "m").ask("q") == "fine"


def test_failures_raise(stub_judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stub_judge.replies = [401]
    with pytest.raises(RevisitError, match="status 401 no"):
        Judge(stub_judge.url, "m").ask("q")
    monkeypatch.setattr(judge, "ATTEMPTS", 2)
    stub_judge.replies = [500, 500]
    with pytest.raises(RevisitError, match="did not answer after 2 attempts"):
        Judge(stub_judge.url, "m").ask("q")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(RevisitError, match=r"bad\.jsonl line 1"):
        Judge(stub_judge.url, "m", bad)


def test_replies_that_are_no_completion_raise(stub_judge, monkeypatch: pytest.MonkeyPatch):
    stub_judge.replies = [{"error": "not me"}, {"choices": [{"message": {"content": None}}]}]
    with pytest.raises(RevisitError, match="did not return a chat completion"):
        Judge(stub_judge.url, "m").ask("q")
    with pytest.raises(RevisitError, match="without text"):
        Judge(stub_judge.url, "m").ask("q")
    monkeypatch.setattr(judge, "ATTEMPTS", 1)
    with pytest.raises(RevisitError, match=r"did not answer after 1 attempts \("):
        Judge("http://127.0.0.1:9/v1", "m").ask("q")


@pytest.mark.parametrize("settings", [{"url": "localhost"}, {"model": ""}])
def test_settings_are_checked(settings):
    with pytest.raises(RevisitError):
        Judge(**({"url": "http://localhost", "model": "m"} | settings))


@pytest.mark.parametrize("content", [b'{"precious": "data"}', b'{"a": 1}\n{"precious', b"\xff\xfe\n", b'{"key": 1}\n'])
def test_a_file_that_is_no_cache_is_left_as_it_is(tmp_path: Path, content: bytes):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(RevisitError, match=r"mine\.json"):
        Judge("http://127.0.0.1:9/v1", "m", path)
    assert path.read_bytes() == content
    with pytest.raises(RevisitError, match="cannot be read"):
        Judge("http://127.0.0.1:9/v1", "m", tmp_path)
