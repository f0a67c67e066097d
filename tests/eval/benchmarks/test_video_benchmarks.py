"""VideoHallucer, EventHallusion and VidHal, against scores of their released programs for strange answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from revisit.errors import RevisitError
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.vidhal import merge, parse_letter, parse_order

RELEASED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "released" / "video_scores.json").read_text("utf-8")
)


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")


def metrics(benchmark: str, data: Path, answers: dict[str, str], **options: Any) -> dict[str, float]:
    made = get(benchmark, **options)
    items = made.load(data)
    assert {item.id for item in items} == answers.keys()
    return made.score(items, answers).metrics


def test_videohallucer_scores_as_released(tmp_path: Path) -> None:
    released, answers = RELEASED["videohallucer"], {}
    for name, part in released["sets"].items():
        pairs = []
        for number, (basic, first, other, second) in enumerate(part["rows"]):
            answers |= {f"{name}/{number}/basic": first, f"{name}/{number}/hallucination": second}
            halves = {"basic": basic, "hallucination": other}
            pairs.append({k: {"video": "v.mp4", "question": "Is it?", "answer": v} for k, v in halves.items()})
        write(tmp_path / "videohallucer_datasets" / name / f"{name}.json", pairs)

    found = metrics("videohallucer", tmp_path, answers)
    expected = {name: part["scores"] for name, part in released["sets"].items()} | {"all": released["all"]}
    assert found == pytest.approx(
        {f"{name}/{m}": value for name, part in expected.items() for m, value in part.items()}
    )

    only = get("videohallucer", sets="temporal", frames=4)
    item = only.load(tmp_path)[1]
    assert item.id == "temporal/0/hallucination"
    assert item.images == (tmp_path / "videohallucer_datasets/temporal/videos/v.mp4",)
    assert item.sampling.frames == 4
    with pytest.raises(RevisitError, match="no pair is complete"):
        only.score([item], {item.id: "no"})
    with pytest.raises(RevisitError, match="temporal"):
        get("videohallucer", sets="tempral")


def test_eventhallusion_scores_as_released(tmp_path: Path) -> None:
    released, answers = RELEASED["eventhallusion"], {}
    for split, given in released["answers"].items():
        question = {"type": "hallucination", "question": "Is it?", "answer": released["labels"][split]}
        rows = [{"id": id, "questions": [question]} for id in given]
        answers |= {f"{id}/0": answer for id, answer in given.items()}
        write(tmp_path / "questions" / f"{split}_questions.json", rows)

    found = metrics("eventhallusion", tmp_path, answers)
    expected = {f"{split}/accuracy": value for split, value in released["accuracy"].items() if split != "overall"}
    expected |= {"accuracy": released["accuracy"]["overall"], "not_matching": released["not_matching"]}
    assert found == pytest.approx(expected)


@pytest.fixture
def vidhal(tmp_path: Path) -> Path:
    data = RELEASED["vidhal_data"]
    captions = {"1": "A man opens a door.", "2": "A man closes a door.", "3": "A man paints a door."}
    rows = [{"video": video, "captions": captions, "aspect": aspect} for video, aspect in data["aspects"].items()]
    write(tmp_path / "vidhal" / "annotations.json", rows)
    write(tmp_path / "vidhal" / "options.json", data["options"])
    return tmp_path


@pytest.mark.parametrize(
    ("task", "key", "metric"),
    [
        ("mcqa", "vidhal_mcqa", "accuracy"),
        ("naive_ordering", "vidhal_naive", "ndcg"),
        ("relative_ordering", "vidhal_relative", "ndcg"),
    ],
)
def test_vidhal_scores_as_released(vidhal: Path, task: str, key: str, metric: str) -> None:
    released = RELEASED[key]
    found = metrics("vidhal", vidhal, released["answers"], task=task)
    expected = {metric if name == "overall" else f"{name}/{metric}": v for name, v in released[metric].items()}
    assert found == pytest.approx(expected)


def test_vidhal_reads_answers_as_released() -> None:
    assert {text: parse_letter(text) for text in RELEASED["vidhal_mcqa"]["parsed"]} == RELEASED["vidhal_mcqa"]["parsed"]
    assert {text: parse_order(text) for text in RELEASED["vidhal_naive"]["parsed"]} == RELEASED["vidhal_naive"][
        "parsed"
    ]
    assert merge({"AB": "A", "BC": "C", "AC": "C"}) == ["C", "A", "B"]
    assert merge({"AB": "B", "BC": "B", "AC": "C"}) == ["B", "C", "A"]


def test_vidhal_shows_the_captions_in_the_released_order(vidhal: Path) -> None:
    first, _, third, *_ = get("vidhal", task="relative_ordering").load(vidhal)
    ranks = RELEASED["vidhal_data"]["options"]["v_0"]
    words = {"1": "opens", "2": "closes", "3": "paints"}
    assert first.id == "v_0/AB"
    assert first.prompt.endswith(f"A. A man {words[ranks['A']]} a door.\nB. A man {words[ranks['B']]} a door.")
    assert third.id == "v_0/BC"
    assert third.prompt.endswith(f"A. A man {words[ranks['B']]} a door.\nB. A man {words[ranks['C']]} a door.")
