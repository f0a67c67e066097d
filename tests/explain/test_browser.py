"""The pages in a real browser, opened from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import families
import made_up
import revisit
from revisit.decoding.method_id import MethodId
from revisit.embedded.samples import sample
from revisit.eval.benchmarks.base import Metric
from revisit.eval.compare import Comparison, Value
from revisit.eval.report.comparisons import comparison_sections
from revisit.eval.report.document import Document, to_html
from revisit.pages.answers import AnswerPage

pytestmark = pytest.mark.browser


def at_rest(seen: Any) -> None:
    """Check that there were no errors and no request except for the file itself."""
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith("data:")] == [seen.path.as_uri()]


def spot(target: Any) -> tuple[float, float, float, float]:
    """Return the highlight's left, top, right and bottom as shares of the image."""
    stage = target.locator(".stage").bounding_box()
    box = target.locator(".spot:visible").bounding_box()
    left, top = (box["x"] - stage["x"]) / stage["width"], (box["y"] - stage["y"]) / stage["height"]
    return left, top, left + box["width"] / stage["width"], top + box["height"] / stage["height"]


def place(token: int, rows: int = 8, columns: int = 12) -> tuple[float, float, float, float]:
    row, column = divmod(token, columns)
    return column / columns, row / rows, (column + 1) / columns, (row + 1) / rows


def show(seen: Any, folder: Path, page: AnswerPage, anchor: str = "") -> Any:
    """Write a page and open it."""
    seen.path = page.write(folder / "decode.html")
    seen.page.goto(seen.path.as_uri() + anchor)
    return seen.page


@pytest.fixture
def opened(seen: Any, tmp_path: Path) -> Any:
    show(seen, tmp_path, made_up.page())
    return seen


def test_clicking_a_token_moves_the_highlight_to_its_patch(opened: Any) -> None:
    tokens = opened.page.locator(".answer").first.locator(".tok")
    for step in (0, 3, 11):
        tokens.nth(step).click()
        assert spot(opened.page) == pytest.approx(place(made_up.selected(step, 96)), abs=0.01)
        assert tokens.nth(step).get_attribute("aria-pressed") == "true"
        assert f"Step {step + 1}:" in opened.page.locator(".why h2").inner_text()
    tokens.nth(7).hover()
    assert spot(opened.page) == pytest.approx(place(made_up.selected(7, 96)), abs=0.01)
    opened.page.mouse.move(5, 5)
    assert spot(opened.page) == pytest.approx(place(made_up.selected(11, 96)), abs=0.01)
    tokens.nth(2).click()  # nothing was decided here
    assert opened.page.locator(".spot:visible").count() == 0
    assert "Only one token was plausible" in opened.page.locator(".where").inner_text()
    at_rest(opened)


def test_keyboard_navigation(opened: Any) -> None:
    keyboard = opened.page.keyboard
    assert "Step 2:" in opened.page.locator(".why h2").inner_text()  # where the method first mattered
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert spot(opened.page) == pytest.approx(place(made_up.selected(3, 96)), abs=0.01)
    keyboard.press("ArrowLeft")
    keyboard.press("n")
    assert "Step 12:" in opened.page.locator(".why h2").inner_text()
    keyboard.press("p")
    assert "Step 2:" in opened.page.locator(".why h2").inner_text()
    keyboard.press("End")
    assert "Step 18:" in opened.page.locator(".why h2").inner_text()
    focused = "document.activeElement.closest('.answer').querySelector('h2').textContent"
    assert opened.page.evaluate(focused).startswith("revisit")
    keyboard.press("ArrowDown")
    assert opened.page.evaluate(focused) == "greedy"
    keyboard.press("Home")
    keyboard.press("ArrowUp")
    assert "Step 1:" in opened.page.locator(".why h2").inner_text()
    at_rest(opened)


def test_one_tab_stop_per_answer_group(opened: Any) -> None:
    """Tokens are one stop, Tab leaves them, and every button can be reached."""
    assert opened.page.locator('.tok[tabindex="0"]').count() == 1
    names = []
    for _ in range(13):
        opened.page.keyboard.press("Tab")
        names.append(
            opened.page.evaluate("document.activeElement.className + '|' + document.activeElement.textContent")
        )
    assert any(name.endswith("|Heat map") for name in names)
    assert any(name.startswith("tok") for name in names)
    assert any("other0" in name for name in names)  # the list of changes
    at_rest(opened)


