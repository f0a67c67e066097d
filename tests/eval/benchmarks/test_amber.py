"""AMBER's two parts on cases worked out by hand."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import amber, get

WORDS = amber.Vocabulary(
    {"forest": ["tree", "bush"], "person": ["man", "people"], "cloud": [], "dog": ["puppy"]}, frozenset({"light"})
)


def _similar(one: str, other: str) -> bool:
    return one == other or {one, other} == {"puppy", "bush"}


def test_caption_by_hand():
    # tree covers the forest; cloud is a pitfall; the first puppy is near "bush", so it covers the forest again
    nouns = ["tree", "cloud", "puppy", "house", "person"]
    score = amber.score_caption(nouns, ["forest", "dog"], ["cloud", "person"], WORDS, operator.eq)
    assert score == amber.DescriptionScore(mentions=4, hallucinated=2, covered=2, objects=2, pitfalls_hit=2, pitfalls=2)
    near = amber.score_caption(["puppy"], ["forest"], ["cloud"], WORDS, _similar)
    assert near == amber.DescriptionScore(mentions=1, hallucinated=0, covered=1, objects=1, pitfalls_hit=0, pitfalls=1)
    # safe words count as mentions only
    words = amber.Vocabulary({"lamp": ["light"]}, frozenset({"light"}))
    score = amber.score_caption(["light"], ["lamp"], [], words, operator.eq)
    assert (score.mentions, score.hallucinated, score.covered) == (1, 0, 0)


def test_no_is_the_positive_answer():
    rows = [
        ("1", "no", "no", "existence"),
        ("2", "yes", "no", "existence"),
        ("3", "no", "yes", "state"),
        ("4", "yes", "yes", "relation"),
    ]
    metrics = amber.score_answers(rows).metrics
    assert metrics["accuracy"] == pytest.approx(100 * 2 / 4.001)
    assert metrics["precision"] == pytest.approx(100 * 1 / 2.001)
    assert metrics["recall"] == pytest.approx(100 * 1 / 2.001)
    assert metrics["F1"] == pytest.approx(100 * 2 * 0.5 * 0.5 / 1.0001)
    assert metrics["existence/precision"] == pytest.approx(100 / 1.001)
    assert metrics["state/recall"] == 0.0
    assert [amber.parse_official(text) for text in ("Yes", "No", "Yes.", "no")] == ["yes", "no", "other", "other"]


def folder(root: Path, notes: list[dict[str, Any]], related: Mapping[str, Sequence[str]], safe: list[str]) -> Path:
    data = root / "amber/data"
    (data / "query").mkdir(parents=True)
    (data / "annotations.json").write_text(json.dumps(notes))
    (data / "relation.json").write_text(json.dumps(related))
    (data / "safe_words.txt").write_text("\n".join(safe) + "\n")
    queries = [{"id": note["id"], "image": f"AMBER_{note['id']}.jpg", "query": "Describe."} for note in notes]
    (data / "query/query_all.json").write_text(json.dumps(queries))
    return root


def test_load_and_score(tmp_path: Path, nltk_data, monkeypatch: pytest.MonkeyPatch):
    bench = get("amber", similarity="exact")
    notes = [
        {"id": 1, "type": "generative", "truth": ["dog"], "hallu": ["cloud"]},
        {"id": 2, "type": "discriminative-hallucination", "truth": "no"},
    ]
    items = bench.load(folder(tmp_path, notes, WORDS.related, ["light"]))
    assert [item.id for item in items] == ["1", "2"]
    assert items[0].images[0] == tmp_path / "amber/image/AMBER_1.jpg"
    scores = bench.score(items, {"1": "A dog and a cloud.", "2": "No"})
    assert scores.metrics["CHAIR"] == pytest.approx(100 / 2.001)
    assert scores.metrics["AMBER"] == pytest.approx((100 - scores.metrics["CHAIR"] + scores.metrics["F1"]) / 2)
    assert "not the official rule" in scores.notes[0]
    assert [item.id for item in get("amber", part="discriminative").load(tmp_path)] == ["2"]
    monkeypatch.setitem(sys.modules, "spacy", None)
    amber.spacy_similarity.cache_clear()
    with pytest.raises(RevisitError, match="similarity=exact"):
        get("amber").score(items[:1], {"1": "A dog."})


PRINTED = {  # as the script spells its headings -> ours
    "Descriminative Task": "",
    "Exsitence": "existence/",
    **{name: f"{name.lower()}/" for name in ("Attribute", "State", "Number", "Action", "Relation")},
}


def test_agrees_with_the_official_script(tmp_path: Path, nltk_data):
    found = golden("amber")
    for number, run in enumerate(found["runs"]):
        data = folder(tmp_path / str(number), run["notes"], found["words"], found["safe_words"])
        bench = get("amber", similarity="exact")
        metrics = bench.score(bench.load(data), {str(i): text for i, text in run["answers"]}).metrics
        printed = dict(run["printed"])
        for name, value in printed.pop("Generative Task").items():
            assert round(metrics[name], 1) == value, (number, name)
        for heading, values in printed.items():
            for name, value in values.items():
                ours = PRINTED[heading] + (name if name == "F1" else name.lower())
                assert round(metrics[ours], 1) == value, (number, ours)


def test_two_methods_have_the_same_units_in_every_metric() -> None:
    labels = {"1": ("yes", "state"), "2": ("no", "existence"), "3": ("no", "relation")}
    answers = ({"1": "no", "2": "no", "3": "yes"}, {"1": "yes", "2": "yes", "3": "other"})
    one, two = (amber.score_answers((u, texts[u], *labels[u]) for u in labels) for texts in answers)
    assert {name: set(units) for name, units in one.per_item.items()} == {
        name: set(units) for name, units in two.per_item.items()
    }
    assert one.metrics["precision"] == pytest.approx(50, rel=1e-3)
    assert two.metrics["precision"] == 0
