"""Every request is either understood or refused with a sentence."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import struct
import threading
import time
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from revisit.decoding.plain import Plain
from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.serve.limits import Limits
from revisit.serve.protocol import Refusal, Reply, chunk, completion, event, read_body, read_request
from revisit.serve.remote import fetch_public, public_address
from revisit.serve.server import check_exposure

LIMITS = Limits(image_pixels=10_000, new_tokens=50, default_new_tokens=20, images=2)


def png(width: int = 8, height: int = 8) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def bomb(side: int) -> str:
    """A tiny PNG file that says it is `side` × `side` pixels."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = piece(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    data = piece(b"IDAT", zlib.compress(b"\0" * 1000))
    file = b"\x89PNG\r\n\x1a\n" + header + data + piece(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def body(image: str | None = None, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **fields}


def read(value: dict[str, Any]) -> Any:
    return read_request(value, model="m", default=ReVisiT(), limits=LIMITS)


def refused(value: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(value)
    return caught.value


def test_a_whole_request_is_understood() -> None:
    settings = {"method": "revisit", "settings": {"alpha": 0.5, "layers": [1, 2]}}
    ask = read(body(png(), max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop="x", stream=True, decoding=settings))
    assert ask.method == ReVisiT(alpha=0.5, layers=(1, 2))
    assert [image.size for image in ask.images] == [(8, 8)]
    assert (ask.max_tokens, ask.stop, ask.stream) == (7, ("x",), True)
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.seed) == (0.5, 0.9, 3)
    assert ask.messages == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]


def test_what_is_left_out_has_defaults() -> None:
    ask = read(body(png()))
    assert (ask.method, ask.max_tokens, ask.sampling.temperature) == (ReVisiT(), 20, None)
    assert read(body(png(), temperature=0)).sampling.temperature is None


def test_a_conversation_without_image_is_fine_unless_a_method_was_asked_for() -> None:
    assert read(body()).images == []
    assert "no image" in refused(body(decoding={"method": "revisit"})).message
    assert read(body(decoding={"method": "greedy"})).method == Plain()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (body(model="other"), "no model 'other'"),
        (body(messages=[]), "at least one message"),
        (body(messages=[{"role": "robot", "content": "x"}]), "role among"),
        (body(messages=[{"role": "assistant", "content": "x"}]), "last message"),
        (body(messages=[{"role": "user", "content": [{"type": "video"}]}]), "part must be"),
        (body(messages=[{"role": "user", "content": 5}]), "content must be"),
        (body(max_tokens=0), "max_tokens must be"),
        (body(max_tokens=51), "from 1 to 50"),
        (body(max_tokens=True), "whole number"),
        (body(temperature="hot"), "temperature must be"),
        (body(temperature=float("nan")), "temperature must be"),
        (body(n=2), "n=2 is not supported"),
        (body(logprobs=True), "logprobs=True is not supported"),
        (body(max_token=5), "Did you mean 'max_tokens'"),
        (body(stop=["a"] * 5), "one to four"),
        (body(stop=""), "one to four"),
        (body(stream="yes"), "true or false"),
        (body(png(), decoding={"method": "revisti"}), "Did you mean 'revisit'"),
        (body(png(), decoding={"settings": {"alhpa": 1}}), "Did you mean 'alpha'"),
        (body(png(), decoding={"settings": {"alpha": 5}}), "at most 1"),
        (body(png(), decoding={"settings": {"alpha": [1]}}), "alpha must be a number"),
        (body(png(), decoding="revisit"), "decoding must be"),
        (body("/etc/passwd"), "must be a data URI"),
        (body("file:///etc/passwd"), "must be a data URI"),
        (body("http://127.0.0.1:1/x.png"), "not fetched"),
        (body("https://example.org/x.png"), "not fetched"),
        (body("data:image/png;base64,@@@"), "not valid base64"),
        (body("data:image/png;base64," + base64.b64encode(b"no image").decode()), "not an image"),
        (body("data:text/html;base64,aGk="), "data URI"),
        (body(png(200, 200)), "200×200"),
        (body(bomb(50_000)), "10,000 pixels allowed"),
    ],
)
def test_what_is_wrong_is_said(value: dict[str, Any], part: str) -> None:
    refusal = refused(value)
    assert part in refusal.message
    assert refusal.status in (400, 404)
    assert refusal.body()["error"]["type"] == "invalid_request_error"


