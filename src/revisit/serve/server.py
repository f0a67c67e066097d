"""Runs the application until it is told to stop; then finishes what was begun."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from typing import Any

from revisit.errors import RevisitError
from revisit.serve.limits import Limits


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_key: str | None, anonymous: bool) -> None:
    """A server that others can reach needs a key, or an explicit word that it shall have none."""
    if not is_loopback(host) and api_key is None and not anonymous:
        raise RevisitError(
            f"On {host!r} others could use this server: set REVISIT_API_KEY (or --api-key), or say --anonymous if that is wanted."
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that holds this address, or one sentence why it cannot be had."""
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
    name: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Load a model and serve it; returns after SIGTERM or Ctrl-C, when all begun requests are answered.

    Requests that name no method get this one, with what is recommended for the model and these settings.
    """
    check_exposure(host, api_key, anonymous)
    try:
        import uvicorn
    except ImportError:
        raise RevisitError("The server needs its extra: pip install 'revisit-decoding[serve]'.") from None
    from revisit import methods
    from revisit.models.loading import load
    from revisit.serve.app import Service, build
    from revisit.serve.decoder import Decoder

    limits = limits or Limits()
    methods.get(method, **(settings or {}))  # before the model: a wrong setting fails at once
    with listen(host, port) as listening:
        loaded, processor = load(model, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
        service = Service(
            Decoder(loaded, processor),
            name or model,
            methods.recommended(method, loaded, **(settings or {})),
            limits,
            api_key=api_key,
            allow_url=allow_url,
            log=lambda text: print(f"revisit: {text}", file=sys.stderr, flush=True),
        )
        config = uvicorn.Config(
            build(service),
            log_level="warning",
            timeout_graceful_shutdown=int(limits.seconds) + 5,
            timeout_keep_alive=15,
            backlog=1024,
            h11_max_incomplete_event_size=64 << 10,
        )
        address = f"[{host}]" if ":" in host else host
        place = f"http://{address}:{listening.getsockname()[1]}/v1"
        print(
            f"Serving {service.name} with {service.method.name} at {place} (Ctrl-C ends it).",
            file=sys.stderr,
            flush=True,
        )
        uvicorn.Server(config).run(sockets=[listening])
