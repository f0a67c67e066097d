"""A server that promises a rate serves only requests like those of its calibration."""

import pytest

from revisit import Greedy, ReVisiT, RevisitError
from revisit.guard.rates import Rate
from revisit.serve.errors import ApiError
from revisit.serve.requests import PromisedServer
from revisit.serve.schema import ChatBody

PROMPT = "Please describe this image in detail."
RATE = Rate.sealed(
    bound="floor",
    risk=0.2,
    confidence=0.9,
    loss="caption",
    model="m",
    fingerprint="f",
    dtype="float32",
    layer=2,
    method="greedy",
    settings={"floor": 0.3, "floor_layer": 2},
    prompt=PROMPT,
    max_new_tokens=40,
    threshold=0.3,
    images=100,
    mistakes=10,
    data="d",
    revisit="0",
)


def body(text=PROMPT, **fields):
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": text}], **fields})


def test_a_request_like_the_calibration_gets_the_floor():
    assert PromisedServer(RATE).check(body(), Greedy(), 40) == Greedy(floor=0.3, floor_layer=2)


@pytest.mark.parametrize(
    ("chat", "method", "length", "difference"),
    [
        (body("Is there a dog?"), Greedy(), 40, "prompt"),
        (body(temperature=1), Greedy(), 40, "sampled"),
        (body(), Greedy(), 41, "max_new_tokens"),
        (body(), ReVisiT(), 40, "method"),
        (body(), Greedy(floor=0.1), 40, "floor"),
    ],
    ids=["prompt", "sampling", "length", "method", "floor"],
)
def test_another_request_is_an_error_that_names_the_difference(chat, method, length, difference):
    with pytest.raises(ApiError, match=difference):
        PromisedServer(RATE).check(chat, method, length)


def test_any_calibration_lets_it_through():
    assert PromisedServer(RATE, any_calibration=True).check(body("A dog?"), Greedy(), 7).floor == 0.3


def test_the_hash_covers_every_field():
    stored = RATE.model_dump(mode="json")
    assert Rate.parse(stored, "x") == RATE
    for name in stored:
        if name not in ("hash", "bound", "loss", "confidence"):
            changed = {
                **stored,
                name: stored[name] + 1 if isinstance(stored[name], (int, float)) else {} if name == "settings" else "y",
            }
            with pytest.raises(RevisitError, match="changed after"):
                Rate.parse(changed, "x")
