"""Images behind URLs: only from public addresses, in bounded size and time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from revisit.errors import RevisitError
from revisit.models.remote import fetch_image, public_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "::1", "0.0.0.0"])
def test_urls_to_this_network_are_refused_(host: str) -> None:
    with pytest.raises(RevisitError, match="not a public address"):
        public_address(host, 80)
    with pytest.raises(RevisitError, match="not a public address"):
        fetch_image(f"http://[{host}]/" if ":" in host else f"http://{host}/")


@pytest.mark.parametrize("url", ["ftp://example.org/x", "http://", "http://x:99999/"])
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(RevisitError, match="must begin with"):
        fetch_image(url)


@pytest.mark.parametrize(
    "url",
    ["http://[bad", "http://\u2603.com\u2100/", "http://a..b/", f"http://{'a' * 70}.com/", "http://224.0.0.1:81/x"],
)
def test_urls_that_no_library_likes_are_one_sentence(url: str) -> None:
    with pytest.raises(RevisitError):
        fetch_image(url, max_pixels=10**6, max_bytes=10**6, timeout=2)


def test_an_image_that_only_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole download, not of each byte."""
    monkeypatch.setattr("revisit.models.remote.public_address", lambda host, port: "127.0.0.1")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b"x")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began = time.monotonic()
        port = listening.getsockname()[1]
        with pytest.raises(RevisitError, match=r"too long|timed out"):
            fetch_image(f"http://x.example:{port}/", max_pixels=10, max_bytes=10**6, timeout=0.7)
        assert time.monotonic() - began < 3
        thread.join(15)
