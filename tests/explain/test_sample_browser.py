"""`revisit view`: which samples are wrong, what the page holds, and that ten thousand of them can be browsed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import families
from revisit import RevisitError
from revisit.benchmarks.base import Item
from revisit.explain.record import wrong_spans
from revisit.report.sample_browser import Columns, Sample, build, items_of, natural_order, verdict, write

LOWER: dict[str, Any] = {"better": "lower", "show": 100, "decimals": 1}
HIGHER: dict[str, Any] = {**LOWER, "better": "higher"}


def test_one_verdict_by_the_headline_metric() -> None:
    metrics = {"CHAIRs": LOWER, "CHAIRi": LOWER, "Recall": HIGHER}
    assert verdict({"CHAIRs": (1, 1), "Recall": (3, 3)}, metrics, "CHAIRs") == ("hallucinated", True)
    assert verdict({"Recall": (1, 3), "CHAIRs": (0, 1)}, metrics, "CHAIRs") == ("no hallucination", False)
    assert verdict({"errors": (1, 1)}, {"errors": LOWER}, "errors") == ("wrong", True)
    parts = {"accuracy": HIGHER, "F1": HIGHER}
    assert verdict({"coco_random/accuracy": (0, 1)}, parts, "F1") == ("wrong", True)  # F1 is not counted per item
    assert verdict({"coco_random/accuracy": (1, 1)}, parts, "F1") == ("right", False)
    assert verdict({"accuracy": (0.6, 1)}, parts, "accuracy") == ("score 60.0", True)  # as the tables print it
    assert verdict({}, parts, "F1") == ("", False)


def cell(label: str, **changes: Any) -> dict[str, Any]:
    """A finished cell of CHAIR, as results.json has it."""
    value = {"CHAIRs": {**LOWER, "value": 0.25, "low": None, "high": None}}
    asked = {"label": "chair", "headline": "CHAIRs"}
    about = {"model": {"name": "m"}, "method": {"label": label, "name": label, "settings": {}}, "benchmark": asked}
    return {**about, "seed": 0, "status": "complete", "answers": 8, "items": 8, "metrics": value, **changes}


def test_totals_are_on_the_printed_scale() -> None:
    columns = Columns()
    other = {"CHAIRs": {**LOWER, "value": 0.5, "low": None, "high": None}}
    columns.of(cell("greedy", metrics=other))
    columns.of(cell("revisit"))
    columns.of(cell("vcd", status="unfinished", answers=3, metrics={}))
    found = columns.totals()["chair"]
    assert found["metric"] == "CHAIRs ↓"
    assert found["of"][0] == {"text": "50.0", "best": 0, "bar": 0.5}
    assert found["of"][1] == {"text": "25.0", "best": 1, "bar": 0.25}
    assert found["of"][2] == {"open": "3 of 8"}


def test_words_for_what_is_not_there() -> None:
    text = "Two dogs and a hot dog on a bench."
    found = [text[start:end] for start, end in wrong_spans(text, ["bench"])]
    assert found == ["dogs", "hot dog"]
    assert wrong_spans(text, ["dog", "hot dog", "bench"]) == []


def made(count: int, folder: Path) -> tuple[Columns, list[Sample]]:
    """`count` samples over ten pictures; the second method is wrong at every fourth, and disagrees there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(10):
        paths.append(folder / f"{number}.png")
        families.picture(number, (80, 60)).save(paths[-1])
    columns = Columns()
    for label in ("greedy", "revisit"):
        columns.of(cell(label))
    columns.of(cell("vcd", status="unfinished", answers=0, metrics={}))
    samples = []
    for number in range(count):
        wrong = number % 4 == 0
        item = Item(str(number), f"What is in picture {number}?", (paths[number % 10],), {"ground_truth": ["dog"]})
        text = "A dog and a cat." if wrong else "A dog."
        verdicts = {"v": "hallucinated", "bad": 1} if wrong else {"v": "no hallucination"}
        second = {"x": text, "w": [(12, 15)] if wrong else [], "c": 1, "n": 5, **verdicts}
        first = {"x": "A dog.", "w": [], "v": "no hallucination", "c": 0, "n": 5}
        samples.append(Sample("chair", item, item.prompt, {0: first, 1: second}))
    return columns, samples


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_pictures_are_copied_once_and_the_command_is_told(tmp_path: Path) -> None:
    page = write("run", *made(30, tmp_path / "in"), tmp_path / "out")
    data = data_of(page)
    assert len(list((tmp_path / "out/pictures").iterdir())) == 10
    assert len(data["samples"]) == 30
    first = data["samples"][0]
    assert (tmp_path / "out" / first["p"][0]).is_file()
    assert first["t"] == "dog"
    assert first["cmd"].startswith("revisit generate ")
    assert "--prompt 'What is in picture 0?' --html decode.html" in first["cmd"]
    assert [sample.get("d", 0) for sample in data["samples"][:5]] == [1, 0, 0, 0, 1]


