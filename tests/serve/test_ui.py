"""The interactive page's server: what it takes, what it refuses, what it streams."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import families
from revisit.embedded.samples import sample
from revisit.explain import record
from revisit.serve import ui
from revisit.serve.limits import Limits
from revisit.serve.ui_answer import AnswerJob
from revisit.serve.ui_page import method_settings
from revisit.serve.ui_state import Picture, RecentItems, UiState, described


@pytest.fixture(scope="module")
def app() -> Any:
    return ui.create_app(["llava"], loader=lambda _name: families.build("llava"))


def call(app: Any, method: str, url: str, **kwargs: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7861", timeout=200) as client:
            return await client.request(method, url, **kwargs)

    return asyncio.run(go())


def png(size: tuple[int, int] = (90, 60)) -> bytes:
    out = io.BytesIO()
    families.picture(1, size).save(out, "PNG")
    return out.getvalue()


def upload(app: Any, data: bytes | None = None) -> str:
    reply = call(app, "POST", "/api/image?name=a.png", content=data or png())
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def ask(image: str, **changes: Any) -> dict[str, Any]:
    methods = [{"name": "revisit", "settings": {"alpha": "0.05"}}, {"name": "greedy", "settings": {}}]
    return {"image": image, "prompt": "hi", "model": "llava", "methods": methods, "max_new_tokens": 6, **changes}


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if ": " in line and not line.startswith(":"))
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_two_methods_stream_and_the_page_can_be_saved(app: Any) -> None:
    reply = call(app, "POST", "/api/run", json=ask(upload(app)))
    assert reply.headers["content-type"].startswith("text/event-stream")
    told = events(reply.text)
    kinds = [kind for kind, _ in told]
    assert kinds.index("scene") < kinds.index("step")
    assert kinds[-1] == "done"
    scene = dict(told)["scene"]
    assert scene["grids"][0]["rows"] == 4
    assert [answer["name"] for answer in scene["answers"]] == ["revisit", "greedy"]
    assert [answer["settings"] for answer in scene["answers"]] == ["alpha=0.05", ""]
    assert scene["objects"] is None  # nobody knows what is in an uploaded picture
    steps: dict[int, list[Any]] = {0: [], 1: []}
    for kind, data in told:
        if kind == "step":
            steps[data["answer"]].append(data)
    run = app.state.ui.runs.get(told[-1][1]["run"])
    for number, answer in enumerate(run.answers):
        assert [data["step"]["t"] for data in steps[number]] == [step.text for step in answer.steps]
        assert [data["step"].get("i") for data in steps[number]] == [step.index for step in answer.steps]
    assert all(data["map"] is None for data in steps[1])
    assert any(data["map"] is not None for data in steps[0])
    saved = call(app, "GET", f"/api/page/{told[-1][1]['run']}")
    assert "attachment" in saved.headers["content-disposition"]
    assert "new Viewer(" in saved.text
    assert call(app, "GET", "/api/page/nothing").status_code == 404


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": "  "}, "question is empty"),
        ({"model": "other"}, "Unknown model 'other'"),
        ({"methods": []}, "at least 1 item"),
        ({"methods": [{"name": "revisti"}]}, "Did you mean 'revisit'"),
        ({"methods": [{"name": "revisit", "settings": {"alpha": "2"}}]}, "alpha must be"),
        ({"max_new_tokens": 0}, "greater than or equal to 1"),
        ({"max_new_tokens": 2000}, "1 to 1024 tokens"),
        ({"image": "gone"}, "no longer in memory"),
        ({"methods": "x"}, "methods: must be a valid array"),
    ],
)
def test_bad_questions_are_answered_with_a_sentence(app: Any, changes: dict[str, Any], says: str) -> None:
    reply = call(app, "POST", "/api/run", json=ask(upload(app)) | changes)
    assert reply.status_code == 400
    assert says in reply.json()["error"]


def test_a_text_file_named_png(app: Any) -> None:
    reply = call(app, "POST", "/api/image?name=notes.png", content=b"just some words")
    assert reply.status_code == 400
    assert "'notes.png' is not an image" in reply.json()["error"]
    assert call(app, "POST", "/api/image", content=b"").status_code == 400
    assert "truncated or damaged" in call(app, "POST", "/api/image", content=png()[:200]).json()["error"]


def test_a_30_megapixel_photo_is_taken_and_shown_small(app: Any) -> None:
    out = io.BytesIO()
    Image.fromarray(np.tile(np.arange(6000, dtype=np.uint8), (5000, 1))).convert("RGB").save(out, "JPEG", quality=60)
    reply = call(app, "POST", "/api/image?name=photo.jpg", content=out.getvalue()).json()
    assert (reply["w"], reply["h"]) == (6000, 5000)
    assert len(reply["src"]) < 1_000_000
    told = events(call(app, "POST", "/api/run", json=ask(reply["id"], max_new_tokens=2)).text)
    assert told[-1][0] == "done"
    grid = dict(told)["scene"]["grids"][0]
    assert grid["xs"][0][0] == pytest.approx(2 * 6000 / 33, abs=0.01)  # 33 × 28 are seen, of which 2 columns are cut


def small(**limits: Any) -> Any:
    return ui.create_app(["llava"], loader=lambda _name: families.build("llava"), limits=Limits(**limits))


def test_a_file_that_is_too_large() -> None:
    assert call(small(body_bytes=1000), "POST", "/api/image", content=b"x" * 1001).status_code == 413


def test_whoever_leaves_stops_the_work(app: Any) -> None:
    """The reader goes away after the first step: the decode ends long before its 1,000 tokens, and the turn is free."""
    state = app.state.ui
    question = state.read(json.dumps(ask(upload(app), max_new_tokens=1000)).encode())

    async def read_a_little(job: AnswerJob) -> None:
        async for text in (stream := job.stream()):
            if text.startswith("event: step"):
                break
        await stream.aclose()  # type: ignore[attr-defined]

    job = AnswerJob(state, question)
    asyncio.run(read_a_little(job))
    job.thread.join(60)
    assert not job.thread.is_alive()
    left = [data for kind, data in list(job.events.queue) if kind == "step"]
    assert len(left) < 1900
    assert state.turn.acquire(timeout=1)
    state.turn.release()


def test_a_second_question_waits_for_its_turn(app: Any) -> None:
    state = app.state.ui
    with state.turn:
        job = AnswerJob(state, state.read(json.dumps(ask(upload(app), max_new_tokens=2)).encode()))
        kind, data = job.events.get(timeout=30)
        assert (kind, "Another question" in data["text"]) == ("wait", True)
    job.thread.join(60)
    assert [kind for kind, _ in list(job.events.queue)][-1] == "done"


def test_other_pages_cannot_reach_it(app: Any) -> None:
    assert call(app, "GET", "/", headers={"host": "evil.example"}).status_code == 403
    assert call(app, "POST", "/api/sample", headers={"origin": "https://evil.example"}).status_code == 403
    assert call(app, "GET", "/", headers={"origin": "http://127.0.0.1:7861"}).status_code == 200


def test_the_page_offers_every_method_with_its_settings(app: Any) -> None:
    text = call(app, "GET", "/").text
    assert "http://" not in text.replace("http://www.w3.org", "")
    revisit = next(method for method in method_settings("llava") if method["name"] == "revisit")
    settings = {setting["name"]: setting for setting in revisit["settings"]}
    assert settings["alpha"] == {"name": "alpha", "kind": "text", "default": "1e-05", "slider": True}
    assert settings["divergence"]["choices"] == ["jsd", "official", "kl", "cosine"]
    assert settings["normalize"]["kind"] == "flag"
    greedy = next(method for method in method_settings("llava") if method["name"] == "greedy")
    assert greedy["settings"] == []


def test_the_first_sample_is_the_demo_picture_and_what_it_shows_is_known(app: Any) -> None:
    demo = sample("demo")
    reply = call(app, "POST", "/api/sample").json()
    kept = app.state.ui.images.get(reply["id"])
    assert kept.image.tobytes() == demo.image().tobytes()
    assert kept.objects == demo.nouns
    other = app.state.ui.images.get(call(app, "POST", "/api/sample?number=1").json()["id"])
    assert other.image.tobytes() != kept.image.tobytes()
    assert other.objects


def test_words_for_what_is_not_in_the_picture_are_marked(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the demo page: the stream says what is in the picture, and at the end which tokens name something else."""
    monkeypatch.setattr(record, "wrong_spans", lambda text, shown: [(0, 1)] if tuple(shown) == ("cat",) else [])
    image = app.state.ui.images.put(Picture(families.picture(1), ("cat",)))
    told = dict(events(call(app, "POST", "/api/run", json=ask(image)).text))
    assert told["scene"]["objects"] == ["cat"]
    run = app.state.ui.runs.get(told["done"]["run"])
    assert run.objects == ("cat",)
    marked = [[n for n, step in enumerate(answer.steps) if step.wrong] for answer in run.answers]
    assert told["done"]["wrong"] == marked
    assert all(marked)
    unknown = dict(events(call(app, "POST", "/api/run", json=ask(upload(app))).text))
    assert unknown["done"]["wrong"] == [[], []]


