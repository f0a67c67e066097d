"""MMVP and MMHal-Bench: a judge's replies of every kind as the released programs count them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, mmhal, mmvp

OPTIONS = {"a": "open", "b": "closed"}


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
def test_mmvp_reads_the_option_that_an_answer_names(answer: str, letter: str) -> None:
    assert mmvp.parse_letter(answer, OPTIONS) == letter


def mmvp_folder(root: Path) -> Path:
    (root / "mmvp").mkdir()
    rows = ["Index,Question,Options,Correct Answer"]
    rows += [f"{n},Is it open?,(a) Open (b) Closed,({'ab'[n % 2]})" for n in range(1, 6)]
    (root / "mmvp/Questions.csv").write_text("\n".join(rows))
    return root


def test_mmvp_without_a_judge(tmp_path: Path) -> None:
    bench = get("mmvp")
    items = bench.load(mmvp_folder(tmp_path))
    assert items[0].prompt == "Is it open? (a) Open (b) Closed"
    assert items[0].images == (tmp_path / "mmvp/MMVP Images/1.jpg",)
    scores = bench.score(items, {"1": "(b)", "2": "Open", "3": "(b)", "4": "(b)", "5": "(b)"})
    assert scores.metrics == {"pairs": 0.5, "accuracy": 0.75}
    assert scores.counts == {"pairs": 2, "left_out": 1}
    with pytest.raises(RevisitError, match="no pair is complete"):
        bench.score(items[:1], {"1": "(b)"})


def test_mmvp_with_a_judge(stub_judge: Any, tmp_path: Path) -> None:
    bench = get("mmvp", judge="model", judge_url=stub_judge.url)
    items = bench.load(mmvp_folder(tmp_path))[:2]
    stub_judge.replies = ["Yes", "yes"]
    assert bench.score(items, {"1": "Closed", "2": "Open"}).metrics["pairs"] == 1
    assert "An answer that was given: Closed" in stub_judge.prompts[0]
    assert bench.version == "mmvp-gpt-4-0314-1"


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


def mmhal_folder(root: Path) -> Path:
    (root / "mmhal").mkdir()
    row = {
        "question_type": "other",
        "image_id": "a1",
        "image_src": "https://example.org/1.jpg",
        "image_content": ["Dog", "Hat"],
    }
    (root / "mmhal" / mmhal.FILE).write_text(json.dumps([{**row, "question": "What is it?", "gt_answer": "A dog."}]))
    return root


def test_mmhal_with_and_without_a_judge(stub_judge: Any, tmp_path: Path) -> None:
    (item,) = get("mmhal").load(mmhal_folder(tmp_path))
    assert get("mmhal").score([item], {"a1": "A dog in a hat."}).metrics == {"words": 5.0}
    cache = tmp_path / "replies.jsonl"
    bench = get("mmhal", judge="model", judge_url=stub_judge.url, judge_cache=str(cache))
    stub_judge.replies = ["It is true.\nRating: 5"]
    for _ in range(2):  # the second time from the cache
        assert bench.score([item], {"a1": "A dog in a hat."}).metrics["score"] == 5
    assert "Dog, Hat" in stub_judge.prompts[0]
    assert "Rating: 6, very informative" in stub_judge.prompts[0]
    reviewed = get("mmhal", judge="reviews").score([item], {"a1": "No rating here"})
    assert reviewed.metrics["hallucination"] == 1
    assert "1 replies" in reviewed.notes[0]
