"""Logs on disk: one per spec, never two answers to one item, lines of other logs are not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_grid import HashEngine, Letters, Shift

from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.log import Answer, Log, Request, new_request, read_logs
from revisit.eval.spec import Spec
from revisit.explain.files import encode


def spec(**changes: object) -> Spec:
    made = Spec.of(HashEngine("org/model").about(), Shift(by=1), Letters(), Decoding(max_new_tokens=7))
    return made.model_copy(update=changes)


def answer(number: int, text: str = "a cat") -> Answer:
    return Answer(id=f"q{number}", item=f"c{number}", prompt="p", text=text, tokens=(1, 2), counters={"steps": 3})


def opened(folder: Path, **changes: object) -> Log:
    log = Log.open(folder, spec(**changes))
    log.begin(new_request({"q1": "c1", "q2": "c2"}))
    return log


def test_appended_answers_are_read_again_and_never_doubled(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.append([answer(1), answer(2)]) == 2
    assert first.append([answer(2, "another"), answer(3)]) == 1
    first.close()
    second = Log.open(tmp_path, spec())
    assert second.path == first.path
    assert second.append([answer(1), answer(2), answer(3)]) == 0
    assert second.answers["q2", "c2"] == answer(2)
    items = [Item("q2", "p", hash="c2"), Item("q2", "p", hash="changed"), Item("q9", "p", hash="c9")]
    assert second.missing(items) == items[1:]
    second.close()
    assert list(Log.read(first.path).answers.values()) == [answer(1), answer(2), answer(3)]
    with pytest.raises(RuntimeError, match="not open"):
        second.append([answer(4)])


def test_any_change_of_a_spec_is_another_log() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"seed": 1},
        {"decoding": {"max_new_tokens": 65}},
        {"settings": {"by": 2}},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"batching": {"size": 8}},
        {"libraries": {"revisit": "1"}},
    ]
    assert len({spec(**change).key for change in changes}) == len(changes)
    assert spec(options={"a": 1, "b": 2}).key == spec(options={"b": 2, "a": 1}).key


def test_a_line_of_another_log_is_not_taken(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, seed=1)
    one.append([answer(1)])
    other.append([answer(1, "another answer")])
    one.close()
    other.close()
    lines, foreign = (log.path.read_bytes().splitlines(keepends=True) for log in (one, other))
    one.path.write_bytes(lines[0] + foreign[1])
    found = Log.read(one.path)
    assert (found.answers, found.damaged) == ({}, 1)
    one.path.write_bytes(other.path.read_bytes())
    with pytest.raises(RevisitError, match="other settings"):
        Log.open(tmp_path, spec())


def test_a_log_without_a_header_hides_no_other_and_is_refilled_when_it_is_opened(tmp_path: Path) -> None:
    opened(tmp_path, seed=1).close()
    log = opened(tmp_path)
    log.append([answer(1)])
    log.close()
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"x" + lines[0] + lines[1])
    with pytest.raises(RevisitError, match="header is damaged"):
        Log.read(log.path)
    assert [other.spec.seed for other in read_logs(tmp_path)] == [1]
    again = opened(tmp_path)
    assert again.answers == {("q1", "c1"): answer(1)}
    again.close()
    assert Log.read(log.path).request.items == 2


def test_the_same_request_is_stored_once(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.begin(new_request({"q1": "c1", "q2": "c2"}))
    log.begin(new_request({"q1": "c1"}))
    log.close()
    assert [request.items for request in Log.read(log.path).requests] == [2, 1]


def test_scores_of_another_scorer_are_not_used(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append([answer(1), answer(2)])
    scores = log.score(Letters(), [Item("q1", "p", hash="c1"), Item("q2", "p", hash="c2")])
    log.close()
    assert Log.read(log.path).scores == scores
    path = log.path.with_suffix(".scores.json")
    record = json.loads(path.read_text())
    for change in ({"scorer": "letters-0"}, {"checksum": "x"}, {"asked": "other"}):
        path.write_text(json.dumps({**record, **change}))
        assert Log.read(log.path).scores is None


def test_a_folder_without_logs_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RevisitError, match="give the --out folder"):
            read_logs(folder)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_bytes(encode({"spec": {"x": 1}, "request": {}}))
    with pytest.raises(RevisitError, match="has no logs"):
        read_logs(tmp_path)
    assert "another version" in caplog.text


def test_every_field_of_a_log_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "research" / "run-files.md").read_text("utf-8")
    for record in (Spec, Request, Answer):
        missing = [name for name in record.model_fields if f"`{name}`" not in documented]
        assert missing == [], record
