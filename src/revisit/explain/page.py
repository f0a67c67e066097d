"""A decode as one self-contained HTML file: no network, no build step, works from disk.

from revisit.explain import page, record
decode = record.explain(model, processor, [image], "Describe the image.", [ReVisiT(), Greedy()])
page.write("out.html", decode)
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revisit.explain.record import Decode, MethodOutput, TokenStep, own_settings, seeks_far
from revisit.pages.document import data_uri, script_page, write_page

MOST_PATCHES = 5  # listed at every step

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.geometry import Layout


def write(path: str | Path, decode: Decode, title: str = "") -> Path:
    """Write the page of a decode; returns its path."""
    return write_page(path, render(decode, title))


def render(decode: Decode, title: str = "") -> str:
    """The page of a decode as one string of HTML."""
    return script_page(
        title or decode.prompt,
        payload(decode),
        styles=["viewer.css"],
        scripts=["viewer.js"],
        start="foldHeading(); window.viewer = new Viewer(main, data);",
        heading=decode.prompt,
        meta=f"{decode.model} · {', '.join(dict.fromkeys(answer.name for answer in decode.answers))}",
    )


def payload(decode: Decode) -> dict[str, Any]:
    """Everything the page shows."""
    return {
        **images_payload(decode.images, decode.layout),
        **words_payload(decode),
        "objects": None if decode.objects is None else list(decode.objects),
        "prompt": decode.prompt,
        "model": decode.model,
        "answers": [answer_payload(answer) for answer in decode.answers],
    }


def words_payload(decode: Decode) -> dict[str, Any]:
    """What each vision token says, or why that is not known."""
    words = decode.patch_words
    says = None if words is None else [[[word, _p(p)] for word, p in best] for best in words]
    return {"says": says, "silent": decode.no_patch_words}


def images_payload(images: list[Image], layout: Layout) -> dict[str, Any]:
    """Images, and the grids of vision tokens on them, in pixels of the originals."""
    return {
        "images": [{"src": data_uri(image), "w": image.width, "h": image.height} for image in images],
        "grids": [
            {
                "image": grid.image,
                "view": grid.view,
                "first": grid.first,
                "rows": grid.rows,
                "columns": grid.columns,
                "gap": grid.gap,
                "xs": [[round(a, 2), round(b, 2)] for a, b in grid.xs],
                "ys": [[round(a, 2), round(b, 2)] for a, b in grid.ys],
            }
            for grid in layout.grids
        ],
        "reason": layout.reason,
    }


def answer_payload(answer: MethodOutput) -> dict[str, Any]:
    """One answer; the heat maps of all its steps are one run of bytes, a row per step that has one."""
    rows: list[bytes] = []
    steps = []
    for step in answer.steps:
        entry, row = step_payload(step, answer.method)
        if row is not None:
            entry["m"] = len(rows)
            rows.append(row)
        steps.append(entry)
    return {
        **method_payload(answer.method),
        "text": answer.text,
        "layers": list(answer.layers),
        "n": len(rows[0]) if rows else 0,
        "maps": base64.b64encode(b"".join(rows)).decode(),
        "steps": steps,
    }


def method_payload(method: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a method: its name, and the settings that are not its defaults."""
    return {
        "name": str(method.get("name", "greedy")),
        "settings": own_settings(method),
        "method": method,
        "far": seeks_far(method),
    }


def step_payload(step: TokenStep, method: Mapping[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """One step with short keys (there may be thousands), and its heat map as one byte per vision token."""
    entry: dict[str, Any] = {"t": step.text, "v": round(step.shift, 4)}
    if step.candidates:
        entry["k"] = step.plausible_tokens
        entry["c"] = [
            [c.text, _p(c.base), None if c.vision is None else _p(c.vision), _p(c.final)] for c in step.candidates
        ]
        chosen = [number for number, c in enumerate(step.candidates) if c.token == step.token]
        entry["o"] = chosen[0] if chosen else -1
    if step.instead_of is not None:
        entry["was"] = step.instead_of
    if step.differs:
        entry["x"] = 1
    if step.wrong:
        entry["w"] = 1
    if step.heat is not None:
        most = max(MOST_PATCHES, int(method.get("neighbors", 1)))
        best = nearest(step.heat, seeks_far(method), most)
        entry["p"] = [[index, _p(float(step.heat[index]))] for index in best]
    if step.vision_token is not None:
        entry["i"], entry["l"] = step.vision_token, step.layer
        entry["d"] = None if step.divergence is None else float(f"{step.divergence:.4g}")
        if step.weight is not None:
            entry["g"] = round(step.weight, 3)
    return entry, None if step.heat is None else quantize(step.heat)


def nearest(heat: np.ndarray, far: bool = False, most: int = MOST_PATCHES) -> list[int]:
    """The vision tokens that agree most with a step, best first; with `far`, those that agree least."""
    order = np.argsort(-heat if far else heat, kind="stable")[:most]
    return [int(index) for index in order if np.isfinite(heat[index])]


def quantize(heat: np.ndarray) -> bytes:
    """Divergences as bytes, 0 the smallest of the step and 255 the largest; what is not finite is the largest."""
    finite = heat[np.isfinite(heat)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    scaled = (np.where(np.isfinite(heat), heat, high) - low) / max(high - low, 1e-12)
    return (scaled * 255).round().clip(0, 255).astype("uint8").tobytes()


def _p(value: float) -> float:
    return float(f"{value:.4g}")
