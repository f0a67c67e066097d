"""The server with a tiny real model, through the official client and through plain HTTP."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import families
import revisit
from revisit.decoding.generate import generate
from revisit.errors import RevisitError
from revisit.methods.greedy import Greedy
from revisit.methods.opera import OPERA
from revisit.methods.revisit import ReVisiT
from revisit.models.prompts import encode
from revisit.serve.batcher import Ticket
from revisit.serve.limits import Limits
from revisit.serve.server import check_origins
from servers import Running, as_uri, messages, serving, started, uri

JSON = {"content-type": "application/json"}
PADDING = bytes(1_000_000)
HALF = (  # of a request, whose client then waits or leaves
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b'Content-Length: 9999\r\n\r\n{"model"'
)


def expected(seed: int, tokens: int, method: Any, text: str = "What is this?") -> str:
    """Return the answer of `generate` to the same conversation, alone."""
    model, processor = families.build("llava")
    inputs = encode(processor, [f"USER: <image>\n{text} ASSISTANT:"], [[families.image(seed)]])
    output = generate(model, **inputs, method=method, max_new_tokens=tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    answer: str = processor.tokenizer.decode(new, skip_special_tokens=True)
    return answer.strip()


@contextmanager
def hooked(server: Running, action: Callable[[], object]) -> Iterator[None]:
    """Call a function before every forward pass."""

    def act(*_: object) -> None:
        action()

    hook = server.service.decoder.model.register_forward_pre_hook(act)
    yield
    hook.remove()


def test_answers_equal_those_of_generate(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=messages(1), max_tokens=12)
    assert answer.choices[0].message.content == expected(1, 12, ReVisiT(alpha=0.01))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"
    assert answer.decoding["vision_tokens"] == 16  # type: ignore[attr-defined]
    assert answer.decoding["steps"] == 12  # type: ignore[attr-defined]


def test_each_request_chooses_its_method(client: openai.OpenAI) -> None:
    chosen = {"decoding": {"method": "revisit", "settings": {"alpha": 1e-5, "layers": "all"}}}
    first = client.chat.completions.create(model="tiny", messages=messages(2), max_tokens=10, extra_body=chosen)
    plain = client.chat.completions.create(
        model="tiny", messages=messages(2), max_tokens=10, extra_body={"decoding": {"method": "greedy"}}
    )
    assert first.choices[0].message.content == expected(2, 10, ReVisiT(alpha=1e-5, layers="all"))
    assert plain.choices[0].message.content == expected(2, 10, Greedy())


def test_beam_search_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    chosen: Any = {"decoding": {"method": "opera", "settings": {"beams": 2, "candidates": 2}}}
    fields: Any = {"model": "tiny", "messages": messages(1), "max_tokens": 6}
    text = expected(1, 6, OPERA(beams=2, candidates=2))
    whole = client.chat.completions.create(**fields, extra_body=chosen)
    assert whole.choices[0].message.content == text
    pieces = client.chat.completions.create(**fields, extra_body=chosen, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    with pytest.raises(openai.BadRequestError, match="uses beam search, not sampling"):
        client.chat.completions.create(**fields, extra_body=chosen, temperature=0.7)


def test_streamed_pieces_add_up_to_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=messages(3), max_tokens=15, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected(3, 15, ReVisiT(alpha=0.01))
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 1  # in pieces, not at once
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_concurrent_requests_share_batches_and_do_not_affect_each_other(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(number: int) -> str | None:
        answer: Any = client.chat.completions.create(
            model="tiny", messages=messages(number, "Tell me " * (number % 4) + "this."), max_tokens=4 + number
        )
        assert answer.usage.completion_tokens == answer.decoding["steps"] == 4 + number  # of its own row
        return answer.choices[0].message.content  # type: ignore[no-any-return]

    sizes: list[int] = []
    decode = running.service.batcher.decode
    monkeypatch.setattr(running.service.batcher, "decode", lambda batch: sizes.append(len(batch)) or decode(batch))
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert answers == [expected(n, 4 + n, ReVisiT(alpha=0.01), "Tell me " * (n % 4) + "this.") for n in range(12)]
    assert sum(sizes) == 12
    assert max(sizes) > 1


def test_a_seed_reproduces_a_sample_in_any_batch(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="tiny", messages=messages(1), max_tokens=10, temperature=1.5, top_p=0.9, seed=seed
        )
        return answer.choices[0].message.content

    alone = [ask(seed) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, [1, 2, 1, 3]))
    assert together[:3] == [alone[0], alone[1], alone[0]]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "seed": 7, "logprobs": True}], ids=["greedy", "sampled"])
def test_several_choices_equal_requests_of_one(client: openai.OpenAI, stream: bool, fields: Any) -> None:
    """Choice k is the answer to the seed plus k; prompt tokens count once, and the others are added up."""
    common: Any = {"model": "tiny", "messages": messages(1), "max_tokens": 8, **fields}
    single = [
        client.chat.completions.create(**{**common, **({"seed": 7 + k} if "seed" in fields else {})}) for k in range(3)
    ]
    wanted = [answer.choices[0] for answer in single]
    assert len({choice.message.content for choice in wanted}) == (3 if fields else 1)
    if stream:
        chunks = list(
            client.chat.completions.create(**common, n=3, stream=True, stream_options={"include_usage": True})
        )
        pieces = [choice for chunk in chunks for choice in chunk.choices]
        texts = ["".join(p.delta.content or "" for p in pieces if p.index == k) for k in range(3)]
        assert [p.index for p in pieces if p.finish_reason] == [0, 1, 2]
        usage = chunks[-1].usage
    else:
        answer = client.chat.completions.create(**common, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice, one in zip(answer.choices, wanted, strict=True):
            assert (choice.logprobs is None) == (one.logprobs is None) == (not fields)
            tokens = [[entry.token for entry in c.logprobs.content or ()] if c.logprobs else [] for c in (choice, one)]
            assert tokens[0] == tokens[1]
        texts, usage = [choice.message.content or "" for choice in answer.choices], answer.usage
    assert texts == [choice.message.content for choice in wanted]
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == single[0].usage.prompt_tokens  # type: ignore[union-attr]


def test_stop_texts_end_the_answer(client: openai.OpenAI) -> None:
    whole = expected(1, 12, ReVisiT(alpha=0.01))
    stop = whole[4:6]
    answer = client.chat.completions.create(model="tiny", messages=messages(1), max_tokens=12, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.find(stop)].rstrip()
    assert answer.choices[0].finish_reason == "stop"


def test_conversations_without_an_image_are_decoded_plainly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=messages(None), max_tokens=3)
    assert answer.decoding["method"] == "greedy"  # type: ignore[attr-defined]
    assert answer.decoding["applied"] == 0  # type: ignore[attr-defined]


def test_bad_requests_get_status_400_and_one_sentence(running: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="marks an image"):
        client.chat.completions.create(model="tiny", messages=messages(1, "<image>"))
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="gpt", messages=messages(1))
    with pytest.raises(openai.BadRequestError, match="150 are allowed"):
        client.chat.completions.create(model="tiny", messages=messages(1, "long " * 200))
    with pytest.raises(openai.BadRequestError, match=r"1\d\d tokens \(images included\)"):  # only the image is too much
        client.chat.completions.create(model="tiny", messages=messages(1, "a" * 120))
    with pytest.raises(openai.BadRequestError, match="150 are allowed"):  # before the first piece of a stream
        client.chat.completions.create(model="tiny", messages=messages(1, "long " * 200), stream=True)
    assert client.chat.completions.create(model="tiny", messages=messages(1), max_tokens=1).usage is not None


def test_body_size_is_bounded_with_and_without_a_declared_length(running: Running) -> None:
    url = f"{running.url}/v1/chat/completions"
    large = b" " * 300_000

    def pieces() -> Iterator[bytes]:
        for _ in range(1200):
            yield b" " * 5_000

    for content in (large, b" " * 6_000_000, pieces()):  # sent whole before the client reads
        for connection in ("keep-alive", "close"):
            reply = httpx.post(url, content=content, headers=JSON | {"connection": connection}, timeout=60)
            assert reply.status_code == 413
            assert "200,000" in reply.json()["error"]["message"]
            content = pieces() if content not in (large, b" " * 6_000_000) else content
    assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_headers_are_bounded(running: Running) -> None:
    reply = httpx.get(f"{running.url}/v1/models", headers={"x": "y" * 70_000})
    assert reply.status_code in (400, 431)  # 400 from h11 if they arrive in pieces
    assert httpx.get(f"{running.url}/v1/models", headers={"x": "y" * 50_000}).status_code == 200


def closed_after(connection: socket.socket) -> float:
    """Return how many seconds a server takes to close a connection."""
    began = time.monotonic()
    connection.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1):
            pass
    return time.monotonic() - began


def test_slow_clients_are_cut_off() -> None:
    with serving(Limits(read_seconds=0.5)) as server:
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for sent in (b"", b"POST /v1/ch", HALF.replace(b"/v1/chat", b"/nowhere")):
            with socket.create_connection(server.address) as slow:
                slow.sendall(sent)
                assert closed_after(slow) < 20
        fields = {"stream": True, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({"model": "tiny", "messages": messages(1), **fields}).encode()
        head = HALF.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % len(body)
        with socket.socket() as reader:  # reads nothing of 300 kB
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(server.address)
            reader.sendall(head + body)
            until, connections = time.monotonic() + 60, server.server.server_state.connections
            while not connections and time.monotonic() < until:
                time.sleep(0.01)
            while connections and time.monotonic() < until:
                time.sleep(0.05)
            assert not connections


def test_bytes_count_when_they_arrive_not_when_they_are_declared() -> None:
    head = HALF.replace(b"9999", b"200000")
    with (
        serving(Limits(held_bytes=300_000, body_bytes=200_000, read_seconds=600)) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(socket.create_connection(server.address)).sendall(head)
        assert server.post(messages=messages(1), max_tokens=1).status_code == 200
        for _ in range(2):
            stack.enter_context(socket.create_connection(server.address)).sendall(head + b" " * 149_500)
        until = time.monotonic() + 200
        while server.service.held_bytes < 299_000 and time.monotonic() < until:
            time.sleep(0.05)
        assert server.post(messages=messages(1), max_tokens=1).status_code == 429
        stack.close()
        while server.post(messages=messages(1), max_tokens=1).status_code == 429 and time.monotonic() < until:
            time.sleep(0.05)
        assert server.post(messages=messages(1), max_tokens=1).status_code == 200


def test_a_body_with_two_lengths_is_rejected(running: Running) -> None:
    both = HALF.replace(b"Content-Length: 9999", b"Content-Length: 1\r\nTransfer-Encoding: chunked").partition(b"{")[0]
    with socket.create_connection(running.address, 30) as connection:
        connection.sendall(both + b"2\r\n{}\r\n0\r\n\r\n")
        reply = b""
        while b"Transfer-Encoding" not in reply and (part := connection.recv(1000)):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"Transfer-Encoding" in reply


def test_a_waiting_request_keeps_pixels_and_counts_them(running: Running) -> None:
    """The encoded image, its metadata and the messages are larger than all that the model needs."""

    def body(text: str) -> bytearray:
        chunk = struct.pack(">I", len(PADDING)) + b"prVt" + PADDING + struct.pack(">I", zlib.crc32(b"prVt" + PADDING))
        png = base64.b64decode(uri(1).partition(",")[2])
        image = {"type": "image_url", "image_url": {"url": as_uri(png[:-12] + chunk + png[-12:] + PADDING)}}
        content = [image, {"type": "text", "text": text}]
        return bytearray(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode())

    running.service.read(body("first"))
    sent = body("?" * 1000)
    tracemalloc.start()
    request, prompt = running.service.read(sent)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(sent) > 2_000_000
    assert kept < 100_000
    pixels = 3 * request.images[0].width * request.images[0].height
    assert Ticket(request, prompt, 1, None).held_bytes > pixels + 1000  # type: ignore[arg-type]


def test_requests_are_logged(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("revisit.access"), "propagate", True)

    def wait_for(part: str) -> None:
        """Requests are logged after their response."""
        until = time.monotonic() + 30
        while not any(part in record.getMessage() for record in caplog.records):
            assert time.monotonic() < until, [record.getMessage() for record in caplog.records]
            time.sleep(0.01)

    assert running.post(messages=[]).status_code == 400
    wait_for("POST /v1/chat/completions 400 - invalid_request 0.")
    assert running.post(messages=messages(1), max_tokens=2, stream=True).status_code == 200
    wait_for("POST /v1/chat/completions 200 revisit length ")
    assert httpx.get(f"{running.url}/a%0ab").status_code == 404
    wait_for(r"GET /a\nb 404")


def test_metrics_count_requests_and_tokens() -> None:
    with serving() as server:
        for fields in ({"max_tokens": 3}, {"max_tokens": 2, "stream": True}, {"max_tokens": 0}):
            server.post(messages=messages(1), **fields)
        time.sleep(0.5)
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    chat = 'revisit_requests_total{method="%s",reason="%s",route="/v1/chat/completions",status="%s"} %s'
    assert chat % ("revisit", "length", 200, 2.0) in lines
    assert chat % ("-", "invalid_request", 400, 1.0) in lines
    assert 'revisit_tokens_total{kind="completion"} 5.0' in lines
    assert "revisit_held_bytes 0.0" in lines


def test_routes(running: Running) -> None:
    assert "POST /v1/chat/completions" in httpx.get(running.url).json()["endpoints"]
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == "tiny"
    for path, status in (("v1/models/other", 404), ("nowhere", 404), ("v1/chat/completions", 405)):
        reply = httpx.get(f"{running.url}/{path}")
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == "invalid_request_error"
    for path in ("v1/responses", "v1/completions"):
        assert "/v1/chat/completions" in running.post(f"/{path}").json()["error"]["message"]


def test_pages_of_allowed_origins_can_call_the_server(running: Running) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}

    def allowed(server: Running, origin: str) -> list[str | None]:
        url, headers = f"{server.url}/v1/chat/completions", {"origin": origin}
        replies = [httpx.options(url, headers=headers | asks), httpx.post(url, json={}, headers=headers)]
        return [reply.headers.get("access-control-allow-origin") for reply in replies]

    with serving(origins=["https://a.example"]) as server:
        assert allowed(server, "https://a.example") == ["https://a.example"] * 2
        assert allowed(server, "https://b.example") == [None] * 2
    assert allowed(running, "https://a.example") == [None] * 2
    check_origins(["https://a.example:8000", "*"], None)
    for origins in (["*"], ["a.example"], ["https://a.example/page"]):
        with pytest.raises(RevisitError, match="--allow-origin"):
            check_origins(origins, "key")


@pytest.mark.parametrize(
    ("key", "status"),
    [
        *((None, 401), ("Bearer wrong", 401), ("right", 401), ("Basic right", 401)),
        *(("Bearer rig\u00e9t", 401), ("Bearer right", 200), ("bearer right", 200), ("BEARER  right", 200)),
    ],
)
def test_requests_need_the_key(running: Running, key: str | None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.service, "api_key", "right")
    headers = {} if key is None else {"authorization": key.encode("latin-1")}
    fields = {"model": "tiny", "messages": messages(1), "max_tokens": 1}
    url = f"{running.url}/v1/chat/completions"
    assert httpx.post(url, json=fields, headers=headers, timeout=60).status_code == status
    assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status
    assert httpx.get(f"{running.url}/health").status_code == 200


def test_accepted_requests_are_answered_after_sigterm(tmp_path: Path) -> None:
    with started(tmp_path) as (process, url):
        fields = {"model": "tiny", "messages": messages(1), "max_tokens": 80, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=fields, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in rest[:-1]]
        assert "".join(pieces) == expected(1, 80, ReVisiT())
        assert process.wait(60) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(("signals", "status"), [(["SIGHUP"], 0), (["SIGINT", "SIGINT"], 130)])
def test_signals_end_the_server_as_documented(tmp_path: Path, signals: list[str], status: int) -> None:
    with started(tmp_path) as (process, url):
        fields = {"model": "tiny", "messages": messages(1), "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=fields, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            for name in signals:
                os.kill(process.pid, getattr(signal, name))
                time.sleep(0.5)
            if status:
                assert process.wait(2) == status
            else:
                assert [line for line in lines if line][-1] == "data: [DONE]"
                assert process.wait(60) == status
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    "body",
    [
        r'{"model": "tiny", "messages": [{"role": "user", "content": "a \ud800 b"}]}',
        r'{"model": "tiny", "\uD800": 1, "messages": [{"role": "user", "content": "a"}]}',
        '{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
        '{"url": "data:image/png;base64,é"}}]}]}',
    ],
)
def test_invalid_characters_get_status_400(running: Running, body: str) -> None:
    reply = httpx.post(f"{running.url}/v1/chat/completions", content=body.encode(), headers=JSON, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_internal_errors_are_reported(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(running.service, "read", broken)
    reply = running.post(messages=messages(1))
    assert reply.status_code == 500
    assert "see the server's log" in reply.json()["error"]["message"]


def test_images_in_memory_are_bounded_per_request_and_in_total() -> None:
    pixels = families.image(0).width * families.image(0).height
    limits = Limits(image_pixels=2 * pixels, held_bytes=3 * 3 * pixels + 4_000, body_bytes=4_000, batch=1)
    with serving(limits) as server, hooked(server, lambda: time.sleep(0.3)):
        three = [{"type": "image_url", "image_url": {"url": uri(0)}} for _ in range(3)]
        too_many = server.post(messages=[{"role": "user", "content": three}])
        assert too_many.status_code == 400
        assert "pixels" in too_many.json()["error"]["message"]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda n: server.post(messages=messages(n), max_tokens=4), range(6)))
        statuses = [reply.status_code for reply in replies]
        assert statuses.count(200) >= 2
        assert 429 in statuses


def test_other_host_names_are_rejected(running: Running) -> None:
    """A page of another site can point its name here (DNS rebinding), but cannot change the Host header."""
    for host, status in (
        ("evil.example", 403),
        ("localhost:8000", 200),
        ("[::1]:80", 200),
        ("", 403),
        ("[x", 403),
        ("127.0.0.1#.evil.com", 403),
    ):
        assert httpx.get(f"{running.url}/v1/models", headers={"host": host}).status_code == status, host
    assert httpx.get(f"{running.url}/health", headers={"host": "probe.internal"}).status_code == 200


def test_aborted_uploads_are_not_internal_errors(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with socket.create_connection(running.address) as connection:
            connection.sendall(HALF)
            time.sleep(0.05)
    until, connections = time.monotonic() + 10, running.server.server_state.connections
    while connections and time.monotonic() < until:
        time.sleep(0.05)
    assert not connections
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_full_queue_gets_status_429() -> None:
    hold = threading.Event()
    with (
        serving(Limits(queue=1, batch=1)) as server,
        hooked(server, lambda: hold.wait(60)),
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        held = []
        for waiting in (0, 1):  # one is decoded, one waits
            held.append(pool.submit(server.post, messages=messages(1), max_tokens=1))
            while len(server.service.batcher.running + server.service.batcher.waiting) <= waiting:
                time.sleep(0.01)
        code = server.post(messages=messages(2)).json()["error"]["code"]
        hold.set()
        assert code == "queue_full"
        assert [reply.result().status_code for reply in held] == [200, 200]


def test_reading_has_a_time_limit_and_does_not_block_health(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    with serving(Limits(read_seconds=0.3)) as server:
        monkeypatch.setattr(server.service, "read", lambda *_: answered.wait(60))
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = [pool.submit(server.post, messages=messages(1)) for _ in range(6)]
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            assert {reply.result().status_code for reply in replies} == {408}
            answered.set()
        with socket.create_connection(server.address, 30) as slow:
            slow.sendall(HALF)
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


# -- checks ------------------------------------------------------------------------------------------------------------


def same_words(served: Any, checked: revisit.Check) -> None:
    """Assert that the server's check equals that of `revisit.check`, except for rounding."""
    assert served["text"] == checked.text
    for got, wanted in zip(served["words"], checked.to_dict()["words"], strict=True):
        assert got["support"] == pytest.approx(wanted["support"], rel=1e-3, abs=1e-6)
        for name in ("text", "start", "end", "checkable", "patch_row", "patch_col", "box"):
            assert got[name] == wanted[name]


