"""`revisit view`: which samples are wrong, what the page has, and that ten thousand of them can be browsed."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
from fake_grid import HashEngine, Letters, Shift, make_config, write_items

import families
from revisit import RevisitError
from revisit.decoding.method_id import MethodId
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks import language
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.benchmarks.chair import Chair
from revisit.eval.compare import compare
from revisit.eval.log import Log, Request, read_logs
from revisit.eval.report.sample_browser import PageColumns, Sample, natural_order, read_samples, view, write
from revisit.eval.run import run
from revisit.eval.spec import Spec
from revisit.io.files import encode, file_digest, read_lines
from revisit.paper.report import compare_runs, find_runs

LOWER, HIGHER = Metric("CHAIRs", "lower", 100, 1), Metric("accuracy", "higher", 100, 1)


def scores(headline: str, **shown: Metric) -> Scores:
    return Scores({}, shown=shown, headline=headline)


def verdict(terms: dict[str, tuple[float, float]], made: Scores) -> tuple[str, bool]:
    return replace(made, per_item={name: {"q": value} for name, value in terms.items()}).verdict("q")


def test_one_verdict_by_the_headline_metric() -> None:
    chair = scores("CHAIRs", CHAIRs=LOWER, CHAIRi=LOWER, Recall=HIGHER)
    assert verdict({"CHAIRs": (1, 1), "Recall": (3, 3)}, chair) == ("hallucinated", True)
    assert verdict({"Recall": (1, 3), "CHAIRs": (0, 1)}, chair) == ("no hallucination", False)
    assert verdict({"errors": (1, 1)}, scores("errors", errors=LOWER)) == ("wrong", True)
    pope = scores("F1", accuracy=HIGHER, F1=HIGHER)
    assert verdict({"coco_random/accuracy": (0, 1)}, pope) == ("wrong", True)  # F1 is not counted per item
    assert verdict({"coco_random/accuracy": (1, 1)}, pope) == ("right", False)
    assert verdict({"accuracy": (0.6, 1)}, pope) == ("score 60.0", True)  # as the tables print it
    assert verdict({}, pope) == ("", False)


def log(method: str, value: float | None, answers: int = 8, **spec: Any) -> Log:
    """A log of CHAIR, complete if it has a value."""
    identity = {**HashEngine("m").identity(8, []), **spec}
    own = Spec.of(identity, Shift(), Chair(), Decoding()).model_copy(update={"method": MethodId(method)})
    made = Log(Path(f"{method}{spec}"), own)
    made.requests.append(Request(time="", items=8, items_hash="", environment={}))
    if value is not None:
        items = {str(n): "" for n in range(answers)}
        made.scores = Scores(
            {"CHAIRs": value}, shown={"CHAIRs": LOWER}, intervals={"CHAIRs": None}, headline="CHAIRs", items=items
        )
    return made


def test_totals_are_on_the_printed_scale() -> None:
    found = PageColumns([log("greedy", 0.5), log("revisit", 0.25), log("vcd", None)]).totals()["chair"]
    assert found["metric"] == "CHAIRs ↓"
    assert found["of"][0] == {"text": "50.0", "best": 0, "at": [50.0]}
    assert found["of"][1] == {"text": "25.0", "best": 1, "at": [25.0]}
    assert found["of"][2] == {"open": "0 of 8"}


def test_runs_with_other_settings_have_columns_of_their_own(tmp_path: Path) -> None:
    """Lengths, sampling, engines: none of them overwrites the answers of another."""
    data = write_items(tmp_path / "data", 6)
    config = make_config(tmp_path / "out", data, model="m1", method=Shift())
    for change in ({"max_new_tokens": 3}, {"max_new_tokens": 5}, {"max_new_tokens": 5, "sample": True}):
        run(config.replace(**change), engine_for=HashEngine)
    columns, samples, _ = read_samples(read_logs(tmp_path / "out"))
    assert [len(sample.answers) for sample in samples] == [3] * 6
    assert {len(answer["x"]) for sample in samples for answer in sample.answers.values()} == {3, 5}
    assert len({column["settings"] for column in columns.methods}) == 3
    engines = PageColumns([log("greedy", 0.5), log("greedy", 0.25, engine="vllm")])
    assert [column["settings"] for column in engines.methods] == ["engine hash", "engine vllm"]


def test_a_method_has_one_column_over_benchmarks_of_different_length(tmp_path: Path) -> None:
    class Words(Letters):
        name = "words"
        max_new_tokens = 4

    data = write_items(tmp_path / "data", 3)
    logs = run(make_config(tmp_path / "out", data, model="m1", benchmark=(Letters(), Words())), engine_for=HashEngine)
    assert [method["settings"] for method in PageColumns(logs).methods] == ["", "by=3"]


def made(count: int, folder: Path) -> tuple[PageColumns, list[Sample]]:
    """`count` samples over ten images; the second method is wrong at every fourth, and disagrees there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(10):
        paths.append(folder / f"{number}.png")
        families.image(number, (80, 60)).save(paths[-1])
    columns = PageColumns([log("greedy", 0.25), log("revisit", 0.25), log("vcd", None)])
    samples = []
    for number in range(count):
        wrong = number % 4 == 0
        text = "A dog and a cat." if wrong else "A dog."
        verdicts = {"v": "hallucinated", "bad": 1} if wrong else {"v": "no hallucination"}
        second = {"x": text, "w": [(12, 15)] if wrong else [], "c": 1, "n": 5, **verdicts}
        first = {"x": "A dog.", "w": [], "v": "no hallucination", "c": 0, "n": 5}
        prompt = f"What is in picture {number}?"
        path = paths[number % 10]
        samples.append(Sample("chair", str(number), prompt, {path: file_digest(path)}, "dog", {0: first, 1: second}))
    return columns, samples