def test_settings_are_those_recommended_for_the_model() -> None:
    def weight(model: str) -> str:
        revisit = next(method for method in method_settings(described(model)) if method["name"] == "revisit")
        return next(str(setting["default"]) for setting in revisit["settings"] if setting["name"] == "weight")

    assert (weight("tiny"), weight("llava")) == ("agreement", "1.0")
    state = UiState(("tiny",), lambda _: (None, None))
    body = {"image": state.images.put(Picture(families.picture(0))), "prompt": "hi", "model": "tiny"}
    chosen = state.read(json.dumps({**body, "methods": [{"name": "revisit"}, {"name": "greedy"}]}).encode()).methods
    assert chosen[0].settings()["weight"] == "agreement"
    own = [{"name": "revisit", "settings": {"alpha": "0.1"}}]
    assert state.read(json.dumps({**body, "methods": own}).encode()).methods[0].settings()["alpha"] == 0.1


def test_the_shelf_forgets_the_oldest() -> None:
    shelf = RecentItems[Image.Image](lambda image: [image], pixels=300)
    small, large = Image.new("L", (1, 1)), Image.new("L", (20, 10))
    names = [shelf.put(small) for _ in range(10)]
    assert [shelf.get(name) for name in names] == [None] * 2 + [small] * 8
    first, second = shelf.put(large), shelf.put(large)  # more than 300 pixels in all
    assert (shelf.get(first), shelf.get(second)) == (None, large)
    assert not any(shelf.get(name) for name in names)


