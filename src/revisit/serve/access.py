"""Access to the server: the Host header and the API key."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request

from revisit.errors import RevisitError
from revisit.serve.errors import ApiError, printable

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_exposure(host: str, api_key: str | None, anonymous: bool) -> None:
    """Raise RevisitError for a server that other machines could use without a key, unless that was chosen."""
    if host not in LOOPBACK and not api_key and not anonymous:
        raise RevisitError(
            f"On {host!r} other machines could use this server: set REVISIT_API_KEY (or --api-key), or pass --anonymous."
        )


def allowed_hosts(host: str, more: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names that a server at `host` accepts in the Host header; "*" means any.

    A server at every address (0.0.0.0) accepts any name unless some are listed: it has a key or is meant to be open.
    """
    everywhere = host in ("0.0.0.0", "::") and not more
    return ("*",) if everywhere else (*LOOPBACK, host.lower(), *(name.lower() for name in more))


def check_host(request: Request, allowed: Collection[str]) -> None:
    """Reject other names in the Host header: through them, pages of other sites reach a local server (DNS rebinding)."""
    header = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        name = ""
    if "*" not in allowed and name not in allowed:
        raise ApiError(
            403,
            f"This server does not accept the host {printable(header, 100)!r}; its operator can add it with --allow-host.",
            code="unknown_host",
        )


def check_key(request: Request, api_key: str | None) -> None:
    """Reject requests without the server's key in the header `Authorization: Bearer KEY`."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    key = sent.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
    if api_key is not None and not hmac.compare_digest(key, api_key.encode()):  # in constant time
        raise ApiError(
            401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.", code="invalid_api_key"
        )