def local_check(seed: int, text: str, prompt: str = "What is this?") -> revisit.Check:
    return revisit.check(families.build("llava"), families.image(seed), text, prompt, words="content")


@pytest.mark.parametrize("method", ["revisit", "greedy", "vcd"])
def test_checked_answers_equal_those_of_check(client: openai.OpenAI, method: str) -> None:
    more = {"check": {"words": "content", "threshold": 0.5}, "decoding": {"method": method}}
    for seed in range(1, 12):  # a random model writes a word about some image
        answer = client.chat.completions.create(model="tiny", messages=messages(seed), max_tokens=12, extra_body=more)
        check = answer.check  # type: ignore[attr-defined]
        if check["words"]:
            break
    assert check["words"]
    assert check["text"] == answer.choices[0].message.content
    same_words(check, local_check(seed, check["text"]))
    doubtful = [word["text"] for word in check["words"] if word["checkable"] and word["support"] < 0.5]
    assert check["flagged"] == doubtful


def test_checking_an_answer_needs_no_forward_pass(running: Running) -> None:
    passes: list[int] = []
    with hooked(running, lambda: passes.append(1)):
        for check in (None, True):
            running.post(messages=messages(1), max_tokens=6, check=check)
    assert len(passes) == 12


def test_a_wrong_recommendation_for_checks_affects_checks_only(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.service.decoder.model.generation_config, "check", {"layer": 99}, raising=False)
    assert running.post(messages=messages(1), max_tokens=1, check=True).status_code == 400
    assert running.post(messages=messages(1), max_tokens=1).status_code == 200


