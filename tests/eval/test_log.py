"""Logs on disk: one per spec, one answer per item, no lines of other logs, and cached scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_grid import HashEngine, Letters, Shift

from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric
from revisit.eval.log import Answer, Log, read_logs
from revisit.eval.report.sample_browser import read_samples
from revisit.eval.spec import Spec
from revisit.io.files import encode, read_lines

ITEMS = [Item("q1", "p", hash="c1"), Item("q2", "p", hash="c2")]


def spec(**changes: object) -> Spec:
    made = Spec.of(HashEngine("org/model").identity(8, []), Shift(by=1), Letters(), Decoding(max_new_tokens=7))
    return made.model_copy(update=changes)


def answer(number: int, text: str = "a cat") -> Answer:
    return Answer(id=f"q{number}", item=f"c{number}", prompt="p", text=text, tokens=(1, 2), counters={"steps": 3})


def written(folder: Path, *answers: Answer, **changes: object) -> Log:
    log = Log.open(folder, spec(**changes))
    log.begin(ITEMS)
    log.append(answers)
    if len(answers) == len(ITEMS):
        log.score(Letters(), ITEMS)
    log.close()
    return log


def test_appended_answers_are_read_again_and_never_doubled(tmp_path: Path) -> None:
    first = Log.open(tmp_path, spec())
    first.begin(ITEMS)
    assert first.append([answer(1), answer(2)]) == 2
    assert first.append([answer(2, "another"), answer(3)]) == 1
    first.close()
    second = Log.open(tmp_path, spec())
    assert second.path == first.path
    assert second.append([answer(1), answer(2), answer(3)]) == 0
    assert second.answers["q2", "c2"] == answer(2)
    items = [ITEMS[1], Item("q2", "p", hash="changed"), Item("q9", "p", hash="c9")]
    assert second.missing(items) == items[1:]
    second.close()
    assert list(Log.read(first.path).answers.values()) == [answer(1), answer(2), answer(3)]


def test_logs_that_named_videos_apart_are_read() -> None:
    stored = answer(1).model_dump(mode="json") | {"images": ["a.png"], "videos": ["b.mp4"]}
    assert Answer.model_validate(stored) == answer(1).model_copy(update={"images": ("a.png", "b.mp4")})


def test_lines_of_another_log_are_not_used(tmp_path: Path) -> None:
    one, other = written(tmp_path, answer(1)), written(tmp_path, answer(1, "another answer"), seed=1)
    lines, foreign = (log.path.read_bytes().splitlines(keepends=True) for log in (one, other))
    one.path.write_bytes(lines[0] + foreign[1])
    log = Log.read(one.path)
    assert (log.answers, log.damaged) == ({}, 1)
    one.path.write_bytes(other.path.read_bytes())
    with pytest.raises(RevisitError, match="other settings"):
        Log.open(tmp_path, spec())


def test_a_log_without_a_header_hides_no_other_and_gets_a_new_one_when_it_is_opened(tmp_path: Path) -> None:
    written(tmp_path, seed=1)
    log = written(tmp_path, answer(1))
    log.path.write_bytes(b"x" + log.path.read_bytes())
    with pytest.raises(RevisitError, match="header is damaged"):
        Log.read(log.path)
    assert [other.spec.seed for other in read_logs(tmp_path)] == [1]
    assert written(tmp_path).answers == {("q1", "c1"): answer(1)}
    assert Log.read(log.path).request.items == 2


def test_the_same_request_is_stored_once(tmp_path: Path) -> None:
    log = Log.open(tmp_path, spec())
    for items in (ITEMS, ITEMS, ITEMS[:1]):
        log.begin(items)
    log.close()
    assert [request.items for request in Log.read(log.path).requests] == [2, 1]


def test_cached_scores_belong_to_one_scorer_and_to_the_answers_and_labels(tmp_path: Path) -> None:
    log = written(tmp_path, answer(1), answer(2))
    scores = log.scores
    assert Log.read(log.path).scores == scores
    others = [
        written(tmp_path, answer(1), answer(2), scorer="letters-0"),
        written(tmp_path, answer(1), answer(2, "a dog"), seed=1),
        written(tmp_path, answer(1), seed=2),
    ]
    (stored,) = [line for line in read_lines(log.path)[0] if "scores" in line]
    for other in others:
        lines = [line for line in read_lines(other.path)[0] if "scores" not in line]
        other.path.write_bytes(b"".join(map(encode, [*lines, {**stored, "spec": lines[0]["spec"]}])))
        assert Log.read(other.path).scores is None
    corrected = Log.open(tmp_path, spec())
    corrected.begin([replace(ITEMS[0], meta={"label": "no"}), ITEMS[1]])
    assert corrected.scores is None
    corrected.score(Letters(), ITEMS)
    corrected.close()
    assert written(tmp_path).scores == scores  # those of other labels or items do not replace them
    log.path.write_bytes(log.path.read_bytes().replace(b"vowels", b"vowel"))
    assert Log.read(log.path).scores is None


class Unjudged(Letters):
    """Like a judged benchmark without a judge: its main metric is not computed."""

    name = "unjudged"
    metrics = (Metric("rating", "higher"), *Letters.metrics)
    headline = "rating"


def test_without_its_main_metric_a_benchmark_is_shown_by_the_first_one(tmp_path: Path) -> None:
    log = written(tmp_path)
    log = Log.open(tmp_path, spec())
    log.append([answer(1), answer(2)])
    log.score(Unjudged(), ITEMS)
    log.close()
    columns, _, _ = read_samples([log])
    assert columns.totals()["letters"]["metric"] == "vowels ↓"


def test_a_folder_without_logs_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RevisitError, match="give the --out folder"):
            read_logs(folder)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_bytes(encode({"spec": {"x": 1}, "request": {}}))
    with pytest.raises(RevisitError, match="has no logs"):
        read_logs(tmp_path)
    assert "another version" in caplog.text
