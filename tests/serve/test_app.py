"""The server with a tiny real model, through the official client and through plain HTTP."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

import families
import revisit
from revisit.decoding.generate import generate
from revisit.methods.greedy import Greedy
from revisit.methods.opera import OPERA
from revisit.methods.revisit import ReVisiT
from revisit.models.prompts import encode
from revisit.serve.app import Service, build
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits
from revisit.serve.server import configure

LIMITS = Limits(body_bytes=200_000, prompt_tokens=150, new_tokens=40, batch=8)


class Running:
    """A server in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        config = configure(build(service), service.limits, host="127.0.0.1", port=0)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(alpha=0.01), LIMITS))
    yield server
    server.stop()


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def uri(seed: int) -> str:
    buffer = io.BytesIO()
    families.image(seed).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def messages(seed: int | None, text: str = "What is this?") -> Any:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if seed is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": uri(seed)}})
    return [{"role": "user", "content": parts}]


def expected(seed: int, tokens: int, method: Any, text: str = "What is this?") -> str:
    """Return the answer of `generate` to the same conversation, alone."""
    model, processor = families.build("llava")
    inputs = encode(processor, [f"USER: <image>\n{text} ASSISTANT:"], [[families.image(seed)]])
    output = generate(model, **inputs, method=method, max_new_tokens=tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    answer: str = processor.tokenizer.decode(new, skip_special_tokens=True)
    return answer.strip()


def post(running: Running, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/chat/completions", json={"model": "tiny", **fields}, timeout=60)


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
        answer = client.chat.completions.create(
            model="tiny", messages=messages(number, "Tell me " * (number % 4) + "this."), max_tokens=4 + number
        )
        return answer.choices[0].message.content

    sizes: list[int] = []
    decode = running.service.batcher.decode
    monkeypatch.setattr(running.service.batcher, "decode", lambda b, n: sizes.append(len(b)) or decode(b, n))
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    wanted = [expected(n, 4 + n, ReVisiT(alpha=0.01), "Tell me " * (n % 4) + "this.") for n in range(12)]
    assert answers == wanted
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
    assert client.chat.completions.create(model="tiny", messages=messages(1), max_tokens=1).usage is not None


def test_body_size_is_bounded_with_and_without_a_declared_length(running: Running) -> None:
    url = f"{running.url}/v1/chat/completions"
    large = b" " * 300_000
    declared = httpx.post(url, content=large, headers={"content-type": "application/json"})
    assert declared.status_code == 413
    assert "200,000" in declared.json()["error"]["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(60):
            yield b" " * 5_000

    try:
        status = httpx.post(url, content=pieces(), headers={"content-type": "application/json"}).status_code
    except httpx.WriteError:  # closed while still sending
        status = 413
    assert status == 413
    assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_requests_are_logged(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert post(running, messages=[]).status_code == 400
    (line,) = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert "POST /v1/chat/completions" in line
    assert line.endswith("400")


def test_endpoints_and_neutral_fields(running: Running) -> None:
    reply = httpx.get(running.url)
    assert reply.status_code == 200
    assert "POST /v1/chat/completions" in reply.json()["endpoints"]
    assert post(running, messages=messages(1), tools=[], tool_choice="none", logit_bias={}, n=1).status_code == 200
    assert post(running, messages=messages(1), tools=[{}]).status_code == 400


def test_errors_before_the_first_piece_of_a_stream_have_their_status(running: Running) -> None:
    assert post(running, messages=messages(1, "long " * 200), stream=True).status_code == 400


def test_health_and_models(running: Running) -> None:
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{running.url}/v1/models/other").status_code == 404


def test_client_that_leaves_a_stream_ends_its_row(running: Running) -> None:
    fields = {"model": "tiny", "messages": messages(1), "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=fields, timeout=30) as reply:
        next(reply.iter_lines())
    assert post(running, messages=messages(1), max_tokens=1).status_code == 200
    assert running.service.batcher.waiting == 0


def test_requests_need_the_key() -> None:
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), LIMITS, api_key="right"))
    try:
        fields = {"model": "tiny", "messages": messages(1), "max_tokens": 1}
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "right"}, 401),  # a bare key
            ({"authorization": "Basic right"}, 401),
            ({"authorization": "Bearer rig\u00e9t".encode("latin-1")}, 401),
            ({"authorization": "Bearer right"}, 200),
            ({"authorization": "bearer right"}, 200),
            ({"authorization": "BEARER  right"}, 200),
        ):
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=fields, headers=headers, timeout=60).status_code == status
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        server.stop()