def test_the_last_chunk_of_a_stream_has_the_check(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages(1), max_tokens=8, stream=True, extra_body={"check": True}
        )
    )
    assert [hasattr(chunk, "check") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].check["text"] == "".join(c.choices[0].delta.content or "" for c in chunks)  # type: ignore[attr-defined]


def post_check(running: Running, **fields: Any) -> httpx.Response:
    return running.post("/v1/check", **{"image": uri(1), "text": "A dog on a couch.", **fields})


def test_texts_are_checked_together_in_one_pass(running: Running) -> None:
    texts = ["A dog on a couch.", "Two cats.", "A very long table with cups and a bird in the room."]
    passes: list[int] = []
    batcher = running.service.batcher

    def gather() -> None:
        """Hold the first pass until all three requests have arrived, however slow the machine is."""
        give_up = time.monotonic() + 60
        while not passes and len(batcher.running + batcher.waiting) < 3 and time.monotonic() < give_up:
            time.sleep(0.01)
        passes.append(1)

    def check(number: int) -> httpx.Response:
        return post_check(running, image=uri(number), text=texts[number], words="content", prompt="What is this?")

    with hooked(running, gather), concurrent.futures.ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(check, range(3)))
    assert len(passes) < 3
    for number, reply in enumerate(replies):
        assert reply.status_code == 200
        assert reply.json()["object"] == "check"
        same_words(reply.json(), local_check(number, texts[number]))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": ""}, "text"),
        ({"text": "?!"}, "no word to check"),
        ({"text": "dog " * 400}, "at most 150"),
        ({"text": "a" * 70_000}, "at most 65536 characters"),
        ({"text": "An <image> of a dog"}, "marks an image in this model"),
        ({"prompt": "An <image>?"}, "marks an image"),
        ({"image": None}, "image"),
        ({"image": ["nowhere.jpg"]}, "data URI"),
        ({"image": "https://example.com/a.png"}, "data URI"),
        ({"threshold": 2}, "threshold"),
        ({"words": []}, "words"),
        ({"words": "verbs"}, "words"),
        ({"temperature": 1}, "temperature"),
        ({"model": "other"}, "no model 'other'"),
    ],
)
def test_wrong_checks_get_one_sentence(running: Running, fields: Any, sentence: str) -> None:
    reply = post_check(running, **fields)
    assert reply.status_code == (404 if "model" in fields else 400)
    assert sentence in reply.json()["error"]["message"]
    assert "\n" not in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] in (None, *fields)
