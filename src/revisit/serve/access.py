"""Access to the server: the Host header, the key, and bodies of bounded size and time."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from fastapi import Request

from revisit.errors import RevisitError
from revisit.serve.errors import ApiError, quoted
from revisit.serve.limits import Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_key: str | None, anonymous: bool) -> None:
    """Raises RevisitError for a server that others can reach without a key, unless that is wanted."""
    if not is_loopback(host) and not api_key and not anonymous:
        raise RevisitError(
            f"On {host!r} other machines could use this server: set REVISIT_API_KEY (or --api-key), or pass --anonymous."
        )


def allowed_hosts(host: str, more: Collection[str] = ()) -> tuple[str, ...]:
    """The names a server at `host` answers to: its own, those of this machine, and those its operator added.

    "*" means any. A server at every address (0.0.0.0) answers to any name unless some were added, because it has a key or
    is meant to be open.
    """
    everywhere = host in ("0.0.0.0", "::") and not more
    return ("*",) if everywhere else (*LOOPBACK, host.lower(), *(name.lower() for name in more))


def check_host(request: Request, allowed: Collection[str]) -> None:
    """Refuse requests under other names: pages of other sites reach a local server that way (DNS rebinding)."""
    header = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        name = ""
    if "*" not in allowed and name not in allowed:
        raise ApiError(
            403,
            f"This server does not accept the host {quoted(header)}; its operator can add it with --allow-host.",
            code="unknown_host",
        )


def check_key(request: Request, api_key: str | None) -> None:
    """Refuse requests without the server's key in their header `Authorization: Bearer KEY`."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    key = sent.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
    if api_key is not None and not hmac.compare_digest(key, api_key.encode()):  # in constant time
        raise ApiError(
            401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.", code="invalid_api_key"
        )


class Bodies:
    """Reads the bodies of requests: each of bounded size and in bounded time, all together of bounded size."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0  # bytes of requests that are arriving or being read

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body, which counts as held until the block ends."""
        size = self._declared(request)
        if self.held and self.held + size > self.limits.held_bytes:
            raise ApiError(429, "Too much data in requests being read; try again later.", code="queue_full")
        self.held += size
        try:
            yield await self._receive(request)
        finally:
            self.held -= size

    def _declared(self, request: Request) -> int:
        """The declared size of the body, or the largest allowed one if it is not declared."""
        declared = request.headers.get("content-length", "")
        if not declared:
            return self.limits.body_bytes
        plain = declared.isascii() and declared.isdigit() and len(declared) < 18
        if not plain or int(declared) > self.limits.body_bytes:
            raise self._too_large
        return int(declared)

    @property
    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The request is larger than the {self.limits.body_bytes:,} bytes allowed.", code="body_too_large"
        )

    async def _receive(self, request: Request) -> bytes:
        body = bytearray()

        async def receive() -> None:
            async for part in request.stream():
                if len(body) + len(part) > self.limits.body_bytes:
                    raise self._too_large
                body.extend(part)

        try:
            await asyncio.wait_for(receive(), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, "The request did not arrive in time.") from None
        return bytes(body)
