"""The page itself, and how it asks for each method's settings."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from revisit.decoding.registry import value_text
from revisit.errors import RevisitError
from revisit.models.prompts import DESCRIBE
from revisit.serve.limits import Limits
from revisit.serve.ui_state import described


def page(models: typing.Sequence[str], limits: Limits) -> str:
    """The page itself, with everything it needs inside."""
    from revisit.pages.document import script_page

    setup = {
        "models": list(models),
        "methods": {name: method_settings(described(name)) for name in models},
        "start": ["revisit", "greedy"],
        "prompt": DESCRIBE,
        "longest": limits.new_tokens,
        "bytes": limits.body_bytes,
        "samples": True,
    }
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    )
    start = """document.getElementById("buttons").append(themeButton());
window.studio = new Studio(document.getElementById("main"), JSON.parse(document.getElementById("data").textContent));"""
    return script_page(
        "ReVisiT",
        setup,
        styles=["viewer.css", "ui.css"],
        scripts=["viewer.js", "ui.js"],
        start=start,
        meta="Ask about an image and see which patch was selected at each word.",
        policy=policy,
    )


def method_settings(model: Any) -> list[dict[str, Any]]:
    """Every method with its settings, those recommended for a model where there are any, as the page shows them."""
    from revisit import methods

    found = []
    for name in methods.names():
        cls = methods.find(name)
        try:
            defaults = methods.recommended(name, model).settings()
        except (RevisitError, TypeError):  # needs settings that a page cannot guess
            continue
        hints = typing.get_type_hints(cls)
        settings = [_setting(f.name, hints[f.name], defaults[f.name]) for f in dataclasses.fields(cls)]
        found.append({"name": name, "summary": cls.summary, "settings": settings})
    return found


def _setting(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """How one setting is asked for: by a choice, a flag or a text; alpha below 1 by a slider over powers of ten."""
    entry: dict[str, Any] = {"name": name, "kind": "text", "default": value_text(default)}
    if typing.get_origin(hint) is typing.Literal:
        entry |= {"kind": "choice", "choices": [str(choice) for choice in typing.get_args(hint)]}
    elif hint is bool:
        entry["kind"] = "flag"
    elif name == "alpha" and isinstance(default, float) and 0 < default <= 0.1:
        entry["slider"] = True
    return entry
