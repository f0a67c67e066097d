"""Running a server until it is stopped."""

from __future__ import annotations

import copy
import ctypes
import math
import secrets
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from revisit import methods
from revisit.errors import RevisitError, need
from revisit.serve.limits import Limits

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

HEADER_BYTES = 64 << 10
GRACE = 30.0  # seconds for accepted requests when the server is stopped


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to this address; raise RevisitError if that is not possible."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror or error
        raise RevisitError(f"Cannot listen on {host}:{port} ({why}); choose another --port.") from None


def configure(app: FastAPI, limits: Limits, **options: Any) -> uvicorn.Config:
    """Configure uvicorn for an application within these limits; make glibc return the memory of large images when it is freed."""
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    logs = copy.deepcopy(LOGGING_CONFIG)  # one line per request, in uvicorn's format
    logs["loggers"]["uvicorn.error"]["level"] = "ERROR"
    return uvicorn.Config(
        app,
        http="h11",  # which bounds the size of headers
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        log_config=logs,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=math.ceil(min(limits.seconds, GRACE)),
        server_header=False,
        proxy_headers=False,
        **options,
    )


def serve(
    model: str,
    *,
    host: str,
    port: int,
    limits: Limits,
    page: bool = False,
    method: str = "revisit",
    settings: Mapping[str, object] | None = None,
    api_key: str | None = None,
    anonymous: bool = False,
    allow_hosts: Sequence[str] = (),
    name: str | None = None,
    **load_options: Any,
) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C.

    Accepted requests then have 30 seconds to be answered; a second Ctrl-C ends the process at once. With `page`, the interactive
    page is served too; beyond this machine it gets a random key unless one is given.
    """
    need("fastapi", "uvicorn")
    from revisit.serve.access import LOOPBACK, allowed_hosts, check_exposure

    if page and not api_key and host not in LOOPBACK:
        api_key = secrets.token_urlsafe(24)
    check_exposure(host, api_key, anonymous)
    with listen(host, port) as listening:
        methods.get(method, **(settings or {}))  # a wrong setting fails before the model is loaded

        import uvicorn

        from revisit.models.loading import load
        from revisit.serve.app import Service, build
        from revisit.serve.decoder import Decoder
        from revisit.serve.ui import add_page

        loaded, processor = load(model, **load_options)
        service = Service(
            Decoder(loaded, processor),
            name or model,
            methods.as_method(method, loaded, **(settings or {})),
            limits,
            api_key=api_key or None,
            hosts=allowed_hosts(host, allow_hosts),
        )
        app, (_, bound) = build(service), listening.getsockname()[:2]
        place = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        ready = f"Serving {service.name} with {service.method.name} at {place}/v1"
        if page:
            add_page(app, service)
            ready = f"The page is at {place}/{f'#key={api_key}' if api_key else ''}"
        print(f"{ready} (Ctrl-C ends it).", file=sys.stderr, flush=True)
        warnings.filterwarnings("ignore", module="PIL")  # which clients could cause at will
        uvicorn.Server(configure(app, limits)).run(sockets=[listening])
