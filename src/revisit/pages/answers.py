"""The page of a question and its answers, step by step: one HTML file that works from disk without a network."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revisit.decoding.decode import Decoded
from revisit.decoding.trace import StepRecord
from revisit.models.tokens import tokens_in
from revisit.pages.document import images_payload, script_page, write_page
from revisit.words import category, wrong_spans

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.geometry import Layout

MOST_PATCHES = 5  # listed at every step
SHOWN_CANDIDATES = 12


@dataclass
class AnswerPage:
    """One question about one or more images, answered by one or more methods with `record=True`."""

    images: list[Image]
    prompt: str
    model: str
    layout: Layout
    answers: list[Decoded]
    objects: Sequence[str] | None = None  # in the image, if known
    patch_words: list[list[tuple[str, float]]] | None = None  # likeliest tokens of each vision token at the last layer
    promise: str = ""  # the rate of mistakes that was promised

    def render(self, title: str = "") -> str:
        """Render the page."""
        finding, methods = headline(self), dict.fromkeys(answer.trace.name for answer in self.answers)
        return script_page(
            title or finding,
            payload(self),
            styles=["viewer.css"],
            scripts=["viewer.js"],
            start="window.viewer = new Viewer(main, data);",
            heading=finding,
            meta=" · ".join(filter(None, (f"“{self.prompt}”", self.model, ", ".join(methods)))),
        )

    def write(self, path: str | Path, title: str = "") -> Path:
        """Write the page into an existing folder; return its path."""
        return write_page(path, self.render(title))


def withheld(answer: Decoded) -> str:
    """Name what a floor kept an answer from, with its support, the first one first."""
    row = answer.trace.rows[0]
    names = dict.fromkeys(name for _, name in row.prevented)
    shown = {name: f"{row.support[name]:.3f}".replace("0.000", "below 0.001") for name in names if name in row.withheld}
    listed = ", ".join(f"{name} ({support})" for name, support in shown.items())
    return f"Withheld, because the image supports it less than {row.floor:g}: {listed}." if listed else ""


def headline(page: AnswerPage) -> str:
    """Describe in one sentence which absent objects the method removed or added, or else how many tokens it changed."""
    ours = next((answer for answer in page.answers if answer.trace.name != "greedy"), None)
    plain = next((answer for answer in page.answers if answer.trace.name == "greedy"), None)
    if ours is None:
        return page.prompt
    name = "ReVisiT" if ours.trace.name == "revisit" else ours.trace.name
    if plain is not None and page.objects is not None:
        before, after = absent_objects(plain, page.objects), absent_objects(ours, page.objects)
        removed = [word for thing, word in before.items() if thing not in after]
        added = [word for thing, word in after.items() if thing not in before]
        verbs = [("removed", removed), ("added", added)]
        parts = [
            f"{verb} {', '.join(f'‘{word}’' for word in words)} (not in the image)" for verb, words in verbs if words
        ]
        if parts:
            return f"{name} {' and '.join(parts)}"
    changed, steps = len(ours.changed), len(ours.steps)
    return f"{name} changed {changed or 'none'} of {steps} token{'s' * (steps != 1)}"


def absent_objects(answer: Decoded, objects: Sequence[str]) -> dict[str, str]:
    """Return the objects that an answer names although they are absent, with the word for each."""
    text = "".join(step.text or "" for step in answer.steps)
    words = [text[start:end].lower() for start, end in wrong_spans(text, objects)]
    return {str(category(word)): word for word in words}


def wrong_steps(answer: Decoded, objects: Sequence[str] | None) -> set[int]:
    """Return the steps, from 0, that name objects other than `objects`; none if `objects` is None."""
    texts = [step.text or "" for step in answer.steps]
    ends = list(accumulate(map(len, texts)))
    spans = list(zip([0, *ends], ends, strict=False))
    wrong = [] if objects is None else wrong_spans("".join(texts), objects)
    return {step for span in wrong for step in tokens_in(spans, *span)}


def payload(page: AnswerPage) -> dict[str, Any]:
    """Return the page's data."""
    words = page.patch_words
    return {
        **images_payload(page.images, page.layout),
        "predictions": None if words is None else [[[word, _short(p)] for word, p in best] for best in words],
        "objects": None if page.objects is None else list(page.objects),
        "prompt": page.prompt,
        "model": page.model,
        "answers": [
            answer_payload(answer, wrong_steps(answer, page.objects), page.promise if number == 0 else "")
            for number, answer in enumerate(page.answers)
        ],
    }


