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
from PIL import Image

import families
from revisit import ask
from revisit.decoding.method import Method
from revisit.embedded.samples import sample
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.config import describe_model
from revisit.pages.answers import payload
from revisit.serve.app import Service, build
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits
from revisit.serve.replies import encode
from revisit.serve.ui import add_page, method_settings
from servers import messages


class Page:
    """The page's server, called without a network."""

    def __init__(self, **changes: Any) -> None:
        self.service = Service(Decoder(*families.build("llava")), "llava", ReVisiT(), Limits(), **changes)
        self.app = build(self.service)
        add_page(self.app, self.service)

    def call(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7861", timeout=200) as client:
                return await client.request(method, url, **kwargs)

        return asyncio.run(go())

    def ask(self, stream: bool = False, **decoding: Any) -> httpx.Response:
        body = {
            "model": "llava",
            "messages": messages(1, "hi"),
            "max_tokens": 6,
            "decoding": {"method": "revisit", "settings": {"alpha": "0.05"}, "record": True, **decoding},
        }
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return self.call("POST", "/v1/chat/completions", json={**body, **streamed})


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    made = Page()
    yield made
    made.service.close()


def explained(method: Method, objects: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the page data of `ask` for the same question."""
    decode = ask(families.build("llava"), families.image(1), "hi", method, objects=objects, max_new_tokens=6).page
    shown: dict[str, Any] = json.loads(json.dumps({**payload(decode), "prompt": "", "model": ""}))
    return shown


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_recorded_answers_contain_the_data_of_the_page(page: Page, stream: bool) -> None:
    reply = page.ask(stream=stream, objects=["cat"])
    found = json.loads(reply.text.split("data: ")[-2]) if stream else reply.json()
    assert found["decoding"]["page"] == explained(ReVisiT(alpha=0.05), ("cat",))


def test_plain_decoding_has_no_map(page: Page) -> None:
    found = page.ask(method="greedy", settings={}).json()["decoding"]["page"]
    assert found == explained(Greedy())
    assert found["answers"][0]["maps"] == ""


def test_only_the_page_records_answers(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = page.ask().json()["choices"]
    assert page.ask(record=False).json()["choices"] == whole
    monkeypatch.setattr(page.service, "page", None)
    rejected = page.ask()
    assert rejected.status_code == 400
    assert "does not record" in rejected.json()["error"]["message"]


def test_numbers_that_json_cannot_express_are_null() -> None:
    assert encode({"é": [float("nan"), 1.0, (float("inf"), 2)]}) == '{"é":[null,1.0,[null,2]]}'.encode()


def test_the_page_offers_every_method_with_its_settings(page: Page) -> None:
    reply = page.call("GET", "/")
    assert reply.headers["content-security-policy"] == "frame-ancestors 'none'"
    text = reply.text
    assert "http://" not in text.replace("http://www.w3.org", "")
    setup = json.loads(re.search(r'id="data">([^<]*)<', text).group(1))  # type: ignore[union-attr]
    assert (setup["model"], setup["start"]) == ("llava", ["revisit", "greedy"])
    offered = {method["name"]: {entry["name"]: entry for entry in method["settings"]} for method in setup["methods"]}
    assert offered["revisit"]["alpha"] == {"name": "alpha", "default": "1e-05", "choices": []}
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
