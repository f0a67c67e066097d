"""`revisit ui` end to end in a real browser: upload, ask with two methods, inspect, change alpha, download."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import families
from revisit.methods.revisit import ReVisiT
from revisit.models.geometry import layout_of
from revisit.models.prompts import prepare
from revisit.serve.app import Service, build
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits
from revisit.serve.ui import add_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Service]]:
    """Serve the page on a free port of loopback, with a tiny random model."""
    service = Service(Decoder(*families.build("llava")), "llava", ReVisiT(), Limits())
    app = build(service)
    add_page(app, service)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}", service
    running.should_exit = True
    thread.join(20)


@pytest.fixture
def opened(seen: Any, server: tuple[str, Service], tmp_path: Path) -> Any:
    seen.image = tmp_path / "image.png"
    families.image(1, (90, 60)).save(seen.image)
    seen.page.goto(server[0])
    seen.page.set_default_timeout(120_000)
    seen.page.get_by_text("128 × 128").wait_for()  # the page begins with the answered sample
    seen.page.click("#stop")
    seen.page.get_by_text("Stopped.").wait_for()
    return seen


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slow a model down and keep it from ending, so that a test can act in the middle of an answer."""
    model, _ = families.build("llava")
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    handle = model.register_forward_hook(lambda *_: time.sleep(0.05))
    yield
    handle.remove()


def give(page: Any, path: Path) -> None:
    page.set_input_files("#file", str(path))


def ask(page: Any, tokens: int = 6) -> None:
    page.fill("#length", str(tokens))
    page.click("#go")


def done(page: Any) -> None:
    page.get_by_text("Done. Click a word").wait_for()


def test_a_fifth_method_is_rejected_in_a_sentence(opened: Any) -> None:
    page = opened.page
    for name in ("vcd", "m3id", "dola"):  # revisit and greedy are there
        page.get_by_label("Add a method").select_option(name)
    assert page.locator(".method").count() == 4
    assert page.locator(".tell.bad").inner_text() == "At most four methods can be compared; remove one first."


def test_upload_ask_stream_inspect_change_download(opened: Any, server: tuple[str, Service], tmp_path: Path) -> None:
    page, address = opened.page, server[0]
    give(page, opened.image)
    page.get_by_text("90 × 60").wait_for()
    ask(page)
    done(page)
    assert page.locator(".answer h2").all_inner_texts() == ["revisit", "greedy"]
    shown = page.locator(".answer").first.locator(".tok")
    assert shown.count() == 6
    assert "s" not in page.locator(".answer .facts").first.inner_text().replace("tokens", "")  # no seconds
    # inspect: the highlight lies where the recorded vision token lies
    steps = page.evaluate("studio.viewer.data.answers[0].steps")
    number = next(n for n, step in enumerate(steps) if "i" in step)
    shown.nth(number).click()
    model, processor = families.build("llava")
    image = families.image(1, (90, 60))
    inputs = prepare(processor, ["What is this?"], [[image]], device=model.device)
    region = layout_of(model, processor, [[image]], inputs).region(steps[number]["i"])
    assert region is not None
    stage, spot = page.locator(".stage").bounding_box(), page.locator(".spot:visible").bounding_box()
    assert (spot["x"] - stage["x"]) / stage["width"] * 90 == pytest.approx(region.box[0], abs=0.6)
    assert (spot["y"] - stage["y"]) / stage["height"] * 60 == pytest.approx(region.box[1], abs=0.6)
    # another alpha: asked again at once
    page.locator("[data-method=revisit] summary").click()
    page.locator("#alpha-revisit").fill("-1")
    page.locator(".answer .settings", has_text="alpha=0.1").wait_for()
    done(page)
    words = page.locator(".tok").all_inner_texts()
    with page.expect_download() as waiting:
        page.click("#save")
    waiting.value.save_as(tmp_path / "saved.html")
    assert opened.errors == []
    assert all(url.startswith((address, "data:", "blob:")) for url in opened.requests)
    page.goto((tmp_path / "saved.html").as_uri())
    assert page.locator(".answer h2").all_inner_texts() == ["revisit", "greedy"]
    assert page.locator(".answer .settings").all_inner_texts() == ["alpha=0.1"]
    assert page.locator(".tok").all_inner_texts() == words
    assert opened.errors == []


