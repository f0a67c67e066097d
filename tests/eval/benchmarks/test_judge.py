"""The judge client against a stub server: cached replies, retries and errors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from revisit.errors import RevisitError
from revisit.eval.benchmarks import judged
from revisit.eval.benchmarks.judged import Judge


def test_replies_are_kept(stub_judge, tmp_path: Path):
    cache = tmp_path / "deep/judge.sqlite"
    stub_judge.replies = ["one", "two"]
    with closing(Judge(stub_judge.url, "m", cache)) as judge:
        assert [judge.ask("a"), judge.ask("a"), judge.ask("b")] == ["one", "one", "two"]
    with closing(Judge(stub_judge.url, "m", cache)) as again:
        assert [again.ask("a"), again.ask("b")] == ["one", "two"]
    assert stub_judge.prompts == ["a", "b"]


def test_another_model_or_temperature_asks_again(stub_judge, tmp_path: Path):
    cache = tmp_path / "judge.sqlite"
    stub_judge.replies = ["1", "2", "3"]
    for reply, model, temperature in (("1", "a", 0), ("2", "b", 0), ("3", "a", 0.2), ("1", "a", 0)):
        with closing(Judge(stub_judge.url, model, cache, temperature)) as judge:
            assert judge.ask("q") == reply


def test_busy_server_is_asked_again(stub_judge):
    stub_judge.replies = [503, 429, "fine"]
    assert Judge(stub_judge.url, "m").ask("q") == "fine"


def test_failures_raise_one_sentence(stub_judge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judged, "ATTEMPTS", 2)
    for replies, message in (
        ([401], "401"),
        ([500, 500], "500"),
        ([{"error": "not me"}], "did not answer"),
        ([{"choices": [{"message": {"content": None}}]}], "without text"),
    ):
        stub_judge.replies = replies
        with pytest.raises(RevisitError, match=message):
            Judge(stub_judge.url, "m").ask("q")
    with pytest.raises(RevisitError, match="did not answer"):
        Judge("http://127.0.0.1:9/v1", "m").ask("q")


def test_a_file_that_is_no_cache_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "mine.json"
    path.write_bytes(b'{"precious": "data", "of": "another program"}')
    for place in (path, tmp_path):
        with pytest.raises(RevisitError, match="cannot be used as the judge's cache"):
            Judge("http://127.0.0.1:9/v1", "m", place)
    assert path.read_bytes() == b'{"precious": "data", "of": "another program"}'
