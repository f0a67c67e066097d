"""Benchmarks with a judge: its cached replies, retries and errors, and replies of every kind as the released programs count them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, judged, llava_bench, mmhal, mmvp

OPTIONS = {"a": "open", "b": "closed"}


# -- the judge -----------------------------------------------------------------------------------------------------


def with_judge(url: str, name: str = "mmhal", **options: Any) -> Any:
    return get(name, judge="model", judge_url=url, **options)


def test_replies_are_stored(stub_judge: Any, tmp_path: Path) -> None:
    cache = tmp_path / "deep/judge.sqlite"
    stub_judge.replies = ["one", "two"]
    assert with_judge(stub_judge.url, judge_cache=cache).replies("aab") == ["one", "one", "two"]
    assert with_judge(stub_judge.url, judge_cache=cache).replies("ab") == ["one", "two"]
    assert stub_judge.prompts == ["a", "b"]


def test_another_model_or_temperature_is_another_request(stub_judge: Any, tmp_path: Path) -> None:
    stub_judge.replies = ["1", "2", "3"]
    asked = (("1", "mmhal", "m"), ("2", "mmhal", "n"), ("3", "llava_bench", "m"), ("1", "mmhal", "m"))
    for reply, name, model in asked:
        bench = with_judge(stub_judge.url, name, judge_model=model, judge_cache=tmp_path / "judge.sqlite")
        assert bench.replies(["q"]) == [reply]


def test_requests_to_a_busy_server_are_repeated(stub_judge: Any) -> None:
    stub_judge.replies = [503, 429, "fine"]
    assert with_judge(stub_judge.url).replies(["q"]) == ["fine"]


def test_failures_raise_one_sentence(stub_judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "ATTEMPTS", 2)
    for replies, message in (
        ([401], "401"),
        ([500, 500], "500"),
        ([{"error": "not me"}], "did not answer"),
        ([{"choices": [{"message": {"content": None}}]}], "without text"),
    ):
        stub_judge.replies = replies
        with pytest.raises(RevisitError, match=message):
            with_judge(stub_judge.url).replies(["q"])
    with pytest.raises(RevisitError, match="did not answer"):
        with_judge("http://127.0.0.1:9/v1").replies(["q"])
    with pytest.raises(RevisitError, match="judge_url"):
        get("mmhal", judge="model")


def test_a_file_that_is_no_cache_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b'{"precious": "data", "of": "another program"}')
    for cache in (path, tmp_path):
        with pytest.raises(RevisitError, match="cannot be used as the judge's cache"):
            with_judge("http://127.0.0.1:9/v1", judge_cache=cache).replies(["q"])
    assert path.read_bytes() == b'{"precious": "data", "of": "another program"}'


# -- MMVP ----------------------------------------------------------------------------------------------------------


def test_mmvp_counts_replies_as_released() -> None:
    found = golden("mmvp")
    for reply, right in zip(found["replies"], found["right"], strict=True):
        assert mmvp.parse_verdict(reply) == bool(right), reply
    answers = golden("short_answers")["answers"]
    assert [n for n, reply in enumerate(answers) if mmvp.parse_verdict(reply)] == found["short_answers_right"]
    stream = [found["replies"][n] for n in found["stream"]]
    scores = mmvp.score_pairs((str(n), mmvp.parse_verdict(reply)) for n, reply in enumerate(stream, 1))
    right, total = found["pairs"]
    assert len(stream) == 240
    assert scores.counts["pairs"] == total
    assert scores.metrics["pairs"] == pytest.approx(right / total)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("(a)", "a"),
        ("The answer is (B).", "b"),
        ("A", "a"),
        ("b.", "b"),
        ("B) Closed", "b"),
        ("Open", "a"),
        ("It is closed.", "b"),
        ("A door is closed", "b"),  # "a" is an article here
        ("It is neither open nor closed.", ""),
        ("Yes", ""),
        ("", ""),
        ("開いています", ""),
        ("word " * 200 + "closed", "b"),
    ],
)
def test_mmvp_finds_the_option_that_an_answer_names(answer: str, letter: str) -> None:
    assert mmvp.parse_letter(answer, OPTIONS) == letter


def test_mmvp_with_and_without_a_judge(stub_judge: Any, tmp_path: Path) -> None:
    (tmp_path / "mmvp").mkdir()
    rows = ["Index,Question,Options,Correct Answer"]
    rows += [f"{n},Is it open?,(a) Open (b) Closed,({'ab'[n % 2]})" for n in range(1, 6)]
    (tmp_path / "mmvp/Questions.csv").write_text("\n".join(rows))
    bench = get("mmvp")
    items = bench.load(tmp_path)
    assert items[0].prompt == "Is it open? (a) Open (b) Closed"
    assert items[0].images == (tmp_path / "mmvp/MMVP Images/1.jpg",)
    scores = bench.score(items, {"1": "(b)", "2": "Open", "3": "(b)", "4": "(b)", "5": "(b)"})
    assert scores.metrics == {"pairs": 0.5, "accuracy": 0.75}
    assert scores.counts == {"pairs": 2, "left_out": 1}
    with pytest.raises(RevisitError, match="no pair is complete"):
        bench.score(items[:1], {"1": "(b)"})
    bench = with_judge(stub_judge.url, "mmvp")
    stub_judge.replies = ["Yes", "yes"]
    assert bench.score(items[:2], {"1": "Closed", "2": "Open"}).metrics["pairs"] == 1
    assert "An answer that was given: Closed" in stub_judge.prompts[0]
    assert bench.version == "mmvp-gpt-4-0314-1"


# -- MMHal-Bench ---------------------------------------------------------------------------------------------------


def test_mmhal_counts_replies_as_released() -> None:
    found = golden("mmhal")
    kinds = mmhal.KINDS
    seen = 0
    for run in found["runs"]:
        replies = [found["texts"][n] for n in run["replies"]]
        ratings = [mmhal.parse_rating(reply) for reply in replies]
        rows = [(str(n), kinds[n % 8], rating) for n, rating in enumerate(ratings)]
        scores = mmhal.score_ratings(rows)
        by_kind = ",".join(str(round(scores.metrics[f"{kind}/score"], 2)) for kind in kinds)
        assert run["printed"] == [
            f"Average score: {scores.metrics['score']:.2f}",
            f"Hallucination rate: {scores.metrics['hallucination']:.2f}",
            f"Average score for each question type: {by_kind}",
            f"Informativeness: {scores.metrics['informativeness']:.2f}",
        ]
        points = [scores.per_item["informativeness"][str(n)][0] * 3 / 100 for n in range(96)]
        assert points == pytest.approx(run["informativeness"])
        seen += len(replies)
    assert seen == 288


def test_mmhal_with_and_without_a_judge(stub_judge: Any, tmp_path: Path) -> None:
    (tmp_path / "mmhal").mkdir()
    about = {"question_type": "other", "image_id": "a1", "image_src": "https://example.org/1.jpg"}
    row = {**about, "image_content": ["Dog", "Hat"], "question": "What is it?", "gt_answer": "A dog."}
    (tmp_path / "mmhal" / mmhal.MMHal.data_files[0]).write_text(json.dumps([row]))
    (item,) = get("mmhal").load(tmp_path)
    unjudged = get("mmhal").score([item], {"a1": "A dog in a hat."})
    assert unjudged.metrics == {"words": 5.0}
    assert "Not judged" in unjudged.notes[0]
    bench = with_judge(stub_judge.url, judge_cache=tmp_path / "replies.sqlite")
    stub_judge.replies = ["It is true.\nRating: 5"]
    for _ in range(2):  # the second time from the cache
        assert bench.score([item], {"a1": "A dog in a hat."}).metrics["score"] == 5
    assert "Dog, Hat" in stub_judge.prompts[0]
    assert "Rating: 6, very informative" in stub_judge.prompts[0]
    reviewed = get("mmhal", judge="reviews").score([item], {"a1": "No rating here"})
    assert reviewed.metrics["hallucination"] == 1
    assert "1 replies" in reviewed.notes[0]


# -- LLaVA-Bench ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "marks"),
    [("8 7\nGood", (8, 7)), ("8,7", (8, 7)), ("9.5 10", (9.5, 10)), ("8, 7", (-1, -1)), ("Marks: 8 7", (-1, -1))],
)
def test_llava_bench_parses_marks(reply: str, marks: tuple[float, float]) -> None:
    assert llava_bench.parse_marks(reply) == marks


def test_llava_bench_agrees_with_the_official_script() -> None:
    """From the marks that the script reads to the digits that it prints."""
    for run in golden("llava_bench")["runs"]:
        rows = [(str(n), kind.removeprefix("llava_bench_"), marks) for n, (kind, marks) in enumerate(run["reviews"])]
        scores = llava_bench.score_marks(rows)
        assert {kind: round(scores.metrics[kind], 1) for kind in run["printed"]} == run["printed"]


def test_llava_bench_with_a_judge(stub_judge: Any, tmp_path: Path) -> None:
    (tmp_path / "llava_bench").mkdir()
    kinds = ("conv", "detail", "complex")
    questions = [
        {"question_id": n, "image": "001.jpg", "text": f"What {n}?", "category": k} for n, k in enumerate(kinds)
    ]
    references = [{"question_id": n, "text": f"Reference {n}."} for n in range(3)]
    context = [{"id": "001", "image": "001.jpg", "caption": "A harbor at noon."}]
    for name, rows in zip(llava_bench.LlavaBench.data_files, (questions, context, references), strict=True):
        (tmp_path / "llava_bench" / name).write_text("\n".join(map(json.dumps, rows)))
    bench = with_judge(stub_judge.url, "llava_bench")
    items = bench.load(tmp_path)
    stub_judge.replies = ["8 4\nbecause", "10 5", "?"]
    scores = bench.score(items, {item.id: "An answer." for item in items})
    assert (scores.metrics["conv"], scores.metrics["detail"]) == (50.0, 50.0)
    assert scores.metrics["all"] == pytest.approx(100 * (4 + 5 - 1) / (8 + 10 - 1), abs=0.05)  # of rounded means
    assert scores.counts["unread_replies"] == 1
    assert "could not be read" in scores.notes[0]
    for text in ("A harbor at noon.", "Reference 0.", "An answer."):
        assert text in stub_judge.prompts[0]