def test_controls_do_not_count_as_methods_that_disagree() -> None:
    right, wrong = {"x": "A dog.", "v": "right"}, {"x": "A cat.", "v": "wrong"}
    methods = [{"method": MethodId("greedy", control=control)} for control in ("", "", "no image")]
    assert not Sample("pope", "1", "?", answers={0: right, 1: right, 2: wrong}).disagree(methods)
    assert Sample("pope", "1", "?", answers={0: right, 1: wrong}).disagree(methods)


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_images_are_copied_once_and_samples_are_in_natural_order(tmp_path: Path) -> None:
    data = data_of(write("run", *made(30, tmp_path / "in"), tmp_path / "out"))
    assert len(list((tmp_path / "out/images").iterdir())) == 10
    assert len(data["samples"]) == 30
    first = data["samples"][0]
    assert (tmp_path / "out" / first["p"][0]).is_file()
    assert first["t"] == "dog"
    assert first["cmd"].startswith("revisit generate ")
    assert "--prompt 'What is in picture 0?' --html decode.html" in first["cmd"]
    assert [sample.get("d", 0) for sample in data["samples"][:5]] == [1, 0, 0, 0, 1]
    assert sorted(["10", "9", "b2", "b10", "1"], key=natural_order) == ["1", "9", "10", "b2", "b10"]


@pytest.fixture
def chair(tmp_path: Path) -> Path:
    """A run of CHAIR on two images, by an engine without a model."""
    (tmp_path / "data/val2014").mkdir(parents=True)
    (tmp_path / "data/ground_truth.json").write_text('{"1": ["dog"], "2": ["cat"]}')
    for number in (1, 2):
        Image.new("RGB", (4, 4)).save(tmp_path / f"data/val2014/COCO_val2014_{number:012d}.jpg")
    config = make_config(tmp_path / "out", tmp_path / "data", model="m1", method=Shift(), benchmark=Chair())
    run(config, engine_for=HashEngine)
    return tmp_path


