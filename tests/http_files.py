"""A file server on the loopback interface, with byte ranges and failing transfers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Serves `files` (path -> content); `cut` ends a path's next transfers after that many bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, list[int]] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.no_ranges: set[str] = set()
        self.status: dict[str, list[int]] = {}  # statuses to answer with first
        self.requests: list[tuple[str, str | None]] = []  # (path, Range header)
        self.sent: list[str] = []  # paths whose content was sent
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                outer.answer(self, body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, handler: Any, body: bool) -> None:
        path, wanted = handler.path, handler.headers.get("Range")
        self.requests.append((path, wanted))
        if self.status.get(path):
            return self.short(handler, self.status[path].pop(0))
        if path not in self.files:
            return self.short(handler, 404)
        content, first = self.files[path], 0
        if wanted and path not in self.no_ranges:
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            if first >= len(content):
                return self.short(handler, 416)
        part = content[first:]
        handler.send_response(206 if first or (wanted and path not in self.no_ranges) else 200)
        if wanted and path not in self.no_ranges:
            handler.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        for name, value in self.headers.get(path, {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        if not body:
            return None
        self.sent.append(path)
        if self.cut.get(path):
            handler.wfile.write(part[: self.cut[path].pop(0)])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
            return None
        handler.wfile.write(part)
        return None

    def short(self, handler: Any, status: int) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
