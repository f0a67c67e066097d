"""The interactive page, and the recorded answers that it requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import families
from revisit.embedded.samples import sample
from revisit.explain import record
from revisit.explain.page import payload
from revisit.methods.revisit import ReVisiT
from revisit.models.config import describe_model
from revisit.serve.app import Service, build
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits
from revisit.serve.recording import finite
from revisit.serve.ui import add_page, method_settings


class Page:
    """The page's server, called without a network."""

    def __init__(self, **changes: Any) -> None:
        self.service = Service(
            Decoder(*families.build("llava")), "llava", ReVisiT(), Limits(), allow_record=True, **changes
        )
        self.app = build(self.service)
        add_page(self.app, self.service)

    def call(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7861", timeout=200) as client:
                return await client.request(method, url, **kwargs)

        return asyncio.run(go())

    def ask(self, **decoding: Any) -> httpx.Response:
        return self.call("POST", "/v1/chat/completions", json=question(**decoding))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    made = Page()
    yield made
    made.service.close()


def uri() -> str:
    out = io.BytesIO()
    families.image(1).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def question(**decoding: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": uri()}}, {"type": "text", "text": "hi"}]
    return {
        "model": "llava",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "decoding": {"method": "revisit", "settings": {"alpha": "0.05"}, "record": True, **decoding},
    }


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, as any client of the protocol reads them."""
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    *events, end = reply.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def explained(method: ReVisiT, objects: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the data that `explain` shows for the same question."""
    model, processor = families.build("llava")
    decode = record.explain(
        model,
        processor,
        [families.image(1)],
        "hi",
        [method],
        max_new_tokens=6,
        do_sample=False,
        objects=objects,
    )
    shown: dict[str, Any] = json.loads(json.dumps(payload(decode)))
    return shown


def test_recorded_answers_hold_the_data_of_the_page(page: Page) -> None:
    got = chunks(page.ask())
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    wanted = explained(ReVisiT(alpha=0.05))
    start = next(chunk["decoding"] for chunk in got if "scene" in chunk.get("decoding", {}))
    assert start["scene"] == {key: wanted[key] for key in ("images", "grids", "reason", "objects")}
    answer = wanted["answers"][0]
    assert (start["answer"]["name"], start["answer"]["settings"]) == ("revisit", "alpha=0.05")
    steps = [chunk["decoding"] for chunk in got if "step" in chunk.get("decoding", {})]
    assert [data["step"] for data in steps] == [{k: v for k, v in step.items() if k != "m"} for step in answer["steps"]]
    maps = b"".join(base64.b64decode(data["map"]) for data in steps if data["map"] is not None)
    assert maps == base64.b64decode(answer["maps"])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got if chunk["choices"])
    assert text == answer["text"]
    assert got[-1]["decoding"]["words"] == {"says": wanted["says"]}
    assert got[-1]["decoding"]["wrong"] == []  # the objects in this image are not known


def test_recording_does_not_change_the_answer(page: Page) -> None:
    def text(**decoding: Any) -> str:
        got = chunks(page.ask(**decoding))
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got if chunk["choices"])

    assert text() == text(record=False)


def test_plain_decoding_has_no_map(page: Page) -> None:
    got = [chunk["decoding"] for chunk in chunks(page.ask(method="greedy", settings={})) if "decoding" in chunk]
    assert got[0]["answer"]["name"] == "greedy"
    assert [data["map"] for data in got if "step" in data] == [None] * 6


def test_words_for_absent_objects_are_marked(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "wrong_spans", lambda text, shown: [(0, len(text))] if tuple(shown) == ("cat",) else [])
    got = chunks(page.ask(objects=["cat"]))
    assert next(c["decoding"]["scene"]["objects"] for c in got if "scene" in c.get("decoding", {})) == ["cat"]
    steps = explained(ReVisiT(alpha=0.05), ("cat",))["answers"][0]["steps"]
    assert got[-1]["decoding"]["wrong"] == [number for number, step in enumerate(steps) if step.get("w")] != []


def test_only_the_page_records_streams_about_an_image(page: Page) -> None:
    whole = page.call("POST", "/v1/chat/completions", json=question() | {"stream": False, "stream_options": None})
    assert whole.status_code == 400
    assert "streamed answers about an image" in whole.json()["error"]["message"]
    page.service.allow_record = False
    try:
        rejected = page.ask()
    finally:
        page.service.allow_record = True
    assert rejected.status_code == 400
    assert "does not record" in rejected.json()["error"]["message"]


def test_numbers_that_json_cannot_hold_are_null() -> None:
    assert finite({"p": [float("nan"), 1.0, (float("inf"), 2)], "t": "x"}) == {"p": [None, 1.0, [None, 2]], "t": "x"}


def test_the_page_offers_every_method_with_its_settings(page: Page) -> None:
    text = page.call("GET", "/").text
    assert "http://" not in text.replace("http://www.w3.org", "")
    setup = json.loads(re.search(r'id="data">([^<]*)<', text).group(1))  # type: ignore[union-attr]
    assert (setup["model"], setup["start"]) == ("llava", ["revisit", "greedy"])
    offered = {method["name"]: {entry["name"]: entry for entry in method["settings"]} for method in setup["methods"]}
    assert offered["revisit"]["alpha"] == {"name": "alpha", "kind": "text", "default": "1e-05", "slider": True}
    assert offered["revisit"]["divergence"]["choices"] == ["jsd", "official", "kl", "cosine"]
    assert offered["revisit"]["normalize"]["choices"] == ["true", "false"]
    assert offered["greedy"] == {}


def test_settings_are_those_recommended_for_the_model() -> None:
    def weight(model: Any) -> Any:
        revisit = next(method for method in method_settings(model) if method["name"] == "revisit")
        settings: Any = revisit["settings"]
        return next(entry["default"] for entry in settings if entry["name"] == "weight")

    assert (weight(describe_model("tiny")), weight("llava")) == ("agreement", "1.0")


def test_first_sample_is_the_demo_image_with_its_objects(page: Page) -> None:
    demo, first = sample("demo"), page.call("GET", "/sample/0").json()
    assert first["objects"] == list(demo.nouns)
    sent = io.BytesIO(base64.b64decode(first["src"].partition(",")[2]))
    from PIL import Image

    assert Image.open(sent).convert("RGB").tobytes() == demo.image().tobytes()
    other = page.call("GET", "/sample/1").json()
    assert other["src"] != first["src"]
    assert other["objects"]


def test_requests_of_the_page_need_the_key() -> None:
    page = Page(hosts=["*"], api_key="right")
    try:
        assert page.call("GET", "/").status_code == 200
        assert page.call("GET", "/sample/0").status_code == page.ask().status_code == 401
        assert page.call("GET", "/sample/0", headers={"authorization": "Bearer right"}).status_code == 200
    finally:
        page.service.close()
