"""What the page shows of an answer, step by step, as the `decoding` field of its chunks."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING

from pydantic import JsonValue

from revisit.decoding.trace import Trace
from revisit.explain.page import images_payload, method_payload, step_payload, words_payload
from revisit.explain.prefill import PrefillStates
from revisit.explain.record import Decode, MethodOutput, TokenStep, step_of
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
        self.steps: list[TokenStep] = []
        self.states: PrefillStates | None = None  # from the prefill, if the words of the patches were asked for

    def start(self) -> Json:
        """The method, and where the image's patches are."""
        method = {"name": self.request.method.name, **self.request.method.settings()}
        found: Json = {"answer": {**method_payload(method), "n": self.layout.tokens, "maps": "", "steps": []}}
        if self.request.record == "patches":
            objects: JsonValue = None if self.request.objects is None else list(self.request.objects)
            found["scene"] = {**images_payload(list(self.request.images), self.layout), "objects": objects}
        return {name: finite(value) for name, value in found.items()}

    def step(self, token: int) -> Json:
        """The step that chose this token."""
        records, number = self.trace.rows[0].records, len(self.steps)
        record = records[number] if number < len(records) else None
        self.steps.append(step_of(self.tokenizer, token, self.texts.add(token), record, self.trace.method))
        entry, heat = step_payload(self.steps[-1], self.request.method.settings())
        return {"step": finite(entry), "map": None if heat is None else base64.b64encode(heat).decode()}

    def end(self) -> Json:
        """The steps that name an object known not to be in the image, and the words of its patches."""
        answer = MethodOutput(dict(self.trace.method), self.steps, "")
        images, objects = list(self.request.images), self.request.objects
        decode = Decode(images, "", "", self.layout, [answer], objects, self.states, self.tokenizer)
        found: Json = {"wrong": [number for number, step in enumerate(self.steps) if step.wrong]}
        return found if self.states is None else {**found, "words": finite(words_payload(decode))}


def finite(value: JsonValue) -> JsonValue:
    """The value with None for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
