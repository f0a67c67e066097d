"""Answering one question: a thread per method, whose steps become events of one stream."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from revisit.errors import RevisitError
from revisit.serve.errors import shorten
from revisit.serve.ui_state import CheckedQuestion, UiState

logger = logging.getLogger(__name__)


class StepStreamer:
    """A transformers streamer that hands on every chosen token with what the trace recorded about it."""

    def __init__(self, tokenizer: Any, trace: Any, send: Callable[[Any], None]) -> None:
        from revisit.explain.tokens import TokenTexts

        self.tokenizer, self.trace, self.send = tokenizer, trace, send
        self.reader, self.count, self.prompt_seen = TokenTexts(tokenizer), 0, False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # the first call is the prompt
            self.prompt_seen = True
            return
        from revisit.explain.record import step_of

        for token in value.flatten().tolist():
            records = self.trace.rows[0].records
            record = records[self.count] if self.count < len(records) else None
            self.send(step_of(self.tokenizer, token, self.reader.add(token), record, self.trace.method))
            self.count += 1

    def end(self) -> None:
        pass


class AnswerJob:
    """One question being answered: a thread per method, one queue of events, and a way to stop."""

    def __init__(self, state: UiState, question: CheckedQuestion) -> None:
        self.state, self.question = state, question
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.stopped = threading.Event()
        self.deadline = time.monotonic() + state.limits.seconds
        self.thread = threading.Thread(target=self._guard, args=(self._run,), daemon=True)
        self.thread.start()

    def send(self, kind: str, **data: Any) -> None:
        self.events.put((kind, data))

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        """An error ends the question with a sentence, not the thread with a traceback."""
        try:
            work(*args)
        except Exception as error:
            own = isinstance(error, RevisitError)
            if not own:
                logger.error("A question could not be answered.", exc_info=error)
            text = str(error) if own else f"The model could not answer: {type(error).__name__}: {error}"
            self.send("error", text=shorten(text, 600))
            self.stopped.set()

    def _run(self) -> None:
        with self.state.counting():
            self._wait_and_answer()

    def _wait_and_answer(self) -> None:
        if not self.state.turn.acquire(blocking=False):
            self.send("wait", text="Another question is being answered; this one is next.")
            while not self.state.turn.acquire(timeout=0.2):
                if self.stopped.is_set():
                    return
        try:
            self._answer()
        finally:
            self.state.turn.release()

    def _answer(self) -> None:
        from revisit.explain.page import images_payload, method_payload, words_payload
        from revisit.explain.prefill import PrefillStates, layout_of
        from revisit.explain.record import Decode, MethodOutput
        from revisit.models.prompts import prepare

        question = self.question
        if self.state.loaded is None or self.state.loaded[0] != question.model:
            self.send("wait", text=f"Loading {question.model}…")
        model, processor = self.state.model(question.model)
        inputs = prepare(processor, [question.prompt], [[question.image]], model.device)
        length, most = inputs["input_ids"].shape[1], self.state.limits.prompt_tokens
        if length > most:
            raise RevisitError(f"The question and its image have {length} tokens; at most {most} are allowed.")
        layout = layout_of(model, processor, [question.image], inputs)
        described = [{"name": method.name, **method.settings()} for method in question.methods]
        blank: list[dict[str, Any]] = [
            {**method_payload(d), "n": layout.tokens, "maps": "", "steps": []} for d in described
        ]
        objects = None if question.objects is None else list(question.objects)
        self.send("scene", **images_payload([question.image], layout), objects=objects, answers=blank)
        answers: list[tuple[PrefillStates, MethodOutput] | None] = [None] * len(question.methods)
        threads = [
            threading.Thread(
                target=self._guard, args=(self._one, number, model, processor, inputs, answers), daemon=True
            )
            for number in range(len(question.methods))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = [answer for answer in answers if answer is not None]
        if len(done) == len(answers) and not self.stopped.is_set():
            seen, outputs = done[0][0], [output for _, output in done]
            about = ([question.image], question.prompt, question.model, layout)
            decode = Decode(*about, outputs, question.objects, seen, processor.tokenizer)
            differs = [[n for n, step in enumerate(answer.steps) if step.differs] for answer in outputs]
            wrong = [[n for n, step in enumerate(answer.steps) if step.wrong] for answer in outputs]
            words = words_payload(decode)
            self.send("done", run=self.state.runs.put(decode), differs=differs, wrong=wrong, **words)

    def _one(self, number: int, model: Any, processor: Any, inputs: Any, answers: list[Any]) -> None:
        import base64

        import torch
        from transformers import StoppingCriteriaList

        from revisit.decoding.loop import generate
        from revisit.decoding.trace import Trace
        from revisit.explain.page import step_payload
        from revisit.explain.prefill import watch_prefill
        from revisit.explain.record import answer_of
        from revisit.models.prompts import new_tokens

        method = self.question.methods[number]

        def send(step: Any) -> None:
            entry, row = step_payload(step, method.settings())
            self.send("step", answer=number, step=entry, map=None if row is None else base64.b64encode(row).decode())

        def stop(input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), self.stopped.is_set(), device=input_ids.device)

        trace = Trace(record=True)
        with watch_prefill(model, inputs) as seen:
            output = generate(
                model,
                **inputs,
                method=method,
                trace=trace,
                streamer=StepStreamer(processor.tokenizer, trace, send),
                stopping_criteria=StoppingCriteriaList([stop]),  # type: ignore[list-item]
                max_new_tokens=self.question.max_new_tokens,
                do_sample=False,
            )
        answer = answer_of(processor.tokenizer, new_tokens(output, inputs)[0].tolist(), trace)
        answers[number] = seen, answer
        self.send("finished", answer=number, text=answer.text)

    async def stream(self) -> AsyncIterator[str]:
        """The events as text/event-stream, the last of which is "done" or "error"; whoever stops reading stops the work."""
        try:
            while time.monotonic() < self.deadline:
                try:
                    kind, data = await asyncio.to_thread(self.events.get, True, 0.5)
                except queue.Empty:
                    if not self.thread.is_alive() and self.events.empty():
                        yield event("error", {"text": "The answer ended early; ask again."})
                        return
                    yield ": still here\n\n"
                    continue
                yield event(kind, data)
                if kind in ("done", "error"):
                    return
            yield event("error", {"text": f"The answer took longer than {self.state.limits.seconds:g} seconds."})
        finally:
            self.stopped.set()


def event(kind: str, data: Any) -> str:
    """A server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(finite(data), ensure_ascii=False, allow_nan=False)}\n\n"


def finite(value: Any) -> Any:
    """The value with None for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