def test_answers_that_take_too_long_get_status_504() -> None:
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), Limits(seconds=1e-6)))
    try:
        assert post(server, messages=messages(1)).status_code == 504
    finally:
        server.stop()


def test_accepted_requests_are_answered_after_sigterm(tmp_path: Path) -> None:
    for part in families.build("llava"):
        part.save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"-m {tmp_path} --name tiny --port {port}"
    command = [sys.executable, "-m", "revisit", "serve", *options.split()]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        fields = {"model": "tiny", "messages": messages(1), "max_tokens": 80, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=fields, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in rest[:-1]]
        assert "".join(pieces) == expected(1, 80, ReVisiT())
        process.wait(60)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 200) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended before it was ready"
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("the server was not ready in time")


def raw(running: Running, body: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{running.url}/v1/chat/completions", content=body.encode(), headers=headers, timeout=60)


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
    reply = raw(running, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_unknown_routes_answer_with_the_protocols_errors(running: Running) -> None:
    for reply in (httpx.get(f"{running.url}/nowhere"), httpx.get(f"{running.url}/v1/chat/completions")):
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_internal_errors_are_reported(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(running.service, "read", broken)
    reply = post(running, messages=messages(1))
    assert reply.status_code == 500
    assert "see the server's log" in reply.json()["error"]["message"]


def test_each_row_counts_its_own_steps(running: Running) -> None:
    def ask(tokens: int) -> Any:
        return post(running, messages=messages(tokens), max_tokens=tokens).json()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        short, long = pool.map(ask, (3, 30))
    assert short["usage"]["completion_tokens"] == short["decoding"]["steps"] == 3
    assert long["decoding"]["steps"] == 30


def test_images_in_memory_are_bounded_per_request_and_in_total() -> None:
    pixels = families.image(0).width * families.image(0).height
    limits = Limits(image_pixels=2 * pixels, held_bytes=3 * 3 * pixels + 4_000, body_bytes=4_000, batch=1)
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), limits))
    hook = server.service.decoder.model.register_forward_pre_hook(lambda *_: time.sleep(0.3))
    try:
        three = [{"type": "image_url", "image_url": {"url": uri(0)}} for _ in range(3)]
        too_many = post(server, messages=[{"role": "user", "content": three}])
        assert too_many.status_code == 400
        assert "pixels" in too_many.json()["error"]["message"]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            statuses = [
                reply.status_code
                for reply in pool.map(lambda n: post(server, messages=messages(n), max_tokens=4), range(6))
            ]
        assert statuses.count(200) >= 2
        assert 429 in statuses
    finally:
        hook.remove()
        server.stop()


def test_other_host_names_are_rejected(running: Running) -> None:
    """A page of another site can point its name here (DNS rebinding), but cannot change the Host header."""
    for host, status in (("evil.example", 403), ("localhost:8000", 200), ("[::1]:80", 200), ("", 403), ("[x", 403)):
        assert httpx.get(f"{running.url}/v1/models", headers={"host": host}).status_code == status, host
    assert httpx.get(f"{running.url}/health", headers={"host": "probe.internal"}).status_code == 200