def answer_payload(answer: Decoded, wrong: set[int], promise: str) -> dict[str, Any]:
    """Return the data of one answer; the heat maps of all steps are one run of bytes, one row per step that has one."""
    rows: list[bytes] = []
    steps = []
    for number, step in enumerate(answer.steps):
        entry, row = step_payload(step, answer.trace.method)
        if number in wrong:
            entry["w"] = 1
        if row is not None:
            entry["m"] = len(rows)
            rows.append(row)
        steps.append(entry)
    return {
        "name": answer.trace.name,
        "settings": answer.trace.label.removeprefix(answer.trace.name).removeprefix(":"),
        "notes": [note for note in (promise, withheld(answer)) if note],
        "method": answer.trace.method,
        "text": answer.text,
        "layers": list(answer.trace.layers),
        "n": len(rows[0]) if rows else 0,
        "maps": base64.b64encode(b"".join(rows)).decode(),
        "steps": steps,
    }


def step_payload(step: StepRecord, method: Mapping[str, Any]) -> tuple[dict[str, Any], bytes | None]:
    """Return one step, with short keys because there may be thousands, and its heat map with one byte per vision token."""
    texts, shown = step.texts or [], shown_candidates(step)
    entry: dict[str, Any] = {
        "t": step.text or "",
        "v": round(step.shift, 4),
        "k": step.plausible_tokens,
        "c": [
            [
                texts[k],
                _short(step.base[k]),
                None if step.vision is None else _short(step.vision[k]),
                _short(step.final[k]),
            ]
            for k in shown
        ],
        "o": next((place for place, k in enumerate(shown) if step.ids[k] == step.token), -1),
    }
    if step.thought:
        entry["h"] = 1
    if step.changed:
        entry["was"] = step.instead_of_text
    heat = heat_map(step)
    if heat is not None:
        most = max(MOST_PATCHES, int(method.get("neighbors", 1)))
        best = [int(index) for index in np.argsort(heat, kind="stable")[:most] if np.isfinite(heat[index])]
        entry["p"] = [[index, _short(float(heat[index]))] for index in best]
    if step.vision_token is not None:
        entry["i"], entry["l"] = step.vision_token, step.layer
        entry["d"] = None if step.divergence is None else _short(step.divergence)
        if step.weight is not None:
            entry["g"] = round(step.weight, 3)
    top = math.log(2) if method.get("divergence", "jsd") == "jsd" else None
    return entry, None if heat is None else quantize(heat, top)


def shown_candidates(step: StepRecord) -> list[int]:
    """Return the best candidates after the method, and always the chosen token and the best of model and vision token."""
    rest = range(SHOWN_CANDIDATES, len(step.ids))
    seen = step.ids[int(np.argmax(step.vision))] if step.vision else None
    needed = [k for k in rest if step.ids[k] in (step.token, step.instead_of, seen)]
    return [*range(min(SHOWN_CANDIDATES - len(needed), len(step.ids))), *needed]


def heat_map(step: StepRecord) -> np.ndarray | None:
    """Return each vision token's divergence at the layer where it agrees most.  (layers, N) -> (N,)"""
    if step.divergences is None:
        return None
    table = step.divergences.numpy()
    return np.where(np.isnan(table), np.inf, table).min(0)  # type: ignore[no-any-return]


def quantize(heat: np.ndarray, top: float | None = None) -> bytes:
    """Scale divergences to bytes: from 0 to their largest possible value, or from the smallest to the largest of the step."""
    finite = heat[np.isfinite(heat)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if top is not None:
        low, high = 0.0, top
    scaled = (np.where(np.isfinite(heat), heat, high) - low) / max(high - low, 1e-12)
    return (scaled * 255).round().clip(0, 255).astype("uint8").tobytes()


def _short(value: float) -> float:
    return float(f"{value:.4g}")