def test_the_heat_map_is_brighter_where_a_patch_agrees_and_can_be_hidden(opened: Any) -> None:
    opened.page.locator(".answer").first.locator(".tok").nth(0).click()
    pixel = """([x, y]) => { const c = document.querySelector('.stage canvas');
      const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
      pen.drawImage(c, -Math.round(x * c.width), -Math.round(y * c.height));
      return [...pen.getImageData(0, 0, 1, 1).data]; }"""
    left, top, right, bottom = place(made_up.selected(0, 96))
    hot = opened.page.evaluate(pixel, [(left + right) / 2, (top + bottom) / 2])
    elsewhere = [(right + 1.5 / 12) % 1, (top + bottom) / 2]
    cold = opened.page.evaluate(pixel, elsewhere)
    assert 0 < cold[3] < hot[3] < 255  # translucent
    assert sum(hot[:3]) > sum(cold[:3]) + 100
    assert "saturate" in opened.page.locator(".stage img").evaluate("e => getComputedStyle(e).filter")
    opened.page.keyboard.press("h")
    assert opened.page.locator(".stage img").evaluate("e => getComputedStyle(e).filter") == "none"
    assert opened.page.evaluate(pixel, elsewhere)[3] == 0
    assert opened.page.get_by_role("button", name="Heat map").get_attribute("aria-pressed") == "false"
    button = opened.page.get_by_role("button", name="Image", exact=True)
    for press, alone in ((button.click, True), (lambda: opened.page.keyboard.press("o"), False)):
        press()
        assert button.get_attribute("aria-pressed") == str(alone).lower()
        assert (opened.page.locator(".stage > :not(img):visible").count() == 0) is alone
        assert opened.page.locator(".stage img").is_visible()
    at_rest(opened)


def test_the_table_explains_why_neither_favorite_won(seen: Any, tmp_path: Path) -> None:
    decode = made_up.page()
    step = decode.answers[0].steps[1]
    assert step.vision is not None
    assert step.texts is not None
    step.base[1], step.vision[1], step.final[1] = 0.35, 0.05, 0.1
    step.texts[11] = " wall"
    step.base[11], step.vision[11], step.final[11] = 0.0003, 0.75, 0.001
    opened = show(seen, tmp_path, decode, "#step=2")
    first, second = opened.locator(".reason").all_inner_texts()
    gives = "The vision token gives it 5.00 % and “small” 70.0 %, so “small” wins."
    assert first == f"The model prefers “other0” (35.0 %). {gives}"
    assert second == "The vision token prefers “wall” (75.0 %). The model gives “wall” 0.03 %, so it cannot win."
    opened.keyboard.press("Home")  # here all agree
    assert opened.locator(".reason").count() == 0


def test_candidates_and_changes_are_shown(opened: Any) -> None:
    opened.page.get_by_role("button", name="12 near other0").click()
    row = opened.page.locator(".cands tr.chosen td")
    assert row.nth(0).inner_text().strip() == "near"
    assert [row.nth(n).inner_text() for n in (1, 2, 3)] == ["25.0", "70.0", "80.0"]
    assert opened.page.locator(".cands tbody tr").nth(1).get_attribute("class") == "alone"
    assert opened.page.locator(".cands tr.alone td").nth(0).inner_text().strip() == "other0"
    widths = [row.nth(n).evaluate("e => getComputedStyle(e.firstChild, '::before').width") for n in (1, 2, 3)]
    small, middle, large = (float(width.removesuffix("px")) for width in widths)
    assert middle / small == pytest.approx(0.7 / 0.25, rel=0.05)
    assert large / small == pytest.approx(0.8 / 0.25, rel=0.05)
    at_rest(opened)


