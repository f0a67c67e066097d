"""The interactive page: choose an image, ask, and compare the answers of several methods step by step.

The page sends one chat request with `record` per method. Images and answers stay in the browser; the server stores nothing.
"""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from fastapi import FastAPI, Request
from pydantic import JsonValue

from revisit import methods
from revisit.decoding.method_id import value_text
from revisit.embedded import samples
from revisit.errors import RevisitError
from revisit.models import DESCRIBE
from revisit.models.types import Model
from revisit.pages.document import data_uri, script_page
from revisit.serve.app import Service
from revisit.serve.replies import Json

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
# A saved page contains answers instead of a setup.
START = "if (data.answers) window.viewer = new Viewer(main, data); else window.studio = new Studio(main, data);"


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page and its sample images to a server. The page needs no key, but its requests do."""
    setup = {
        "model": service.name,
        "methods": method_settings(service.decoder.model),
        "start": ["revisit", "greedy"],
        "prompt": DESCRIBE,
        "longest": service.limits.new_tokens,
        "bytes": service.limits.body_bytes,
    }
    service.page = script_page(
        "ReVisiT",
        setup,
        styles=["viewer.css", "ui.css"],
        scripts=["viewer.js", "ui.js"],
        start=START,
        meta=f"{service.name} · answers are checked against the image; click a word to see which patch was selected",
        policy=POLICY,
    )

    @app.get("/sample/{number}")
    def sample(number: int, request: Request) -> Json:
        """Return a sample image; the first is that of `revisit demo`."""
        service.check_access(request)
        names = list(samples.SAMPLES)
        chosen = samples.sample(names[number % len(names)])
        return {"src": data_uri(chosen.image()), "objects": list(chosen.nouns)}


def method_settings(model: Model | str) -> list[Json]:
    """List every method with the settings recommended for a model, and the allowed values of each if they are few."""
    listed: list[Json] = []
    for name in methods.names():
        cls = methods.find(name)
        try:
            defaults = methods.as_method(name, model).settings()
        except (RevisitError, TypeError):  # has settings without defaults
            continue
        settings: list[JsonValue] = []
        for key, value in defaults.items():
            hint = cls.model_fields[key].annotation
            choices = ("true", "false") if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
            settings.append({"name": key, "default": value_text(value), "choices": [*map(str, choices)]})
        listed.append({"name": name, "summary": cls.summary, "settings": settings})
    return listed
