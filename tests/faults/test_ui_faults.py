"""The page's server under hostile uploads and questions: a sentence every time, and streams that end."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import typing
from collections import Counter
from typing import Any

import httpx
import pytest
from chat_requests import data_uri, mutated, odd_image, of_type, setting, value
from corpus import recall, remember

import families
from revisit import methods
from revisit.serve import ui
from revisit.serve.limits import Limits
from revisit.serve.ui_state import Picture


def hostile_question(dice: random.Random, image: str) -> bytes:
    """A question with something odd in it; some are answered all the same."""
    if dice.random() < 0.2:
        return mutated(dice)[0]
    name = dice.choice(methods.names())
    cls = methods.find(name)
    fields = list(getattr(cls, "__dataclass_fields__", {})) or ["alpha"]
    hints = typing.get_type_hints(cls)
    field = dice.choice(fields)
    chosen = of_type(dice, hints[field]) if field in hints and dice.random() < 0.5 else setting(dice)
    question: dict[str, Any] = {
        "image": image,
        "prompt": dice.choice(("hi", "<image>", "\0", "word " * 50)),
        "model": "llava",
        "methods": [{"name": name, "settings": {field: chosen}}],
        "max_new_tokens": 2,
    }
    if dice.random() < 0.3:
        question[dice.choice([*question, "more"])] = value(dice)
    return json.dumps(question).encode()


async def ask_all(count: int, seed: int) -> tuple[Counter[int], list[bytes]]:
    """Statuses of hostile uploads and questions, and those that were not answered as they should be."""
    limits = Limits(new_tokens=8, default_new_tokens=8, prompt_tokens=300)
    app = ui.create_app(["llava"], loader=lambda _name: families.build("llava"), limits=limits)
    image = app.state.ui.images.put(Picture(families.picture(1)))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    statuses: Counter[int] = Counter()
    failures = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        old = [(body, "/api/run") for body in recall("ui")]
        for number in range(-len(old), count):
            dice = random.Random(seed * 1_000_000 + number)
            if number < 0:
                body, path = old[number]
                body = body.replace(b"{image}", image.encode())
            elif dice.random() < 0.3:
                body, path = upload(dice), "/api/image"
            else:
                body, path = hostile_question(dice, image), "/api/run"
            reply = await client.post(path, content=body)
            statuses[reply.status_code] += 1
            ended = (
                path != "/api/run"
                or reply.status_code != 200
                or "event: done" in reply.text
                or "event: error" in reply.text
            )
            if reply.status_code >= 500 or not ended or len(reply.content) > 5_000_000:
                failures.append(body.replace(image.encode(), b"{image}"))
    for body in failures:
        remember("ui", body)
    return statuses, failures


def upload(dice: random.Random) -> bytes:
    """A file that is no image, or nearly one."""
    if dice.random() < 0.2:
        return base64.b64decode(
            data_uri(dice.randrange(6), dice.choice(("PNG", "JPEG", "TIFF", "EPS"))).partition(",")[2]
        )
    part = json.loads(odd_image(dice)[0])["messages"][0]["content"][0]["image_url"]
    text = str(part.get("url", "") if isinstance(part, dict) else part).partition(",")[2]
    try:
        return base64.b64decode(text)
    except ValueError:
        return text.encode()


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_no_upload_or_question_is_an_internal_error() -> None:
    statuses, failures = asyncio.run(ask_all(1_000, seed=5))
    print(f"\nui: {dict(statuses)}")
    assert not failures, failures[0][:500]


def test_a_sample_of_uploads_and_questions() -> None:
    statuses, failures = asyncio.run(ask_all(40, seed=6))
    assert not failures, failures[0][:500]
    assert statuses[200]
    assert statuses[400]