def test_an_error_in_the_model_is_told(app: Any) -> None:
    def broken(_name: str) -> Any:
        raise OSError("disk gone")

    state = UiState(("llava",), broken)
    image = state.images.put(Picture(families.picture(1)))
    job = AnswerJob(state, state.read(json.dumps(ask(image)).encode()))
    job.thread.join(30)
    kind, data = list(job.events.queue)[-1]
    assert (kind, data["text"]) == ("error", "The model could not answer: OSError: disk gone")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"[" * 300_000, "commas and brackets"),
        (b"[" * 10_000, "not valid JSON"),
        (
            b'{"image": "a", "prompt": "b", "model": "c", "methods": [{"name": "greedy"}], "max_new_tokens": Infinity}',
            "max_new_tokens",
        ),
        (
            b'{"image": "a", "prompt": "b", "model": "c", "methods": [{"name": "greedy"}], "max_new_tokens": 1e308}',
            "max_new_tokens",
        ),
        (
            b'{"image": ["a"], "prompt": "b", "model": "c", "methods": [{"name": "greedy"}]}',
            "image: must be a valid string",
        ),
    ],
)
def test_a_body_that_is_no_question_is_a_sentence(app: Any, body: bytes, says: str) -> None:
    reply = call(app, "POST", "/api/run", content=body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ([{"name": "chain", "settings": {"methods": "x.py:Class"}}], "Unknown method"),
        ([{"name": "x.py:Class"}], "Unknown method"),
        ([{"name": "chain", "settings": {"methods": ["vcd"] * 300}}], "more than 64 values"),
        ([{"name": "revisit", "settings": {"weight": "inf"}}], "a number"),
        ([{"name": "code", "settings": {"request_ids": [0, 1, 2, 3]}}], "request_ids must be"),
        ([{"name": "icd", "settings": {"sentence": "x" * 3000}}], "3,000 characters"),
    ],
)
def test_methods_of_the_page_are_held_to_the_servers_limits(app: Any, methods: Any, says: str) -> None:
    reply = call(app, "POST", "/api/run", json=ask(upload(app), methods=methods))
    assert reply.status_code == 400
    assert says in reply.json()["error"]
    assert len(reply.text) < 1000