def test_a_sample_is_answered_and_checked(opened: Any) -> None:
    page = opened.page
    assert page.locator("#sample").inner_text() == "Another sample"
    ask(page, 2)
    done(page)
    assert page.locator(".checked").count() == 2
    assert page.locator("h1").inner_text() != "ReVisiT"
    assert page.locator(".shown").inner_text() == "In the image: motorcycle, oven, book, cat."
    assert opened.errors == []


def test_bad_files_and_empty_questions_are_reported(opened: Any, tmp_path: Path) -> None:
    page = opened.page
    (tmp_path / "notes.png").write_text("just words")
    give(page, tmp_path / "notes.png")
    page.get_by_text("'notes.png' is not an image").wait_for()
    give(page, opened.image)
    page.get_by_text("90 × 60").wait_for()
    page.fill("#prompt", "   ")
    page.click("#go")
    page.get_by_text("The question is empty").wait_for()
    assert page.evaluate("studio.running") is None
    assert opened.errors == []


@pytest.mark.usefixtures("endless")
def test_changes_during_an_answer_reach_no_method(opened: Any, tmp_path: Path) -> None:
    page, asked = opened.page, list[Any]()
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    give(page, opened.image)
    page.get_by_text("90 × 60").wait_for()
    page.fill("#prompt", "What is this?")
    ask(page, 20)
    page.locator(".growing", has_text=re.compile(r"\S")).wait_for()
    page.fill("#prompt", "How many?")
    page.fill("#length", "3")
    done(page)
    first, second = ({**body, "decoding": None} for body in asked)
    assert first == second
    assert first["messages"][0]["content"][1]["text"] == "What is this?"
    with page.expect_download() as waiting:
        page.click("#save")
    waiting.value.save_as(tmp_path / "saved.html")
    assert "What is this?" in (tmp_path / "saved.html").read_text()
    assert "How many?" not in (tmp_path / "saved.html").read_text()
    assert opened.errors == []


def test_a_sample_that_arrives_late_does_not_replace_an_image(opened: Any) -> None:
    page, late = opened.page, threading.Event()

    def slow(route: Any) -> None:
        give(page, opened.image)
        page.get_by_text("90 × 60").wait_for()
        route.continue_()
        late.set()

    page.route("**/sample/*", slow)
    with page.expect_response("**/sample/*") as response:
        page.click("#sample")
    response.value.finished()
    assert late.is_set()
    page.wait_for_timeout(300)
    assert page.get_by_text("90 × 60").is_visible()
    assert page.locator(".tell").inner_text() == "Ready."
    assert opened.errors == []


@pytest.mark.usefixtures("endless")
def test_a_closed_tab_frees_the_model(opened: Any, browser: Any, server: tuple[str, Service]) -> None:
    address, service = server
    other = browser.new_page()
    other.set_default_timeout(120_000)
    other.goto(address)
    give(other, opened.image)
    other.get_by_text("90 × 60").wait_for()
    ask(other, 1000)
    other.locator(".growing", has_text=re.compile(r"\S")).wait_for()
    assert service.batcher.running
    other.close()
    give(opened.page, opened.image)
    opened.page.get_by_text("90 × 60").wait_for()
    ask(opened.page, 3)
    done(opened.page)
    assert service.batcher.waiting == []
    assert opened.errors == []


@pytest.mark.usefixtures("endless")
def test_stop_and_the_narrow_page(opened: Any) -> None:
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 844})
    give(page, opened.image)
    page.get_by_text("90 × 60").wait_for()
    ask(page, 1000)
    page.locator(".growing", has_text=re.compile(r"\S")).wait_for()
    page.click("#stop")
    page.get_by_text("Stopped.").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.errors == []
