"""Run a server until it is stopped."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revisit import methods
from revisit.errors import RevisitError, need, short
from revisit.guard.rates import find_rate, no_risk, promised_call
from revisit.serve.limits import LOOPBACK, Limits


def check_exposure(host: str, api_key: str | None, anonymous: bool) -> None:
    """Raise RevisitError if other machines could use the server without a key, unless `anonymous` allows it."""
    if host not in LOOPBACK and not api_key and not anonymous:
        raise RevisitError(
            f"Other machines could use a server on {host!r}: set REVISIT_API_KEY (or --api-key), or pass --anonymous."
        )


def allowed_hosts(host: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names that a server on `host` accepts in the Host header; "*" stands for any.

    A server on all addresses (0.0.0.0) accepts any name unless some are listed: it has a key, or it is open on purpose.
    """
    any_name = host in ("0.0.0.0", "::") and not more
    return ("*",) if any_name else (*LOOPBACK, host.lower(), *(name.lower() for name in more))


def check_origins(origins: Sequence[str], api_key: str | None) -> None:
    """Raise RevisitError for what a browser never sends as an origin, and for any page together with a key."""
    for origin in origins:
        if origin == "*" and api_key:
            raise RevisitError("--allow-origin '*' would let any page use the key; list the pages' origins instead.")
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise RevisitError(f"--allow-origin must be an origin such as https://example.org, not {short(origin)}.")


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to this address; raise RevisitError if that is not possible."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror or error
        raise RevisitError(f"Cannot listen on {host}:{port} ({why}); choose another --port.") from None


def serve(
    model: str,
    *,
    host: str,
    port: int,
    limits: Limits,
    page: bool = False,
    method: str = "revisit",
    method_named: bool = False,
    settings: Mapping[str, object] | None = None,
    api_key: str | None = None,
    anonymous: bool = False,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    name: str | None = None,
    risk: float | None = None,
    calibration: Path | None = None,
    any_calibration: bool = False,
    **load_options: Any,
) -> None:
    """Load a model and serve it until SIGTERM, SIGHUP or Ctrl-C.

    Accepted requests then have 30 seconds to finish; a second Ctrl-C ends the process at once. With `page`, the interactive
    page is served too, with a random key if other machines can reach it and none is given.
    """
    need("fastapi", "uvicorn", "prometheus_client")
    if page and not api_key and host not in LOOPBACK:
        api_key = secrets.token_urlsafe(24)
    check_exposure(host, api_key, anonymous)
    check_origins(allow_origin, api_key)
    with listen(host, port) as listening:
        methods.get(method, **(settings or {}))  # a wrong setting fails before the model is loaded

        from revisit.models.loading import load
        from revisit.serve.app import Service, build
        from revisit.serve.connection import Server, configure
        from revisit.serve.decoder import Decoder
        from revisit.serve.requests import PromisedServer
        from revisit.serve.ui import add_page

        loaded, processor = load(model, **load_options)
        chosen, promised = methods.as_method(method, loaded, **(settings or {})), None
        if risk is None:
            no_risk(calibration, any_calibration)
        else:
            call = risk, calibration, any_calibration, chosen if method_named or settings else None
            chosen, _, _, note = promised_call(loaded, processor, *call, None, None)
            promised = PromisedServer(find_rate(loaded, risk, calibration), any_calibration)
            print(note, file=sys.stderr)
        service = Service(
            Decoder(loaded, processor),
            name or model,
            chosen,
            limits,
            promised=promised,
            api_key=api_key or None,
            hosts=allowed_hosts(host, allow_host),
            origins=allow_origin,
        )
        app, (_, bound_port) = build(service), listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        ready = f"Serving {service.name} with {service.method.name} at {address}/v1"
        if page:
            add_page(app, service)
            ready = f"The page is at {address}/{f'#key={api_key}' if api_key else ''}"
        print(f"{ready} (press Ctrl-C to stop).", file=sys.stderr, flush=True)
        warnings.filterwarnings("ignore", module="PIL")  # clients could cause any number of them
        server = Server(configure(app, limits))
        if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets
            signal.signal(signal.SIGHUP, server.handle_exit)
        server.run(sockets=[listening])