def test_too_many_images_are_refused_before_any_is_decoded() -> None:
    many = body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no"}}] * 3}])
    assert "3 images" in refused(many).message


def test_programs_that_pillow_would_start_are_out_of_reach() -> None:
    postscript = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n").decode()
    assert "not an image" in refused(body(f"data:image/png;base64,{postscript}")).message


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(Refusal, match="JSON"):
        read_body(raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["model", "messages", "max_tokens", "temperature", "stop", "stream", "decoding", "n", "seed", "zz"]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, values, max_size=5))
def test_nothing_but_a_refusal_comes_of_nonsense(noise: dict[str, Any]) -> None:
    status = 200
    try:
        read(body(png()) | noise)
    except Refusal as refusal:
        status = refusal.status
        json.dumps(refusal.body())
    assert status in (200, 400, 404)


def test_answers_have_the_shape_that_clients_parse() -> None:
    ask = read(body(png()))
    answer = completion(ask, Reply("hi", "stop", 10, 2, {"method": "revisit"}), "m")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    piece = chunk(ask, "m", {"content": "é\n"})
    assert event(piece).startswith(b"data: {")
    assert event(piece).endswith(b"}\n\n")
    assert json.loads(event(piece)[6:])["choices"][0]["delta"] == {"content": "é\n"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "::1", "0.0.0.0"])
def test_urls_to_this_network_are_refused_even_where_urls_are_allowed(host: str) -> None:
    with pytest.raises(RevisitError, match="not a public address"):
        public_address(host, 80)
    with pytest.raises(RevisitError, match="not a public address"):
        fetch_public(f"http://[{host}]/" if ":" in host else f"http://{host}/", max_pixels=1, max_bytes=1, formats=())


@pytest.mark.parametrize("url", ["ftp://example.org/x", "http://", "http://x:99999/"])
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(RevisitError, match="must begin with"):
        fetch_public(url, max_pixels=1, max_bytes=1, formats=())


def test_only_loopback_is_open_without_a_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, None, False)
    for host in ("0.0.0.0", "192.168.1.2", "example.org"):
        with pytest.raises(RevisitError, match="REVISIT_API_KEY"):
            check_exposure(host, None, False)
        check_exposure(host, "key", False)
        check_exposure(host, None, True)


def test_limits_check_themselves() -> None:
    with pytest.raises(RevisitError, match="queue must be at least 1"):
        Limits(queue=0)
    with pytest.raises(RevisitError, match="default_new_tokens"):
        Limits(new_tokens=10, default_new_tokens=11)


@pytest.mark.parametrize(
    "url",
    ["http://[bad", "http://\u2603.com\u2100/", "http://a..b/", f"http://{'a' * 70}.com/", "http://224.0.0.1:81/x"],
)
def test_urls_that_no_library_likes_are_one_sentence(url: str) -> None:
    with pytest.raises(RevisitError):
        fetch_public(url, max_pixels=10**6, max_bytes=10**6, formats=("PNG",), timeout=2)


def test_a_picture_that_only_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole download, not of each byte."""
    monkeypatch.setattr("revisit.serve.remote.public_address", lambda host, port: "127.0.0.1")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b"x")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began = time.monotonic()
        port = listening.getsockname()[1]
        with pytest.raises(RevisitError, match=r"too long|timed out"):
            fetch_public(f"http://x.example:{port}/", max_pixels=10, max_bytes=10**6, formats=("PNG",), timeout=0.7)
        assert time.monotonic() - began < 3
        thread.join(15)
