"""Images behind URLs, where the user allows them: from public addresses only.

The name is resolved once and the connection goes to the address that was checked, so a name that changes its answer
in between gains nothing. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from revisit.errors import RevisitError
from revisit.models.images import MAX_BYTES, MAX_PIXELS, WEB_FORMATS, read_image

if TYPE_CHECKING:
    from PIL.Image import Image


def public_address(host: str, port: int) -> str:
    """An address of the host; refuses hosts with any address that is not public."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise RevisitError(f"The host {host!r} cannot be found.") from None
    for address in found:
        place = ipaddress.ip_address(address.partition("%")[0])
        if not place.is_global or place.is_multicast:
            raise RevisitError(f"Images from {host!r} are refused: it is not a public address.")
    return sorted(found)[0]


def fetch_image(url: str, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES, timeout: float = 20.0) -> Image:
    """The image behind an http(s) URL, of bounded size and within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise RevisitError("An image URL must begin with http:// or https:// and name a host.")
    address = public_address(host, port)
    try:
        raw = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise RevisitError(f"The image could not be fetched: {error}.") from None
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        secure = parts.scheme == "https"
        connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host) if secure else raw
        wanted = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", quote(wanted, safe="/?&=%:@!$'()*+,;~-._"))
        reply = connection.getresponse()
        if reply.status != 200:
            raise RevisitError(f"The image's URL answered with status {reply.status}; redirects are not followed.")
        data = b""
        while len(data) <= max_bytes and (part := reply.read1(1 << 16)):
            data += part
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it took too long")
            connection.sock.settimeout(left)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, RevisitError):
            raise
        raise RevisitError(f"The image could not be fetched: {error}.") from None
    finally:
        connection.close()
        raw.close()
    if len(data) > max_bytes:
        raise RevisitError(f"The image behind the URL is larger than {max_bytes:,} bytes.")
    return read_image(data, "behind the URL", max_pixels=max_pixels, formats=WEB_FORMATS)
