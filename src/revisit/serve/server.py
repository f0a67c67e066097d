"""Runs the application until it is told to stop; then finishes what was begun."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from revisit.errors import RevisitError, need
from revisit.serve.limits import Limits

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address; raises RevisitError if it cannot be had."""
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


def answer_requests(config: Any, listening: socket.socket) -> None:
    """Run uvicorn until it is told to stop, for either server."""
    import uvicorn

    warnings.filterwarnings("ignore", module="PIL")  # about what clients send, as often as they like
    return_memory()
    uvicorn.Server(config).run(sockets=[listening])


def return_memory(seconds: float = 5.0) -> None:
    """Give freed memory back to the system every few seconds: glibc would keep what a few large images held."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return

    def work() -> None:
        while True:
            time.sleep(seconds)
            trim(0)

    threading.Thread(target=work, name="memory", daemon=True).start()


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    method: str = "revisit",
    settings: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    anonymous: bool = False,
    allow_url: bool = False,
    allow_hosts: Sequence[str] = (),
    name: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    allow_incomplete: bool = False,
    announce: Callable[[str], None] = logger.info,
) -> None:
    """Load a model and serve it; returns after SIGTERM or Ctrl-C, when all begun requests are answered.

    Requests that name no method get this one, with what is recommended for the model and these settings. `announce` is
    told the address when everything is ready.
    """
    need("fastapi", "uvicorn", "prometheus_client")
    from revisit import methods
    from revisit.models.loading import load
    from revisit.serve.access import allowed_hosts, check_exposure
    from revisit.serve.app import Service, build
    from revisit.serve.connections import configure
    from revisit.serve.decoder import Decoder

    check_exposure(host, api_key, anonymous)
    limits = limits or Limits()
    methods.get(method, **(settings or {}))  # before the model: a wrong setting fails at once
    with listen(host, port) as listening:
        loaded, processor = load(
            model,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_incomplete=allow_incomplete,
        )
        service = Service(
            Decoder(loaded, processor),
            name or model,
            methods.recommended(method, loaded, **(settings or {})),
            limits,
            api_key=api_key or None,
            allow_url=allow_url,
            hosts=allowed_hosts(host, allow_hosts),
        )
        config = configure(build(service), limits, service.metrics)
        place = f"{address(listening)}/v1"
        announce(f"Serving {service.name} with {service.method.name} at {place} (Ctrl-C ends it).")
        answer_requests(config, listening)
