"""Where the published data and the golden cases are; tests that need them say so when they are absent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published data files."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"published data files are not at {path}")
    return path


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Reads a golden file by name."""

    def read(name: str) -> Any:
        path = SHARED / "golden" / f"{name}.json"
        if not path.exists():
            pytest.skip(f"golden cases are not at {path}")
        return json.loads(path.read_text("utf-8"))

    return read


@pytest.fixture
def nltk_data(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NLTK data as a user would point to it."""
    path = shared_data / "nltk_data"
    monkeypatch.setenv("NLTK_DATA", str(path))
    return path


class StubJudge:
    """A chat-completions server on the loopback: serves `replies` in turn (a number is an error status, an object a whole body)."""

    def __init__(self) -> None:
        self.replies: list[str | int | dict[str, Any]] = []
        self.prompts: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.prompts.append(request["messages"][-1]["content"])
                reply = stub.replies.pop(0)
                body = b"no"
                if isinstance(reply, str):
                    reply = {"choices": [{"message": {"content": reply}}]}
                if isinstance(reply, dict):
                    body = json.dumps(reply).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def stub_judge() -> Iterator[StubJudge]:
    """A running stub judge."""
    stub = StubJudge()
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stub
    stub.server.shutdown()
    thread.join()
    stub.server.server_close()
