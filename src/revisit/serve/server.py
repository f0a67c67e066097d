"""Runs a server until it is stopped; accepted requests are answered first."""

from __future__ import annotations

import ctypes
import logging
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from revisit import methods
from revisit.errors import RevisitError, need
from revisit.models.loading import load
from revisit.serve.limits import UI_LIMITS, Limits

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address; raises RevisitError if that is not possible."""
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
    """http://host:port of a socket."""
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
    """Load a model and serve it; returns after SIGTERM or Ctrl-C, when all accepted requests are answered.

    Args:
        model: Local folder or Hub id.
        host: Address to listen on.
        port: Port to listen on.
        page: Also serve the interactive page. Beyond this machine it gets a random key unless there is one.
        method: Method of requests that name none.
        settings: Its settings, in place of those recommended for the model.
        limits: What the server accepts.
        api_key: Key that clients must send.
        anonymous: Allow other machines without a key.
        allow_hosts: Further names the server answers to.
        name: Name of the model in requests; `model` by default.
        announce: Called with one sentence when the server is ready.
        **load_options: Passed to `revisit.load`.
    """
    need("fastapi", "uvicorn", "prometheus_client")
    import uvicorn

    from revisit.serve.access import allowed_hosts, check_exposure, is_loopback
    from revisit.serve.app import Service, build
    from revisit.serve.connections import configure
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
        warnings.filterwarnings("ignore", module="PIL")  # about what clients send, as often as they like
        return_memory()
        uvicorn.Server(configure(app, limits, service.metrics)).run(sockets=[listening])
