"""The settings of one request, checked on arrival."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from revisit import settings
from revisit.decoding.method import Method
from revisit.errors import RevisitError, short
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.types import Configured
from revisit.registry import parse_entry

KEY, RISK = "revisit", "risk"
METHODS = (ReVisiT.name, Greedy.name)
LAYERS_SWITCH = "REVISIT_VLLM_LAYERS"
LONGEST = 2_000  # characters of a request's settings in a string


def read(extra_args: Mapping[str, object] | None) -> dict[str, Any] | None:
    """Return the settings that a request has under "revisit", or None if it did not opt in.

    They may be a mapping (from Python), or a JSON object or `revisit:alpha=1e-3,layers=all` in a string (vLLM's HTTP interface
    passes only strings, numbers and lists); true, 1 and "revisit" mean the recommended settings. The key "method" is "revisit",
    unless it is "greedy" for plain decoding with a floor.
    """
    value = None if extra_args is None else extra_args.get(KEY)
    if isinstance(value, str):
        value = _from_text(value)
    if value is None or value is False or value == 0:
        return None
    if value is True or value == 1:
        value = {}
    if not isinstance(value, Mapping):
        raise RevisitError(
            f'revisit: {short(value)} is not a set of settings; send an object such as {{"alpha": 1e-5, "layers": "last"}} (over HTTP: as '
            "a JSON string), or true for the recommended settings."
        )
    found = {"method": ReVisiT.name} | {str(key): setting for key, setting in value.items()}
    if found["method"] not in METHODS:
        raise RevisitError(
            f"revisit: vLLM decodes with the methods {' and '.join(METHODS)}, not {short(found['method'])}."
        )
    names = found.get("names", ())
    if not isinstance(names, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in names):
        raise RevisitError(
            'revisit: names must be lists of words, such as [["dog", "puppy"], ["cat"]]; a server reads no file.'
        )
    return found


def parse(extra_args: Mapping[str, object] | None, model: Configured) -> Method | None:
    """Return the method that a request names, or None if it is to be decoded plainly.

    Args:
        extra_args: Those of the request's sampling parameters.
        model: Provides `config.model_type` and `generation_config.revisit`, the recommended settings.
    """
    settings = read(extra_args)
    if settings is None:
        return None
    if RISK in settings:
        raise RevisitError("revisit: risk is settled when a request arrives.")
    name = settings.pop("method")
    method = Greedy(**settings) if name == Greedy.name else ReVisiT.recommended(model, **settings)
    return method if method.floor or name == ReVisiT.name else None


def _from_text(text: str) -> object:
    if len(text) > LONGEST:
        raise RevisitError(f"revisit: the settings have {len(text):,} characters; at most {LONGEST:,} are allowed.")
    if text.partition(":")[0].strip() in METHODS:
        name, found = parse_entry(text)
        return {"method": name, **found}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RevisitError(
            f'revisit: {short(text)} is not JSON; send an object in a string such as "{{\\"alpha\\": 1e-5}}", or true for the '
            "recommended settings."
        ) from None


def kept_layers(model: Configured) -> str | tuple[int, ...]:
    """Return the layers whose states this server stores besides the last: `REVISIT_VLLM_LAYERS`, or the recommended ones.

    They are fixed, because compiled models and captured graphs return the same outputs for every request.
    """
    text = settings.vllm_layers()
    method = ReVisiT.recommended(model) if text is None else ReVisiT(layers=text)  # type: ignore[arg-type]
    return method.layers


def check(method: ReVisiT, kept: str | tuple[int, ...]) -> None:
    """Raise RevisitError if a request needs layers that the server does not store."""
    needed = method.layers
    if needed in ("last", kept):
        return
    if isinstance(needed, tuple) and isinstance(kept, tuple) and set(needed) <= set(kept):
        return
    server, request = (layers if isinstance(layers, str) else ",".join(map(str, layers)) for layers in (kept, needed))
    raise RevisitError(
        f"revisit: this server stores vision states of layers {server!r} only, not {request!r}; use 'last' or {server!r}, or start "
        f"it with {LAYERS_SWITCH}={request}."
    )