def test_aborted_uploads_are_not_internal_errors(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b'{"model"')
            time.sleep(0.05)
    until = time.monotonic() + 10
    while running.connections() and time.monotonic() < until:
        time.sleep(0.05)
    assert running.connections() == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_full_queue_gets_status_429() -> None:
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), Limits(queue=1, batch=1)))
    hold = threading.Event()
    hook = server.service.decoder.model.register_forward_pre_hook(lambda *_: hold.wait(60) and None)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            held = []
            for waiting in (0, 1):  # one is decoded, one waits
                held.append(pool.submit(post, server, messages=messages(1), max_tokens=1))
                while server.service.batcher.running + server.service.batcher.waiting <= waiting:
                    time.sleep(0.01)
            assert post(server, messages=messages(2)).json()["error"]["code"] == "queue_full"
            hold.set()
            assert [reply.result().status_code for reply in held] == [200, 200]
    finally:
        hold.set()
        hook.remove()
        server.stop()


def test_reading_has_a_time_limit_and_does_not_block_health(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    server = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), Limits(read_seconds=0.3)))
    try:
        monkeypatch.setattr(server.service, "read", lambda *_: answered.wait(60))
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = [pool.submit(post, server, messages=messages(1)) for _ in range(6)]
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            assert {reply.result().status_code for reply in replies} == {408}
            assert not answered.is_set()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as slow:  # sends half a body and waits
            head = "Content-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
            slow.sendall(f'POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n{head}{{"model"'.encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
    finally:
        answered.set()
        server.stop()


# -- checks ------------------------------------------------------------------------------------------------------------


def same_words(served: Any, checked: revisit.Check) -> None:
    """Assert that the server's check equals that of `revisit.check`, but for rounding."""
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


def test_checking_an_answer_needs_no_forward_pass(running: Running, client: openai.OpenAI) -> None:
    passes: list[int] = []
    hook = running.service.decoder.model.register_forward_hook(lambda *_: passes.append(1))
    for more in ({}, {"check": True}):
        client.chat.completions.create(model="tiny", messages=messages(1), max_tokens=6, extra_body=more)
    hook.remove()
    assert len(passes) == 12


def test_the_last_chunk_of_a_stream_has_the_check(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages(1), max_tokens=8, stream=True, extra_body={"check": True}
        )
    )
    assert [hasattr(chunk, "check") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].check["text"] == "".join(c.choices[0].delta.content or "" for c in chunks)  # type: ignore[attr-defined]


def post_check(running: Running, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "image": uri(1), "text": "A dog on a couch.", **fields}
    kept = {name: value for name, value in body.items() if value is not None}
    return httpx.post(f"{running.url}/v1/check", json=kept, timeout=60)


def test_texts_are_checked_together_in_one_pass(running: Running) -> None:
    texts = ["A dog on a couch.", "Two cats.", "A very long table with cups and a bird in the room."]
    passes: list[int] = []
    batcher = running.service.batcher

    def gather(*_: object) -> None:
        """Hold the first pass until all three requests have arrived, however slow the machine is."""
        give_up = time.monotonic() + 60
        while not passes and batcher.running + batcher.waiting < 3 and time.monotonic() < give_up:
            time.sleep(0.01)
        passes.append(1)

    hook = running.service.decoder.model.register_forward_pre_hook(gather)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(
                lambda n: post_check(running, image=uri(n), text=texts[n], words="content", prompt="What is this?"),
                range(3),
            )
        )
    hook.remove()
    assert len(passes) < 3
    for number, reply in enumerate(found):
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
        ({"image": "https://example.com/a.png"}, "nothing is fetched"),
        ({"threshold": 2}, "threshold"),
        ({"words": []}, "words"),
        ({"words": "verbs"}, "words"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_wrong_checks_get_status_400(running: Running, fields: Any, sentence: str) -> None:
    reply = post_check(running, **fields)
    assert reply.status_code == 400
    assert sentence in reply.json()["error"]["message"]
    assert "\n" not in reply.json()["error"]["message"]


def test_checks_need_an_image(running: Running) -> None:
    reply = post(running, messages=messages(None), check=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "check")
    assert post_check(running, model="other").status_code == 404
