"""Clients that send half a request, byte by byte."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BEGINNINGS = (
    b"",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    HEAD + b"Content-Length: 100000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
)


class SlowClients:
    """A constant number of clients that send a byte now and then, and reconnect when they are closed."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        self.port, self.count, self.dice = port, count, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SlowClients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            open_now: list[socket.socket] = []
            while not self._stop.wait(0.2):
                while len(open_now) < self.count:
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))
                    connection.sendall(self.dice.choice(BEGINNINGS))
                    open_now.append(connection)
                for connection in list(open_now):
                    try:
                        connection.sendall(b"x")
                    except OSError:  # closed by the server
                        connection.close()
                        open_now.remove(connection)
