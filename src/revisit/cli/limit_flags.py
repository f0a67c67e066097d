"""The limits of a server as flags of its command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import typer

from revisit.serve.limits import DEFAULTS, Limits, smallest


def with_limit_flags(
    defaults: Mapping[str, float] = DEFAULTS,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags for these limits, with these defaults; it is called with `limits`, made from them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        chosen = [f for f in fields(Limits) if f.name in defaults]

        def run(**given: Any) -> None:
            values = {f.name: given.pop(f.name) for f in chosen}
            values["default_new_tokens"] = min(values.get("default_new_tokens", 256), values["new_tokens"])
            command(**given, limits=Limits(**values))

        own = inspect.signature(command, eval_str=True)
        flags = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(
                    defaults[f.name],
                    f.metadata["flag"],
                    help=f.metadata["help"],
                    min=smallest(f.name),
                    rich_help_panel="Limits",
                ),
                annotation=type(f.default),
            )
            for f in chosen
        ]
        kept = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.parameters.items() if name != "limits"
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*kept, *flags)}
        return run

    return decorate
