"""What one request asks for: read and checked where requests are admitted, so that a bad one is refused alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from revisit import settings
from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.models.families import LAYER_SETS
from revisit.models.types import Configured
from revisit.registry import parse_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = "revisit"
LAYERS_SWITCH = "REVISIT_VLLM_LAYERS"


def parse(extra_args: Mapping[str, object] | None, model: Configured) -> ReVisiT | None:
    """The method that a request asks for under "revisit", or None if it did not opt in.

    As everywhere, what is recommended for the model holds, and settings come on top. They may be a mapping (from Python),
    or a JSON object or `revisit:alpha=1e-3,layers=all` in a string (vLLM's HTTP interface lets only strings, numbers and
    lists through); true, 1 and "revisit" are the recommendation itself.

    Args:
        extra_args: Those of the request's sampling parameters.
        model: What a recommendation reads: `config.model_type` and `generation_config.revisit`.
    """
    value = None if extra_args is None else extra_args.get(KEY)
    if isinstance(value, str) and value.partition(":")[0].strip() == ReVisiT.name:
        value = parse_entry(value)[1]
    elif isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RevisitError(
                f"revisit: {value!r} is not JSON ({error.msg} at character {error.pos}); send an object in a string such as "
                '"{\\"alpha\\": 1e-5}", or true for what is recommended for the model.'
            ) from None
    if value is None or value is False or value == 0:
        return None
    if value is True or value == 1:
        value = {}
    if not isinstance(value, Mapping):
        raise RevisitError(
            f'revisit: {value!r} is not a set of settings; send an object such as {{"alpha": 1e-5, "layers": "last"}} (over HTTP: as '
            "a JSON string), or true for what is recommended for the model."
        )
    return ReVisiT.recommended(model, **value)


def kept_layers(model: Configured) -> str | tuple[int, ...]:
    """The layers whose states this server keeps, besides the last: `REVISIT_VLLM_LAYERS`, or what the model recommends.

    Fixed for the server, because compiled models and captured graphs cannot change what they return per request.
    """
    text = settings.vllm_layers()
    if text is None:
        return ReVisiT.recommended(model).layers
    if text in LAYER_SETS:
        return text
    try:
        return ReVisiT(layers=text).layers  # type: ignore[arg-type]
    except RevisitError:
        raise RevisitError(
            f"{LAYERS_SWITCH}={text!r} is neither one of {', '.join(LAYER_SETS)} nor a comma-separated list of layer numbers."
        ) from None


def check(method: ReVisiT, server: str | Sequence[int]) -> None:
    """Raises RevisitError if the request wants layers that the server does not keep."""
    wanted = method.layers
    if wanted in ("last", server):
        return
    if isinstance(wanted, tuple) and isinstance(server, tuple) and set(wanted) <= set(server):
        return
    here = server if isinstance(server, str) else ",".join(map(str, server))
    asked = wanted if isinstance(wanted, str) else ",".join(map(str, wanted))
    raise RevisitError(
        f"revisit: this server keeps vision states of layers {here!r} only, not {asked!r}; ask for 'last' or {here!r}, or start "
        f"it with {LAYERS_SWITCH}={asked}."
    )


def admit(sampling_params: Any, model: Configured) -> ReVisiT | None:
    """A request's settings, checked; an opted-in request reads no cached prefix, because that would skip its image."""
    method = parse(sampling_params.extra_args, model)
    if method is not None:
        check(method, kept_layers(model))
        sampling_params.skip_reading_prefix_cache = True
    return method