def test_samples_are_ordered_as_a_reader_would(tmp_path: Path) -> None:
    assert sorted(["10", "9", "b2", "b10", "1"], key=natural_order) == ["1", "9", "10", "b2", "b10"]


def test_data_that_is_elsewhere() -> None:
    """A run keeps its data folder as it was written, often relative to where it ran."""
    notes: list[str] = []
    assert not items_of({"name": "chair", "label": "chair", "options": {}}, "no/such/folder", notes)
    assert "there is no no/such/folder here" in notes[0]


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match="does not exist: give the --out folder"):
        build(tmp_path, tmp_path / "out")


@pytest.mark.browser
@pytest.mark.parametrize(("count", "width", "scheme"), [(2000, 1280, "light"), (10000, 390, "dark")])
def test_in_a_browser(seen: Any, tmp_path: Path, count: int, width: int, scheme: str) -> None:
    """Opened from disk: less than two seconds of its own work, filters, keys, links, nothing fetched from elsewhere."""
    page = write("run", *made(count, tmp_path / "in"), tmp_path / "out")
    seen.page.set_viewport_size({"width": width, "height": 844})
    seen.page.emulate_media(color_scheme=scheme)
    tools = seen.page.context.new_cdp_session(seen.page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    seen.page.goto(page.as_uri())
    seen.page.locator(".detail img").wait_for()
    metrics = {entry["name"]: entry["value"] for entry in tools.send("Performance.getMetrics")["metrics"]}
    print(f"{count} samples: {metrics['TaskDuration']:.2f} s of work")
    assert 0 < metrics["TaskDuration"] < 2
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    image = seen.page.locator(".detail img")
    assert image.evaluate("image => image.naturalWidth") == 80
    assert image.bounding_box()["width"] > 300  # shown large
    assert seen.page.locator("h1").inner_text() == "run · 3 methods"
    assert [text.split() for text in seen.page.locator(".totals tr").all_inner_texts()[1:]] == [
        ["greedy", "25.0"],
        ["revisit", "25.0"],
        ["vcd", "0", "of", "8", "answers"],
    ]
    chips = [text.strip() for text in seen.page.locator(".chip").all_inner_texts()]
    assert chips == ["no hallucination", "hallucinated", "not answered"]
    assert seen.page.locator(".list li").first.locator(".dot.open").get_attribute("aria-label") == "vcd: not answered"
    status = seen.page.locator(".count")
    assert status.inner_text() == f"{count:,} of {count:,} samples, ordered by id"
    assert "At the right of each row: greedy, revisit, vcd (" in seen.page.locator(".side").inner_text()
    seen.page.check("#disagree")
    assert status.inner_text() == f"{count // 4:,} of {count:,} samples, ordered by id"
    assert seen.page.locator("mark").all_inner_texts() == ["cat"]
    seen.page.select_option("#wrong", "0")
    assert status.inner_text() == f"0 of {count:,} samples, ordered by id"
    seen.page.select_option("#wrong", "1only")
    assert status.inner_text() == f"{count // 4:,} of {count:,} samples, ordered by id"
    seen.page.fill("#text", f"picture {count - 4}?")
    seen.page.get_by_text(f"1 of {count:,} samples").wait_for()
    assert f"chair · {count - 4}" in seen.page.locator(".detail h2").inner_text()
    link = seen.page.url
    assert link.split("#")[1].startswith(f"sample=chair%3A{count - 4}&disagree=1&wrong=1only&text=picture+")
    seen.page.goto("about:blank")
    seen.page.goto(link)  # the link shows the same samples
    assert status.inner_text() == f"1 of {count:,} samples, ordered by id"
    assert seen.page.input_value("#wrong") == "1only"
    seen.page.goto("about:blank")
    seen.page.goto(page.as_uri() + "#sample=chair%3A7")
    assert "chair · 7" in seen.page.locator(".detail h2").inner_text()
    seen.page.keyboard.press("ArrowDown")
    assert "chair · 8" in seen.page.locator(".detail h2").inner_text()
    assert seen.errors == []
    assert {url.split(":")[0] for url in seen.requests} <= {"file", "data"}
