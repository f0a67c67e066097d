"""AMBER's two parts on cases worked out by hand."""

from __future__ import annotations

import json
import operator
from pathlib import Path

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
    assert score == amber.CaptionScore(mentions=4, hallucinated=2, covered=2, objects=2, pitfalls_hit=2, pitfalls=2)
    near = amber.score_caption(["puppy"], ["forest"], ["cloud"], WORDS, _similar)
    assert near == amber.CaptionScore(mentions=1, hallucinated=0, covered=1, objects=1, pitfalls_hit=0, pitfalls=1)


def test_safe_words_count_as_mentions_only():
    words = amber.Vocabulary({"lamp": ["light"]}, frozenset({"light"}))
    score = amber.score_caption(["light"], ["lamp"], [], words, operator.eq)
    assert (score.mentions, score.hallucinated, score.covered) == (1, 0, 0)


def test_nouns_keep_their_case(nltk_data):
    assert amber.nouns("Dogs chase two cars.") == ["Dogs", "car"]


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


def test_official_parser_is_strict():
    assert [amber.parse_official(text) for text in ("Yes", "No", "Yes.", "no")] == ["yes", "no", "other", "other"]
    assert amber.parse_vlmevalkit("No, it is not.") == "no"


def _folder(root: Path) -> Path:
    data = root / "amber/data"
    (data / "query").mkdir(parents=True)
    notes = [
        {"id": 1, "type": "generative", "truth": ["dog"], "hallu": ["cloud"]},
        {"id": 2, "type": "discriminative-hallucination", "truth": "no"},
    ]
    (data / "annotations.json").write_text(json.dumps(notes))
    (data / "relation.json").write_text(json.dumps({k: list(v) for k, v in WORDS.related.items()}))
    (data / "safe_words.txt").write_text("light\n")
    queries = [{"id": i, "image": "AMBER_1.jpg", "query": "Describe this image."} for i in (1, 2)]
    (data / "query/query_all.json").write_text(json.dumps(queries))
    return root


def test_load_and_score(tmp_path: Path, nltk_data):
    bench = get("amber", similarity="exact")
    items = bench.load(_folder(tmp_path))
    assert [item.id for item in items] == ["1", "2"]
    assert items[0].images[0] == tmp_path / "amber/image/AMBER_1.jpg"
    scores = bench.score(items, {"1": "A dog and a cloud.", "2": "No"})
    assert scores.metrics["CHAIR"] == pytest.approx(100 / 2.001)
    assert scores.metrics["AMBER"] == pytest.approx((100 - scores.metrics["CHAIR"] + scores.metrics["F1"]) / 2)
    assert "not the official rule" in scores.notes[0]
    assert [item.id for item in get("amber", part="discriminative").load(tmp_path)] == ["2"]


def test_the_official_rule_needs_spacy(tmp_path: Path, nltk_data, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "spacy", None)
    amber.spacy_similarity.cache_clear()
    items = get("amber", part="generative").load(_folder(tmp_path))
    with pytest.raises(RevisitError, match="similarity=exact"):
        get("amber", part="generative").score(items, {"1": "A dog."})


PRINTED = {  # as the script spells its headings -> ours
    "Descriminative Task": "",
    "Exsitence": "existence/",
    **{name: f"{name.lower()}/" for name in ("Attribute", "State", "Number", "Action", "Relation")},
}


def test_what_the_official_script_printed(tmp_path: Path, nltk_data):
    found = golden("amber")
    for number, run in enumerate(found["runs"]):
        data = tmp_path / str(number) / "amber/data"
        (data / "query").mkdir(parents=True)
        (data / "annotations.json").write_text(json.dumps(run["notes"]))
        (data / "relation.json").write_text(json.dumps(found["words"]))
        (data / "safe_words.txt").write_text("\n".join(found["safe_words"]) + "\n")
        queries = [{"id": note["id"], "image": f"AMBER_{note['id']}.jpg", "query": "?"} for note in run["notes"]]
        (data / "query/query_all.json").write_text(json.dumps(queries))
        bench = get("amber", similarity="exact")
        metrics = bench.score(bench.load(data.parents[1]), {str(i): text for i, text in run["answers"]}).metrics
        printed = dict(run["printed"])
        for name, value in printed.pop("Generative Task").items():
            assert round(metrics[name], 1) == value, (number, name)
        for heading, values in printed.items():
            for name, value in values.items():
                ours = PRINTED[heading] + (name if name == "F1" else name.lower())
                assert round(metrics[ours], 1) == value, (number, ours)


def test_two_methods_have_the_same_units_in_every_metric() -> None:
    labels = {"1": ("yes", "state"), "2": ("no", "existence"), "3": ("no", "relation")}
    said = ({"1": "no", "2": "no", "3": "yes"}, {"1": "yes", "2": "yes", "3": "other"})
    one, two = (amber.score_answers((u, how[u], *labels[u]) for u in labels) for how in said)
    assert {name: set(units) for name, units in one.per_item.items()} == {
        name: set(units) for name, units in two.per_item.items()
    }
    assert one.metrics["precision"] == pytest.approx(50, rel=1e-3)
    assert two.metrics["precision"] == 0
