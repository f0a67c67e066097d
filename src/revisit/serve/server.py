"""Running a server until it is stopped."""

from __future__ import annotations

import copy
import ctypes
import logging
import math
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from revisit import methods
from revisit.errors import RevisitError, need
from revisit.models.loading import load
from revisit.serve.limits import UI_LIMITS, Limits

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

logger = logging.getLogger(__name__)
HEADER_BYTES = 64 << 10
GRACE = 30.0  # seconds for accepted requests when the server is stopped


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to this address; raise RevisitError if that is not possible."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RevisitError(
            f"Cannot listen on {host}:{port} ({error.strerror or error}); choose another --port."
        ) from None
    return listening


def address(listening: socket.socket) -> str:
    """Return http://host:port of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def return_memory() -> None:
    """Return freed memory to the system every five seconds; glibc would keep the memory of large images."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return

    def work() -> None:
        while True:
            time.sleep(5)
            trim(0)

    threading.Thread(target=work, name="memory", daemon=True).start()


def configure(app: FastAPI, limits: Limits, **options: Any) -> uvicorn.Config:
    """Configure uvicorn for an application within these limits."""
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

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
    host: str = "127.0.0.1",
    port: int = 8000,
    page: bool = False,
    method: str = "revisit",
    settings: Mapping[str, object] | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    anonymous: bool = False,
    allow_hosts: Sequence[str] = (),
    name: str | None = None,
    announce: Callable[[str], None] = logger.info,
    **load_options: Any,
) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C.

    Accepted requests then have 30 seconds to be answered; a second Ctrl-C ends the process at once.

    Args:
        model: Local folder or Hub id.
        host: Address to listen on.
        port: Port to listen on.
        page: Also serve the interactive page. Beyond this machine it gets a random key unless one is given.
        method: Method of requests that name none.
        settings: Its settings, in place of those recommended for the model.
        limits: Bounds on requests.
        api_key: Key that clients must send.
        anonymous: Allow other machines without a key.
        allow_hosts: Further names to accept in the Host header.
        name: Name of the model in requests; `model` by default.
        announce: Called with one sentence when the server is ready.
        **load_options: Passed to `revisit.load`.
    """
    need("fastapi", "uvicorn", "prometheus_client")
    import uvicorn

    from revisit.serve.access import allowed_hosts, check_exposure, is_loopback
    from revisit.serve.app import Service, build
    from revisit.serve.decoder import Decoder
    from revisit.serve.ui import add_page

    if page and not api_key and not is_loopback(host):
        api_key = secrets.token_urlsafe(24)
    check_exposure(host, api_key, anonymous)
    limits = limits or (UI_LIMITS if page else Limits())
    methods.get(method, **(settings or {}))  # a wrong setting fails before the model is loaded
    with listen(host, port) as listening:
        loaded, processor = load(model, **load_options)
        service = Service(
            Decoder(loaded, processor),
            name or model,
            methods.as_method(method, loaded, **(settings or {})),
            limits,
            api_key=api_key or None,
            hosts=allowed_hosts(host, allow_hosts),
            allow_record=page,
        )
        app, place = build(service), address(listening)
        if page:
            add_page(app, service)
            announce(f"The page is at {place}/{f'#key={api_key}' if api_key else ''} (Ctrl-C ends it).")
        else:
            announce(f"Serving {service.name} with {service.method.name} at {place}/v1 (Ctrl-C ends it).")
        warnings.filterwarnings("ignore", module="PIL")  # which clients could cause at will
        return_memory()
        uvicorn.Server(configure(app, limits)).run(sockets=[listening])