def test_formats_that_other_programs_would_read_are_refused(app: Any) -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    reply = call(app, "POST", "/api/image?name=a.eps", content=postscript)
    assert reply.status_code == 400
    assert "not an image" in reply.json()["error"]


def test_sizes_of_the_page_are_bounded() -> None:
    page = small(image_pixels=100, characters=10, queue=1)
    assert "pixels" in call(page, "POST", "/api/image", content=png()).json()["error"]
    state = page.state.ui
    image = state.images.put(Picture(families.picture(1)))
    assert "characters" in call(page, "POST", "/api/run", json=ask(image, prompt="x" * 11)).json()["error"]
    with state.counting():
        assert call(page, "POST", "/api/run", json=ask(image)).status_code == 429


def test_every_stream_ends_with_done_or_an_error(app: Any) -> None:
    """Also when the model's numbers are not finite, a thread ends without a word, or the time is over."""
    state = app.state.ui

    def told(change: Any, **limits: Any) -> list[tuple[str, Any]]:
        question = state.read(json.dumps(ask(upload(app), max_new_tokens=3)).encode())
        own = UiState(state.models, state.loader, Limits(**limits)) if limits else state
        job = AnswerJob(own, question)
        change(job)

        async def read() -> str:
            return "".join([part async for part in job.stream()])

        found = events(asyncio.run(read()))
        job.thread.join(60)
        return found

    assert told(lambda job: job.send("step", answer=0, step={"p": float("nan")}, map=None))[-1][0] == "done"
    assert told(lambda job: job.stopped.set())[-1] == ("error", {"text": "The answer ended early; ask again."})
    late = told(lambda job: None, seconds=1e-6)
    assert late[-1][0] == "error"
    assert "longer than" in late[-1][1]["text"]


def test_a_question_longer_than_the_model_takes_is_an_error_event() -> None:
    page = small(prompt_tokens=20)
    image = page.state.ui.images.put(Picture(families.picture(1)))
    reply = call(page, "POST", "/api/run", json=ask(image, prompt="a long question " * 20))
    kind, data = events(reply.text)[-1]
    assert kind == "error"
    assert "at most 20" in data["text"]


def test_beyond_loopback_the_page_needs_its_key() -> None:
    page = ui.create_app(["llava"], loader=lambda _name: families.build("llava"), hosts=["*"], api_key="right")
    assert call(page, "GET", "/").status_code == 401
    assert call(page, "GET", "/?key=wrong").status_code == 401
    assert call(page, "POST", "/api/sample", headers={"authorization": "right"}).status_code == 401
    opened = call(page, "GET", "/?key=right")
    assert opened.status_code == 200
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    given = {"cookie": cookie.partition(";")[0]}
    assert call(page, "POST", "/api/image?name=a.png", content=png(), headers=given).status_code == 200
    assert call(page, "GET", "/health").status_code == 200
    for host, key in (("127.0.0.1", None), ("192.168.1.2", "made up")):
        assert (ui.key_for(host, None) is None) == (key is None)
    assert ui.key_for("192.168.1.2", "mine") == "mine"
