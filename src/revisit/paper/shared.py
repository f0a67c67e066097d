"""One prefill for many settings: a batch's prompt is run once, and every method decodes from its KV cache.

Plain decoding and ReVisiT do not touch the prefill, so the only thing their settings change is what follows it. The
cache holds the prompt but for its last token; each method runs that token, decodes, and the cache is cut back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from revisit.decoding.batch import decode_batch
from revisit.decoding.loop import generate
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.evaluation.engines.base import Job
from revisit.evaluation.engines.local import LocalEngine, as_answers, memory_advice
from revisit.evaluation.records import Answer
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.families import IMAGE_INPUTS
from revisit.models.layers import resolve_layers
from revisit.models.parts import ModelParts
from revisit.models.prompts import prepare
from revisit.taps.vision import VisionStates, remember, remembered

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run


class CaptureOnly(Method):
    """Plain decoding that keeps the vision states of some layers with the cache."""

    layers: tuple[int, ...] = ()

    name = "capture-only"
    summary = "the model's own distribution, vision states kept"
    cost = "1×"
    source = "—"

    def begin(self, run: Run) -> Refine:
        capture = run.capture(run.find_vision_tokens(), self.layers)

        def refine(_input_ids: Tensor, logits: Tensor) -> Tensor:
            capture.release()
            return logits

        return refine


def shares(method: Any) -> bool:
    """Whether a method leaves the prefill as it is."""
    return type(method) in (Greedy, ReVisiT)


class SharedPrefill:
    """A batch's prompts in one cache, from which methods decode one after the other."""

    def __init__(self, model: Any, inputs: Any, methods: Sequence[Any]) -> None:
        self.model = model
        self.parts = ModelParts.of(model)
        self.length = inputs["input_ids"].shape[1]
        layers: set[int] = {self.parts.depth}
        for method in methods:
            if isinstance(method, ReVisiT):
                layers |= set(resolve_layers(method.layers, self.parts.depth, self.parts.tied))
        first = generate(
            model,
            **inputs,
            method=CaptureOnly(layers=tuple(sorted(layers))),
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
        )
        self.cache = first.past_key_values
        self.inputs = {name: value for name, value in inputs.items() if name not in IMAGE_INPUTS}
        self.usable = self.cache is not None and all(type(layer) is DynamicLayer for layer in self.cache.layers)
        self.states = remembered(self.cache) if self.usable else None
        self.usable = self.usable and self.states is not None

    def arguments(self, method: Any) -> dict[str, Any]:
        """What generate is given, beside the inputs, so that this method starts from the cache."""
        assert self.states is not None
        surplus = self.cache.get_seq_length() - (self.length - 1)
        if surplus > 0:
            self.cache.crop(-surplus)
        normed = isinstance(method, ReVisiT) and method.norm == "final"
        remember(self.cache, self._normed(self.states) if normed else self.states)
        return {"past_key_values": self.cache}

    @torch.no_grad()
    def _normed(self, items: list[VisionStates]) -> list[VisionStates]:
        norm, depth = self.parts.final_norm, self.parts.depth
        return [
            VisionStates(
                item.positions,
                item.layers,
                {layer: states if layer == depth else norm(states) for layer, states in item.by_layer.items()},
            )
            for item in items
        ]


class SharingEngine(LocalEngine):
    """The local engine, able to answer one batch with many methods from one prefill."""

    shared = 0  # answers that were spared a prefill

    def answer_all(
        self, methods: Sequence[Any], decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Any]]
    ) -> Iterator[tuple[Any, list[Answer]]]:
        """Each method with its answers; equal to asking `answer` for every method by itself."""
        together = [method for method in methods if shares(method)]
        if len(together) < 2 or decoding.num_beams > 1 or not all(images):
            together = []
        if together:
            model, processor = self.loaded
            started = time.perf_counter()
            with torch.no_grad():
                inputs = prepare(processor, [job.prompt for job in jobs], images, model.device)
                prefill = SharedPrefill(model, inputs, together)
            spent = time.perf_counter() - started
            if not prefill.usable:
                together = []
        for method in together:
            started = time.perf_counter()
            with memory_advice(len(jobs)):
                found = decode_batch(
                    model,
                    processor,
                    prefill.inputs,
                    method,
                    [decoding] * len(jobs),
                    [job.seed for job in jobs],
                    **prefill.arguments(method),
                )
            self.shared += len(jobs)
            # Its time is what it would have taken alone: the prefill counts for each.
            yield method, as_answers(jobs, found, spent + time.perf_counter() - started)
        for method in methods:
            if method not in together:
                yield method, self.answer(method, decoding, jobs, images)
