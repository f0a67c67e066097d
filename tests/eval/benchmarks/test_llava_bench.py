"""LLaVA-Bench: the published arithmetic of marks, and a judge on the loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, llava_bench


@pytest.mark.parametrize(
    ("reply", "marks"),
    [("8 7\nGood", (8, 7)), ("8,7", (8, 7)), ("9.5 10", (9.5, 10)), ("8, 7", (-1, -1)), ("Marks: 8 7", (-1, -1))],
)
def test_marks(reply, marks):
    assert llava_bench.parse_marks(reply) == marks


def test_scores_per_category():
    scores = llava_bench.score_marks([("1", "conv", (8, 4)), ("2", "detail", (10, 10)), ("3", "conv", (-1, -1))])
    assert scores.metrics["conv"] == pytest.approx(1.5 / 3.5 * 100)
    assert scores.metrics["detail"] == 100.0
    assert scores.counts["unread_replies"] == 1
    assert "could not be read" in scores.notes[0]


def _folder(root: Path) -> Path:
    folder = root / "llava_bench"
    folder.mkdir()
    kinds = ("conv", "detail", "complex")
    questions = [
        {"question_id": n, "image": "001.jpg", "text": f"What {n}?", "category": k} for n, k in enumerate(kinds)
    ]
    references = [{"question_id": n, "text": f"Reference {n}."} for n in range(3)]
    context = [{"id": "001", "image": "001.jpg", "caption": "A harbor at noon."}]
    for name, rows in zip(llava_bench.FILES, (questions, context, references), strict=True):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return root


def test_without_a_judge(tmp_path: Path):
    bench = get("llava_bench")
    items = bench.load(_folder(tmp_path))
    scores = bench.score(items, {item.id: "three words here" for item in items})
    assert scores.metrics == {"words": 3.0}
    assert "Not judged" in scores.notes[0]


def test_model_judge(stub_judge, tmp_path: Path):
    bench = get("llava_bench", judge="model", judge_url=stub_judge.url, judge_cache=str(tmp_path / "c.jsonl"))
    items = bench.load(_folder(tmp_path))[:2]
    stub_judge.replies = ["8 4\nbecause", "10 5"]
    scores = bench.score(items, {item.id: "An answer." for item in items})
    assert scores.metrics["all"] == 50.0
    assert items[0].meta["context"] in stub_judge.prompts[0]
    assert items[0].meta["reference"] in stub_judge.prompts[0]
    assert "An answer." in stub_judge.prompts[0]
    with pytest.raises(RevisitError, match="judge_url"):
        get("llava_bench", judge="model")


def test_what_the_official_script_printed():
    """From the marks that the script reads to the digits that it prints."""
    for run in golden("llava_bench")["runs"]:
        rows = [(str(n), kind.removeprefix("llava_bench_"), marks) for n, (kind, marks) in enumerate(run["reviews"])]
        scores = llava_bench.score_marks(rows)
        assert {kind: round(scores.metrics[kind], 1) for kind in run["printed"]} == run["printed"]