@pytest.mark.usefixtures("nltk_data")
def test_pages_and_tables_need_the_logs_alone(
    chair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise RevisitError("NLTK data not found.")

    monkeypatch.setattr(Chair, "load", missing)
    monkeypatch.setattr(language, "require_data", missing)
    data = data_of(view(read_logs(chair / "out"), chair / "view"))
    assert [(len(sample["p"]), sample["t"], "w" in sample["a"]["0"]) for sample in data["samples"]] == [
        (1, "dog", True),
        (1, "cat", True),
    ]
    (chair / "data").rename(chair / "moved")
    for file in (chair / "out").rglob("*"):
        assert file.is_dir() or file.suffix == ".jsonl" or file.unlink() is None
    assert compare(read_logs(chair / "out"))[0].n == 2
    assert compare_runs(find_runs(chair / "out"), 99)
    data = data_of(view(read_logs(chair / "out"), chair / "view"))
    assert [(len(sample["p"]), sample["t"]) for sample in data["samples"]] == [(0, "dog"), (0, "cat")]
    assert "2 images are not shown" in data["notes"][0]
    assert "use --data" in caplog.text
    data = data_of(view(read_logs(chair / "out"), chair / "view", chair / "moved"))
    assert [len(sample["p"]) for sample in data["samples"]] == [1, 1]


@pytest.mark.usefixtures("nltk_data")
def test_new_labels_and_older_logs_are_described_again_without_decoding(chair: Path) -> None:
    (log,) = read_logs(chair / "out")
    header, *answers = read_lines(log.path)[0]
    new = ("target", "image_hashes")
    older = [header, *({k: v for k, v in line.items() if k not in new} for line in answers if "scores" not in line)]
    log.path.write_bytes(b"".join(map(encode, older)))
    _, samples, notes = read_samples(read_logs(chair / "out"))
    assert [(dict(sample.images), sample.truth) for sample in samples] == [({}, "")] * 2
    assert "older version" in " ".join(notes)
    for truth in ("dog", "cup"):
        (chair / "data/ground_truth.json").write_text(json.dumps({"1": [truth], "2": ["cat"]}))
        config = make_config(chair / "out", chair / "data", model="m1", method=Shift(), benchmark=Chair())
        engine = HashEngine("m1")
        (log,) = run(config, engine_for=lambda _: engine)  # noqa: B023
        assert engine.batches == []
        _, samples, notes = read_samples([log])
        assert [(len(sample.images), sample.truth) for sample in samples] == [(1, truth), (1, "cat")]
        assert read_samples(read_logs(chair / "out"))[1:] == (samples, notes)


@pytest.mark.usefixtures("nltk_data")
def test_images_that_were_not_evaluated_are_not_copied(chair: Path) -> None:
    (log,) = read_logs(chair / "out")
    Image.new("RGB", (9, 9)).save(chair / "secret.png")
    stored = log.answers
    log.answers = {key: answer.model_copy(update={"images": ("../secret.png",)}) for key, answer in log.answers.items()}
    with pytest.raises(RevisitError, match="outside"):
        view([log], chair / "view")
    log.requests = [log.request.model_copy(update={"data": "/"})]
    for name, hashes in (
        (str(chair / "secret.png")[1:], None),
        (str(chair / "secret.png")[1:], ()),
        ("dev/zero", None),
    ):
        changes = {"images": (name,), **({} if hashes is None else {"image_hashes": hashes})}
        log.answers = {key: answer.model_copy(update=changes) for key, answer in stored.items()}
        view([log], chair / "view")
        assert list((chair / "view/images").iterdir()) == []


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
    assert seen.page.locator("h1").inner_text() == f"The methods disagree on {count // 4:,} of {count:,} samples"
    assert [text.split() for text in seen.page.locator(".totals tr").all_inner_texts()[1:]] == [
        ["greedy", "25.0"],
        ["revisit", "25.0"],
        ["vcd", "0", "of", "8", "answers"],
    ]
    chips = [text.strip() for text in seen.page.locator(".chip").all_inner_texts()]
    assert chips == ["no hallucination", "hallucinated", "not answered"]
    assert seen.page.locator(".list li").first.locator(".dot.open").get_attribute("aria-label") == "vcd: not answered"
    status = seen.page.locator(".count")
    assert seen.page.is_checked("#disagree")
    seen.page.uncheck("#disagree")
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


@pytest.mark.browser
def test_a_long_answer_is_shortened(seen: Any, tmp_path: Path) -> None:
    columns, samples = made(1, tmp_path / "in")
    samples[0].answers[1] |= {"x": "A cat" + "x" * 99_995, "w": [(2, 5), (50_000, 50_003)]}
    seen.page.goto(write("run", columns, samples, tmp_path / "out").as_uri())
    assert "xx… (90,000 more characters)" in seen.page.locator(".column").nth(1).inner_text()
    assert seen.page.locator("mark").all_inner_texts() == ["cat"]
    assert seen.errors == []
