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
from revisit.report.sample_browser import Columns, Sample, build, is_wrong, natural_order, write

LOWER, HIGHER = {"better": "lower"}, {"better": "higher"}


def test_wrong_by_the_headline_metric() -> None:
    metrics = {"CHAIRs": LOWER, "CHAIRi": LOWER, "Recall": HIGHER}
    assert is_wrong({"CHAIRs": (1, 1), "Recall": (3, 3)}, metrics, "CHAIRs")
    assert not is_wrong({"CHAIRs": (0, 1), "Recall": (1, 3)}, metrics, "CHAIRs")  # recall is not the headline
    parts = {"accuracy": HIGHER, "F1": HIGHER}
    assert is_wrong({"coco_random/accuracy": (0, 1)}, parts, "F1")  # F1 is not counted per item
    assert not is_wrong({"coco_random/accuracy": (1, 1)}, parts, "F1")
    assert not is_wrong({}, parts, "F1")


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
        columns.of({"model": {"name": "m"}, "seed": 0, "method": {"label": label, "name": label, "settings": {}}})
    samples = []
    for number in range(count):
        wrong = number % 4 == 0
        item = Item(str(number), f"What is in picture {number}?", (paths[number % 10],), {"ground_truth": ["dog"]})
        text = "A dog and a cat." if wrong else "A dog."
        second = {"x": text, "w": [(12, 15)] if wrong else [], "s": {"CHAIRs": float(wrong)}, "c": 1, "n": 5}
        first = {"x": "A dog.", "w": [], "s": {"CHAIRs": 0.0}, "c": 0, "n": 5}
        samples.append(Sample("chair", item, item.prompt, {0: first, 1: {**second, **({"bad": 1} if wrong else {})}}))
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
    assert seen.page.locator(".detail img").evaluate("image => image.naturalWidth") == 80
    status = seen.page.locator(".count")
    assert status.inner_text() == f"{count:,} of {count:,} samples, ordered by id"
    assert "At the right of each row: greedy, revisit" in seen.page.locator(".side").inner_text()
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
    assert seen.page.url.endswith(f"#sample=chair%3A{count - 4}")
    seen.page.goto(page.as_uri() + "#sample=chair%3A7")
    seen.page.reload()
    assert "chair · 7" in seen.page.locator(".detail h2").inner_text()
    seen.page.keyboard.press("ArrowDown")
    assert "chair · 8" in seen.page.locator(".detail h2").inner_text()
    assert seen.errors == []
    assert {url.split(":")[0] for url in seen.requests} <= {"file", "data"}
