"""`revisit doctor --engine`: what it finds on our server, and on servers that drop images or options."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

import families
from revisit.methods.greedy import Greedy
from servers import serving

pytest.importorskip("fastapi")


def checks(run: Run, url: str, folder: Path, *more: object) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit status, and the status and the value of every check."""
    done = run("doctor", *more, "--engine", url, "--out", folder / "report.json")
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == done.status
    assert url not in json.dumps(report)
    return done.status, {check["name"]: (check["status"], check["value"]) for check in report["checks"]}


@contextmanager
def fake(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """Serve a function of the request's body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.reply(*answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def completion(text: str, tokens: int = 20) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": tokens}}


def images(body: dict[str, Any]) -> list[str]:
    return [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]


def test_our_server_passes_every_check(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = tmp_path / "model"
    for part in families.build("llava"):
        part.save_pretrained(folder)
    with serving(method=Greedy()) as server:
        status, found = checks(run, server.url + "/v1/", tmp_path, folder, "--model", "tiny")
    assert {name: found[name] for name, (state, _) in found.items() if state != "PASS"} == {}
    assert status == 0
    assert found["image tokens"][1].startswith("17 for 128×128")  # 16 vision tokens and a line break
    assert "equal" in found["same text as transformers"][1]


def test_a_server_that_drops_images_fails(run: Run, tmp_path: Path) -> None:
    with fake(lambda body: completion("I see a dog.")) as url:
        status, found = checks(run, url, tmp_path)
    assert status == 1
    assert found["image"][0] == "FAIL"
    assert "not seen" in found["image"][1]
    assert {found[name][0] for name in ("log-probabilities", "seeds", "JSON schemas", "ReVisiT")} == {"NOTE"}


def test_a_server_that_sees_images_without_options_passes(run: Run, tmp_path: Path) -> None:
    with fake(lambda body: completion(str(len(str(images(body)))), 20 + 5 * len(images(body)))) as url:
        status, found = checks(run, url, tmp_path)
    assert status == 0
    assert found["image"][0] == "PASS"
    assert found["image tokens"] == ("PASS", "5 for 128×128, 5 for 256×256")


def test_a_server_that_rejects_images_fails(run: Run, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": "no images\x1b[2J here"}}) if images(body) else completion("Hello.")

    with fake(answer) as url:
        status, found = checks(run, url, tmp_path)
    assert status == 1
    assert found["image"] == ("FAIL", "rejected, status 400: no images\\x1b[2J here")


def test_settings_that_do_not_reach_the_decoding_fail(run: Run, tmp_path: Path) -> None:
    """The server checks ReVisiT's settings, and then samples without them."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "7" in body.get("vllm_xargs", {}).get("revisit", ""):
            return 400, {"message": "revisit: alpha must be at most 1"}
        return completion(f"{len(str(images(body)))} {body.get('seed')}")

    with fake(answer) as url:
        status, found = checks(run, url, tmp_path)
    assert status == 1
    assert found["ReVisiT"][0] == "FAIL"


@pytest.mark.parametrize("url", ["127.0.0.1:9", "file:///etc/passwd", "http://"])
def test_a_server_that_cannot_be_reached_is_an_error(run: Run, url: str) -> None:
    done = run("doctor", "--engine", url)
    assert done.status == 2
    assert "--engine" in done.err
