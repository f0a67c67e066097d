"""A file server on the loopback interface, with failing transfers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """A server of `files` (path -> content); `cut` ends a path's next transfers after that many bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, list[int]] = {}
        self.status: dict[str, list[int]] = {}  # statuses of the first responses
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
        status = self.status[path].pop(0) if self.status.get(path) else 200 if path in self.files else 404
        content = self.files[path] if status == 200 else b""
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if status != 200:
            return
        self.sent.append(path)
        cut = self.cut[path].pop(0) if self.cut.get(path) else None
        handler.wfile.write(content[:cut])
        if cut is not None:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
