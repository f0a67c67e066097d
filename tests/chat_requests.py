"""Seeded chat requests: valid ones, malformed ones, and valid ones with random changes."""

from __future__ import annotations

import base64
import functools
import json
import random
import types
import typing
from collections.abc import Iterator
from typing import Any

import servers
from revisit import methods

VALID: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"stop": ["zz"]},
    {"logprobs": True, "top_logprobs": 3, "check": True},
    {"decoding": {"method": "greedy"}},
    {"decoding": {"method": "vcd"}},
    {"decoding": {"method": "revisit", "settings": {"alpha": 0.1, "layers": "all"}}},
    {"decoding": {"method": "opera", "settings": {"beams": 2, "candidates": 2}}},
)
NUMBERS = (
    *(0, 1, 2, 3, -1, 100, 511, 512, 2**31, 2**63, -(2**63) - 1, 10**40, 10**400),
    *(0.5, -0.0, 1e-320, 1e-308, 1e308, -1e308),
)
TEXTS = (
    *("", " ", "x", "\0", "é" * 50, "x" * 5000, "🦊\u200f", "<image>", "{{ 7 * 7 }}"),
    *("../../etc/passwd", "file.py:Class", "none", "1e999", "inf", "-inf", "nan", "true"),
    *("all", "last", "0,1", "[[1],[2]]", "vcd,vcd"),
)
RAW = (
    *("Infinity", "-Infinity", "NaN", "1e999", "-1e999", '"\\ud800"'),
    *("[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300),
)


data_uri = functools.cache(servers.uri)


def question(number: int, **fields: Any) -> dict[str, Any]:
    """Return a valid request."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_uri(number % 6)}},
        {"type": "text", "text": f"What is in image {number % 6}?"},
    ]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, **fields}


def valid(dice: random.Random) -> dict[str, Any]:
    """Return a valid request with a reproducible answer."""
    fields = {"max_tokens": dice.choice((1, 3, 6, 9)), "stream": dice.random() < 0.3, **dice.choice(VALID)}
    return question(dice.randrange(6), **fields)


def hostile(dice: random.Random) -> bytes:
    """Return the body of a request that is rejected, or does no harm."""
    makers = (garbage, mutated, mutated, raw_value, odd_settings, odd_settings, odd_image)
    return dice.choice(makers)(dice)


def garbage(dice: random.Random) -> bytes:
    """Return random bytes, or a truncated request."""
    if dice.random() < 0.5:
        return dice.randbytes(dice.randrange(200))
    whole = json.dumps(question(0)).encode()
    return whole[: dice.randrange(len(whole))]


def value(dice: random.Random, depth: int = 0) -> Any:
    """Return a small random JSON value."""
    kind = dice.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return dice.choice(NUMBERS)
    if kind < 4:
        return dice.choice(TEXTS)
    if kind < 6:
        return dice.choice((None, True, False, dice.randrange(-9, 9)))
    if kind < 8:
        return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {dice.choice((*TEXTS, "type", "url", "name")): value(dice, depth + 1) for _ in range(dice.randrange(3))}


def mutated(dice: random.Random) -> bytes:
    """Return a valid request with random values in one to three places."""
    body = json.loads(json.dumps(valid(dice)))
    for _ in range(dice.randrange(1, 4)):
        holder, key = dice.choice(list(places(body)))
        action = dice.randrange(4)
        if action == 0 and isinstance(holder, dict):
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            fields = ("", "x", "tools", "n", "seed", "temperature", "decoding", "stop", "top_k")
            newer = ("logprobs", "top_logprobs", "response_format", "reasoning_effort", "check")
            holder[dice.choice((*fields, *newer))] = value(dice)
        else:
            holder[key] = value(dice)
    return json.dumps(body).encode()


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all places in a JSON value, as the object or list and the key."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in list(items):
        yield node, key
        yield from places(inner)


def raw_value(dice: random.Random) -> bytes:
    """Return a valid request with a value that is deeply nested, or not JSON."""
    field = dice.choice(
        ("temperature", "top_p", "seed", "max_tokens", "decoding", "metadata", "messages", "logit_bias")
    )
    body = json.dumps({**question(1), field: "HERE"}).replace('"HERE"', dice.choice(RAW))
    if dice.random() < 0.5:
        settings = json.dumps({"method": "revisit", "settings": {dice.choice(("alpha", "weight", "layers")): "HERE"}})
        body = json.dumps({**question(1), "decoding": 0})[:-2] + settings.replace('"HERE"', dice.choice(RAW)) + "}"
    return body.encode()


def odd_settings(dice: random.Random) -> bytes:
    """Return a request with one to three settings of random types."""
    name = dice.choice(methods.names())
    hints = typing.get_type_hints(methods.find(name))
    fields = list(methods.find(name).model_fields) or ["alpha"]
    settings: dict[str, Any] = {}
    for field in dice.choices(fields, k=dice.randrange(1, 4)):
        fitting = dice.random() < 0.6 and field in hints
        settings[field] = of_type(dice, hints[field]) if fitting else value(dice)
    if name == "code":
        settings.setdefault("description_tokens", 4)  # the usual 512 would be most of a run's time
    return json.dumps(question(2, decoding={"method": name, "settings": settings})).encode()


def of_type(dice: random.Random, hint: Any) -> Any:
    """Return a value of a setting's type, often an extreme one."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return of_type(dice, dice.choice(inner))
    if typing.get_origin(hint) is typing.Literal:
        return dice.choice(inner)
    if typing.get_origin(hint) is tuple:
        kinds = inner[:1] * dice.randrange(4) if inner[-1] is Ellipsis else inner
        return [of_type(dice, kind) for kind in kinds]
    if hint is float:
        return dice.choice((0, 1e-300, 1e-30, 1e-5, 0.1, 0.5, 1, 1.0, 2, 100.0, 1e18))
    if hint is int:
        return dice.choice((0, 1, 2, 3, 4, 5, 19, 300, 511, 10**6, 2**62))
    if hint is bool:
        return dice.random() < 0.5
    texts = ("vcd", "revisit:alpha=0.1", "Say it.", "<image>", "\ufffd", "é" * 300)
    return None if hint is type(None) else dice.choice(texts)


def odd_image(dice: random.Random) -> bytes:
    """Return a request with a damaged, hostile or missing image."""
    body = question(3)
    whole = base64.b64decode(data_uri(1).partition(",")[2])
    kind = dice.randrange(8)
    if kind == 0:
        data = whole[: dice.randrange(len(whole))]
    elif kind == 1:
        changed = bytearray(whole)
        for _ in range(dice.randrange(1, 9)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        data = bytes(changed)
    elif kind == 2:
        data = servers.bomb(side := dice.choice((10_000, 100_000)), side)
    elif kind == 3:
        data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    elif kind == 4:
        data = servers.bomb(*dice.choice(((200_000, 1), (1, 1_000), (2, 3_000_000))))
    elif kind == 5:
        data = dice.choice((b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8 ", b"BM")) + dice.randbytes(40)
    else:
        url = dice.choice(
            ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "data:,", "data:image/png;base64,é", "")
        )
        body["messages"][0]["content"][0]["image_url"] = dice.choice((url, {"url": url}, {"url": [url]}))
        return json.dumps(body).encode()
    body["messages"][0]["content"][0]["image_url"]["url"] = servers.as_uri(data)
    return json.dumps(body).encode()
