"""The published data files next to the repository, and a stub judge."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def shared_data(shared: Path) -> Path:
    """Return the folder of published data files; tests/data/golden checks the same rules in every clone."""
    return shared / "data"


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
