"""A file server on the loopback interface, with failing transfers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Serves `files` (path -> content); `cut` ends a path's next transfers after that many bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, list[int]] = {}
        self.status: dict[str, list[int]] = {}  # statuses to answer with first
        self.requests: list[str] = []
        self.sent: list[str] = []  # paths whose content was sent
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, handler: Any) -> None:
        path = handler.path
        self.requests.append(path)
        if self.status.get(path):
            return self.short(handler, self.status[path].pop(0))
        if path not in self.files:
            return self.short(handler, 404)
        content = self.files[path]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        self.sent.append(path)
        if self.cut.get(path):
            handler.wfile.write(content[: self.cut[path].pop(0)])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
            return None
        handler.wfile.write(content)
        return None

    def short(self, handler: Any, status: int) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
