"""Measure what a second client notices while others attack `revisit serve`: response times, and the server's memory.

    python perf/attacks.py [NAME ...]    attacks of a few seconds each, on the loopback only; also n=8 against eight requests

Prints one JSON object: for each attack the statuses it got, the worst response time of the second client as a ratio to the median without
an attack, and the largest memory of the server.
"""

from __future__ import annotations

import base64
import json
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from serving import Server, data_uri, question

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SCHEMA = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}, "required": ["a"]}
CIRCLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def png(width: int, height: int, padding: int = 0) -> str:
    """Return a gray image of zeros as a data URI, with bytes that no decoder reads."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = piece(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = piece(b"IDAT", zlib.compress(bytes(height * (width + 1)), 9)) + piece(b"prVt", bytes(padding))
    file = b"\x89PNG\r\n\x1a\n" + header + pixels + piece(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


class Bench:
    """A server, its second client and its attackers."""

    def __init__(self, server: Server) -> None:
        self.server, self.chat = server, server.url + "/v1/chat/completions"
        self.address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

    def post(self, body: dict[str, Any] | bytes, seconds: float = 120) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            headers = {"content-type": "application/json"}
            return httpx.post(self.chat, content=content, headers=headers, timeout=seconds).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def many(self, body: dict[str, Any] | bytes, count: int, seconds: float = 120) -> Counter[str]:
        with ThreadPoolExecutor(count) as pool:
            return Counter(map(str, pool.map(lambda _: self.post(body, seconds), range(count))))

    def idle(self, head: str, sent: bytes, count: int, hold: float) -> Counter[str]:
        """Open connections that send a head and a part of a body, and hold them."""
        connections = [socket.create_connection(self.address) for _ in range(count)]
        for connection in connections:
            connection.sendall(head.encode() + b"\r\n" + sent)
        time.sleep(hold)
        found = Counter[str]()
        for connection in connections:
            connection.setblocking(False)
            try:
                found[connection.recv(12)[9:].decode() or "closed"] += 1
            except BlockingIOError:
                found["open"] += 1
            connection.close()
        return found

    def during(self, attack: Callable[[], Any]) -> dict[str, Any]:
        """Run an attack beside the second client; `attack` returns the statuses that it got."""
        times, health, memory, statuses = [], [], [], Counter[str]()
        ended = threading.Event()

        def second() -> None:
            while not ended.is_set() or not times:
                began = time.monotonic()
                statuses[str(self.post(question("tiny", data_uri(1), 3)))] += 1
                times.append(time.monotonic() - began)

        def watch() -> None:
            while not ended.is_set():
                began = time.monotonic()
                httpx.get(self.server.url + "/health", timeout=120)
                health.append(time.monotonic() - began)
                memory.append(self.server.memory())
                time.sleep(0.02)

        threads = [threading.Thread(target=second), threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        got = attack()
        seconds = time.monotonic() - began
        ended.set()
        for thread in threads:
            thread.join()
        return {
            "attack": {"seconds": round(seconds, 1), "statuses": dict(got or {})},
            "second client": {"statuses": dict(statuses), "median": statistics.median(times), "worst": max(times)},
            "health worst": max(health),
            "megabytes": {"before": round(memory[0]), "largest": round(max(memory))},
        }

    def attacks(self) -> dict[str, Callable[[], Any]]:
        declared, both = "Content-Length: 33000000\r\n", "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"
        values = b'{"model":"tiny","metadata":[' + b"0," * 15_000_000 + b"0]}"
        long = {"temperature": 1, "max_tokens": 1024, "stop": ["never seen", "nor this"]}
        return {
            "none": lambda: time.sleep(5),
            "a schema that fails": lambda: self.many(question("tiny", data_uri(2), 30, response_format=CIRCLE), 8),
            "clients that leave": lambda: self.many(question("tiny", data_uri(2), 1000, stream=True), 8, 0.2),
            "32 idle connections": lambda: self.idle(HEAD + declared, b"{", 32, 5),
            "half a body": lambda: self.idle(HEAD + declared, b" " * 16_000_000, 8, 3),
            "two lengths": lambda: self.idle(HEAD + both, b"ffffff\r\n" + b" " * 8_000_000, 8, 3),
            "padded images": lambda: self.many(question("tiny", png(8, 8, 23_000_000), 3), 8),
            "small values": lambda: self.many(values, 4),
            "64 megapixels": lambda: self.many(question("tiny", png(8000, 8000), 3), 6),
            "long answers": lambda: self.many(question("tiny", data_uri(2), 1024) | long, 8),
        }


def choices(bench: Bench) -> float:
    """Return the time of one request for eight answers over that of eight requests, one after the other."""
    body = question("tiny", data_uri(1), 16, temperature=1)

    def took(count: int, **more: Any) -> float:
        began = time.monotonic()
        for _ in range(count):
            bench.post(body | more)
        return time.monotonic() - began

    return statistics.median(took(1, n=8) / took(8) for _ in range(5))


def main() -> None:
    """Run all attacks on a random model."""
    from families import build

    with tempfile.TemporaryDirectory() as folder:
        for part in build("llava"):
            part.save_pretrained(folder)
        server = Server(folder, 1)
        try:
            server.wait()
            bench = Bench(server)
            bench.post(question("tiny", data_uri(0), 3))
            chosen = {"none", *(sys.argv[1:] or bench.attacks())}
            found = {name: bench.during(attack) for name, attack in bench.attacks().items() if name in chosen}
            typical = found["none"]["second client"]["median"]
            for one in found.values():
                second = one["second client"]
                second |= {name: round(second.pop(name) / typical, 1) for name in ("median", "worst")}
                one["health worst"] = round(one["health worst"], 3)
            result = {"idle_seconds": round(typical, 3), "n=8 over eight requests": round(choices(bench), 2), **found}
            print(json.dumps(result, indent=1))
        finally:
            server.process.kill()


if __name__ == "__main__":
    main()