def test_thoughts_are_marked(seen: Any, tmp_path: Path) -> None:
    decode = made_up.page()
    for step in decode.answers[0].steps[:2]:
        step.thought = True
    assert show(seen, tmp_path, decode).locator(".tok.thought").count() == 2


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_and_contrast(opened: Any, width: int, scheme: str) -> None:
    opened.page.set_viewport_size({"width": width, "height": 844})
    opened.page.emulate_media(color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    colors = opened.page.evaluate("['color', 'backgroundColor'].map(p => getComputedStyle(document.body)[p])")
    light = [sum(map(int, color[4:-1].split(",")[:3])) / 765 for color in colors]
    assert (light[0] > 0.8 and light[1] < 0.2) if scheme == "dark" else (light[0] < 0.2 and light[1] > 0.8)
    image = opened.page.locator(".stage").bounding_box()
    assert image["width"] / image["height"] == pytest.approx(1.5, rel=0.02)
    at_rest(opened)


def test_on_a_phone_the_candidates_do_not_cover_the_word(opened: Any) -> None:
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()

    def covered() -> bool:
        word, sheet = page.locator('.tok[aria-pressed="true"]').bounding_box(), page.locator(".why").bounding_box()
        image = page.locator(".look").bounding_box()
        return bool(word["y"] + word["height"] > sheet["y"] or word["y"] < image["y"] + image["height"])

    assert not page.locator(".cands").is_visible()
    assert page.locator(".why h2").is_visible()
    assert not covered()
    page.get_by_role("button", name="Candidates").click()
    assert page.locator(".cands").is_visible()
    assert not covered()
    page.locator(".answer").first.locator(".tok").last.click()
    assert not covered()
    page.get_by_role("button", name="Close ×").click()
    assert not page.locator(".cands").is_visible()
    assert opened.errors == []


def test_the_last_column_is_explained_by_the_weight_of_the_step(seen: Any, tmp_path: Path) -> None:
    decode = made_up.page()
    decode.answers[0].trace.method["neighbors"] = 4
    for step in decode.answers[0].steps:
        step.weight = 0.442
    opened = show(seen, tmp_path, decode)
    told = opened.locator(".formula").inner_text()
    assert "model × vision token0.442" in told
    assert "the mean of 4 patches" in told
    assert "with the 3 next best; layer 6" in opened.locator(".where").inner_text()
    assert opened.locator(".near.chosen").count() == 3
    assert opened.locator(".near").all_inner_texts() == ["2", "3", "4", "5"]


def test_a_long_trace_needs_few_elements(seen: Any, tmp_path: Path) -> None:
    """512 tokens × 2,000 vision tokens; an element for each pair would take the browser many seconds."""
    layout = made_up.even_layout((480, 320), 40, 50)
    tools = seen.page.context.new_cdp_session(seen.page)
    tools.send("Performance.enable")
    show(seen, tmp_path, AnswerPage([families.image(1)], "?", "m", layout, [made_up.answer(512, 2000)]))
    seen.page.locator(".spot:visible").wait_for()
    metrics = {entry["name"]: entry["value"] for entry in tools.send("Performance.getMetrics")["metrics"]}
    assert 0 < metrics["Nodes"] < 10_000
    assert seen.page.locator(".tok").count() == 512
    at_rest(seen)


def test_the_lens_page(seen: Any, tmp_path: Path) -> None:
    model, processor = families.build("llava")
    looked = revisit.lens((model, processor), families.image(1, (60, 60)), ["a", "b", "c"])
    seen.path = looked.save(tmp_path / "lens.html")
    seen.page.goto(seen.path.as_uri())
    maps, top = looked.readings[1].maps, looked.readings[1].top
    assert maps is not None  # map, patch and sentence begin with the word that has the largest share of a patch
    strongest = int((maps[4] * 255).round().amax(0).argmax())
    assert seen.page.locator('.words [aria-pressed="true"]').inner_text().split()[0] == "abc"[strongest]
    assert spot(seen.page) == pytest.approx(place(int((maps[4, :, strongest] * 255).round().argmax()), 4, 4), abs=0.01)
    assert "no patch has more of it" in seen.page.locator(".where").inner_text()
    assert "Shares among these 3 words only" in seen.page.locator(".card").inner_text()
    stage = seen.page.locator(".stage").bounding_box()
    seen.page.mouse.click(stage["x"] + stage["width"] * 0.9, stage["y"] + stage["height"] * 0.1)
    assert spot(seen.page) == pytest.approx(place(3, 4, 4), abs=0.01)
    best = looked.readings[1].entries[int(top[4, 3, 0])]
    word, share = "abc"[strongest], f"{100 * float(maps[4, 3, strongest]):.1f} %"
    told = seen.page.locator(".where").inner_text()
    assert told.startswith(f"{word} has {share} of the patch at row 1, column 4 at layer 4")
    assert (f"where {best} is likeliest" in told) == (best != word)
    highest = int(maps[4, :, strongest].argmax())
    assert (f"row {highest // 4 + 1}, column {highest % 4 + 1}" in told) == (highest != 3)
    seen.page.keyboard.press("ArrowDown")
    assert spot(seen.page) == pytest.approx(place(7, 4, 4), abs=0.01)
    seen.page.keyboard.press("[")
    assert seen.page.locator("output").inner_text() == "3 of 4"
    shown = seen.page.locator(".predictions tr.now td").first.inner_text()
    assert shown.split() == [
        looked.readings[1].entries[int(top[3, 7, 0])],
        f"{100 * float(looked.readings[1].probabilities[3, 7, 0]):.1f}",
    ]
    seen.page.get_by_role("button", name="all tokens").click()
    assert seen.page.locator(".predictions tr").count() == 5
    assert "is the likeliest token of the patch" in seen.page.locator(".where").inner_text()
    seen.page.set_viewport_size({"width": 390, "height": 844})
    table = seen.page.locator(".predictions").bounding_box()
    cells = [cell.bounding_box() for cell in seen.page.locator(".predictions tr").first.locator("td").all()]
    assert all(cell["x"] + cell["width"] <= table["x"] + table["width"] + 1 for cell in cells)
    at_rest(seen)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_check_shows_the_patch_of_the_word_under_the_pointer(seen: Any, tmp_path: Path, width: int) -> None:
    found = revisit.check("tiny", sample("demo").path, f"A {sample('demo').nouns[0]} and a surfboard.")
    seen.path = found.save(tmp_path / "check.html")
    seen.page.set_viewport_size({"width": width, "height": 700})
    seen.page.goto(seen.path.as_uri())
    assert seen.page.locator("h1").inner_text() == "The image does not support ‘surfboard’"
    assert seen.page.locator("rect:visible").count() == 0
    seen.page.locator(".word").first.hover()
    assert seen.page.locator("rect:visible").count() == 1
    seen.page.locator(".text .flagged").hover()
    assert seen.page.locator("rect:visible").count() == 0  # its best patch supports nothing
    assert seen.page.locator(".text .flagged").all_text_contents() == ["surfboard"]
    track, bar = seen.page.locator(".track").first.bounding_box(), seen.page.locator(".track i").first.bounding_box()
    assert bar["width"] / track["width"] == pytest.approx(found.checked[0].support, abs=0.02)
    dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.page.get_by_role("button", name="Light / dark").click()
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    at_rest(seen)


def test_a_comparison_fits_a_screen_and_a_phone(seen: Any, tmp_path: Path) -> None:
    """Nothing is cut off at 1280 pixels; on a phone tables scroll and the page does not."""
    greedy = MethodId("greedy")
    long = MethodId("revisit", {"weight": "agreement", "neighbors": 8, "layers": "middle"})
    metrics = tuple(Metric(name, show=100, decimals=1) for name in ("accuracy", "precision", "recall", "F1"))
    values = {metric.name: Value(0.8, 0.7, 0.9) for metric in metrics}
    methods = {greedy: values, long: values}
    table = Comparison("some-organization/a-model-with-a-long-name", "pope", "v1", 9, metrics, methods, greedy)
    path = tmp_path / "compare.html"
    path.write_text(to_html(Document("Results", "", comparison_sections([table]))))
    for width in (1280, 390):
        seen.page.set_viewport_size({"width": width, "height": 844})
        seen.page.goto(path.as_uri())
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    seen.page.set_viewport_size({"width": 1280, "height": 844})
    boxes = seen.page.locator(".scroll").evaluate_all("all => all.map((e) => e.scrollWidth <= e.clientWidth)")
    assert boxes == [True, True]
    assert seen.page.locator("td").first.inner_text() == "greedy"
    assert seen.page.locator("tr", has_text="revisit¹").count() == 2
    assert "¹ weight=agreement, neighbors=8, layers=middle." in seen.page.locator(".cap").first.inner_text()
    assert seen.errors == []


def test_the_docs_search_worker_runs_on_a_page_from_disk(seen: Any, tmp_path: Path) -> None:
    (tmp_path / "shim.js").write_text((Path(__file__).parents[2] / "docs/iframe-worker.js").read_text("utf-8"), "utf-8")
    (tmp_path / "worker.js").write_text("addEventListener('message', (event) => postMessage(2 * event.data))", "utf-8")
    page = tmp_path / "page.html"
    page.write_text("<body><script src='shim.js'></script><p></p></body>", "utf-8")
    seen.page.goto(page.as_uri())
    doubled = seen.page.evaluate(
        """(number) => new Promise((done) => {
        const worker = new Worker("worker.js");
        worker.addEventListener("message", (event) => done(event.data));
        worker.postMessage(number);
    })""",
        21,
    )
    assert (doubled, seen.errors) == (42, [])
