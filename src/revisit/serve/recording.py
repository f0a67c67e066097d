"""The steps of an answer as the page shows them, in the `decoding` field of its chunks."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING

from pydantic import JsonValue

from revisit.decoding.trace import Trace
from revisit.explain.document import images_payload
from revisit.explain.page import method_payload, step_payload, words_payload
from revisit.explain.prefill import PrefillStates
from revisit.explain.record import add_texts, patch_words, wrong_steps
from revisit.explain.tokens import TokenTexts
from revisit.models.geometry import layout_of
from revisit.serve.replies import Json
from revisit.serve.requests import ChatRequest

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model, Processor


class StepRecorder:
    """Records one answer while it is decoded with `trace`."""

    def __init__(self, model: Model, processor: Processor, request: ChatRequest, inputs: Inputs) -> None:
        self.tokenizer, self.request = processor.tokenizer, request
        self.layout = layout_of(model, processor, list(request.images), inputs)
        self.trace = Trace(record=True)
        self.texts = TokenTexts(self.tokenizer)
        self.added: list[str] = []  # what each token added to the answer
        self.states: PrefillStates | None = None  # from the prefill, for the words of the patches

    def start(self) -> Json:
        """Return the method, and where the image's patches are."""
        method = {"name": self.request.method.name, **self.request.method.settings()}
        objects: JsonValue = None if self.request.objects is None else list(self.request.objects)
        scene = {**images_payload(list(self.request.images), self.layout), "objects": objects}
        answer = {**method_payload(method), "n": self.layout.tokens, "maps": "", "steps": []}
        return {"answer": finite(answer), "scene": finite(scene)}

    def step(self, token: int) -> Json:
        """Record the step that chose this token and return it."""
        step = self.trace.rows[0].records[len(self.added)]
        self.added.append(self.texts.add(token))
        add_texts(step, self.tokenizer, token, self.added[-1])
        entry, heat = step_payload(step, self.request.method.settings())
        return {"step": finite(entry), "map": None if heat is None else base64.b64encode(heat).decode()}

    def end(self) -> Json:
        """Return the steps that name an object known not to be in the image, and the words of its patches."""
        assert self.states is not None
        words = patch_words(self.states.head, self.states.states[-1], self.tokenizer)
        wrong: list[JsonValue] = [*sorted(wrong_steps(self.added, self.request.objects))]
        return {"wrong": wrong, "words": {"says": finite(words_payload(words))}}


def finite(value: JsonValue) -> JsonValue:
    """Replace every number that JSON cannot hold by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
