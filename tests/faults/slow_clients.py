"""Clients that send half a request and wait, or send it byte by byte."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BEGINNINGS = (
    b"",
    b"GET /health HTT",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    HEAD,
    HEAD + b"Content-Length: 100000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
)


def half_open(port: int, count: int, dice: random.Random) -> list[socket.socket]:
    """So many connections, each with the beginning of a request; those that the server refuses are left out."""
    found = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), 10)
            connection.sendall(dice.choice(BEGINNINGS))
            found.append(connection)
    return found


class SlowClients:
    """So many clients at every moment, which send a byte now and then and come back when they are closed."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        self.port, self.count, self.dice = port, count, random.Random(seed)
        self.opened = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SlowClients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        open_now: list[socket.socket] = []
        while not self._stop.wait(0.2):
            new = half_open(self.port, self.count - len(open_now), self.dice)
            self.opened += len(new)
            open_now += new
            for connection in list(open_now):
                try:
                    connection.sendall(b"x")
                except OSError:  # closed by the server
                    connection.close()
                    open_now.remove(connection)
        for connection in open_now:
            connection.close()
