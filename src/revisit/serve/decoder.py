"""Decoding of a batch of requests with one call of `revisit.generate`, each row by its own settings."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue
from transformers import LogitsProcessor

from revisit.decoding.batch import decode_batch
from revisit.decoding.trace import RowTrace, Trace
from revisit.explain.check import Check, check_text, settings_of
from revisit.explain.prefill import watch_prefill
from revisit.explain.support import ModelText, read_texts, row_layout
from revisit.models.prompts import check_no_image_tokens, encode, end_tokens, render
from revisit.models.thoughts import Thoughts, thoughts_of
from revisit.serve.batcher import Abandoned, Ticket
from revisit.serve.detokenizer import IncrementalDetokenizer
from revisit.serve.errors import ApiError
from revisit.serve.processors import JsonAnswers, LogProbabilities
from revisit.serve.recording import StepRecorder, finite
from revisit.serve.replies import Json, Reply
from revisit.serve.requests import ChatRequest, reasoning_options

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model, Processor


@contextmanager
def stoppable(model: Model, tickets: Sequence[Ticket]) -> Iterator[None]:
    """Raise `Abandoned` at the model's next forward pass once no ticket is wanted any more.

    Every decoding loop runs the model, so this ends all of them: tokens, beams, a beam's candidates, descriptions.
    Other threads that use the same model are not affected.
    """
    thread = threading.get_ident()

    def check(*_: object) -> None:
        if threading.get_ident() == thread and all(ticket.abandoned for ticket in tickets):
            raise Abandoned

    hook = model.register_forward_pre_hook(check)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hook.remove()


class Decoder:
    """A loaded model that answers tickets."""

    def __init__(self, model: Model, processor: Processor) -> None:
        self.model, self.processor = model, processor
        self.end = end_tokens(model.generation_config)
        self.thoughts = thoughts_of(model, processor)

    def prompt(self, request: ChatRequest) -> str:
        """Apply the chat template; raise RevisitError for texts that contain an image token."""
        for message in request.messages:
            for part in message["content"]:
                check_no_image_tokens(self.processor, "message", part.get("text", ""))
        template = str(getattr(self.processor, "chat_template", ""))
        return render(self.processor, request.messages, **reasoning_options(request, template))

    def decode(self, tickets: Sequence[Ticket], prompt_limit: int) -> None:
        """Answer all tickets, or raise; a ticket whose prompt is too long fails alone."""
        prompts, images = [t.prompt for t in tickets], [list(t.request.images) for t in tickets]
        inputs = encode(self.processor, prompts, images, self.model.device)
        lengths = [
            length + self._text_length(ticket.request.text or "")
            for ticket, length in zip(tickets, inputs["attention_mask"].sum(-1).tolist(), strict=True)
        ]
        fitting = [ticket for ticket, length in zip(tickets, lengths, strict=True) if length <= prompt_limit]
        if len(fitting) == len(tickets):
            run = self._generate if tickets[0].request.text is None else self._check
            with stoppable(self.model, tickets):
                run(tickets, inputs, lengths)
            return
        for ticket, length in zip(tickets, lengths, strict=True):
            if length > prompt_limit:
                message = f"The prompt has {length} tokens (images included); at most {prompt_limit} are allowed."
                ticket.finish(ApiError(400, message, param="messages"))
        if fitting:
            self.decode(fitting, prompt_limit)

    @cached_property
    def grammar_tokenizer(self) -> Any:
        """The tokenizer as llguidance reads it."""
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self.processor.tokenizer
        return from_tokenizer(tokenizer, eos_token=sorted(self.end))

    def _text_length(self, text: str) -> int:
        return len(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _generate(self, tickets: Sequence[Ticket], inputs: Inputs, lengths: Sequence[int]) -> None:
        requests, method = [ticket.request for ticket in tickets], tickets[0].request.method
        recorder = StepRecorder(self.model, self.processor, requests[0], inputs) if requests[0].record else None
        decode = partial(self.processor.tokenizer.decode, skip_special_tokens=True)
        logprobs = LogProbabilities(self.processor.tokenizer)
        thoughts = self.thoughts
        opened = [thoughts is not None and thoughts.open_at_end(ids) for ids in inputs["input_ids"].tolist()]
        rows = [
            Progress(ticket, decode, self.end, recorder, partial(logprobs.entry, row), thoughts, opened[row])
            for row, ticket in enumerate(tickets)
        ]
        processors: list[LogitsProcessor] = []
        if any(request.logprobs is not None for request in requests):
            processors.append(logprobs)
        if any(request.grammar for request in requests):
            close = [thoughts.close if thoughts is not None and begun else None for begun in opened]
            grammars = [request.grammar for request in requests]
            processors.append(JsonAnswers(grammars, self.grammar_tokenizer, close))
        checked, layer = any(request.check for request in requests), settings_of(self.model)[0]
        trace = Trace(record=checked) if recorder is None else recorder.trace
        with ExitStack() as stack:
            if recorder is not None:
                recorder.states = stack.enter_context(watch_prefill(self.model, inputs))
            if checked:
                seen = stack.enter_context(watch_prefill(self.model, inputs, [layer]))
            found = decode_batch(
                self.model,
                self.processor,
                inputs,
                method,
                [request.decoding for request in requests],
                [request.seed for request in requests],
                lambda row, token: rows[row].take(token),
                trace=trace,
                processors=processors,
            )

        def check(number: int, text: str, tokens: Sequence[int], steps: Sequence[int]) -> Json:
            vision = seen.row(number)
            images = [list(request.images) for request in requests]
            answer = ModelText.from_trace(
                self.processor.tokenizer,
                text,
                tokens,
                RowTrace(records=[trace.rows[number].records[step] for step in steps]),
                images=images[number],
                vision=vision,
                head=seen.head,
                layout=row_layout(self.model, self.processor, inputs, number, images, len(vision[layer])),
            )
            return self._checked(requests[number], answer)

        for number, (row, length, answer) in enumerate(zip(rows, lengths, found, strict=True)):
            row.close(length, method.name, answer.counters(), partial(check, number) if checked else None)

    def _check(self, tickets: Sequence[Ticket], inputs: Inputs, lengths: Sequence[int]) -> None:
        """Check the texts of requests, in one forward pass."""
        requests, prompts = [ticket.request for ticket in tickets], [ticket.prompt for ticket in tickets]
        texts, images = [request.text or "" for request in requests], [list(request.images) for request in requests]
        layer = settings_of(self.model)[0]
        found = read_texts(self.model, self.processor, inputs, prompts, images, texts, [layer])
        for ticket, text, length in zip(tickets, found, lengths, strict=True):
            counters = {"steps": 0, "applied": 0, "changed": 0, "vision_tokens": text.layout.tokens}
            check = self._checked(ticket.request, text)
            ticket.finish(Reply(text.text, "stop", length, 0, "check", counters, check=check))

    def _checked(self, request: ChatRequest, text: ModelText) -> Json:
        assert request.check is not None
        tokenizer = self.processor.tokenizer
        check = check_text(self.model, tokenizer, text, request.check.threshold, request.check.chosen)
        return {**as_json(check), "values": rated_values(check)} if request.grammar else as_json(check)


class Progress:
    """One row of a running batch."""

    def __init__(
        self,
        ticket: Ticket,
        decode: Callable[[Sequence[int]], str],
        end: set[int],
        recorder: StepRecorder | None,
        logprobs: Callable[[int, int], JsonValue],
        thoughts: Thoughts | None,
        thinking: bool,
    ) -> None:
        self.ticket, self.end, self.recorder, self._logprobs = ticket, end, recorder, logprobs
        self.marks: tuple[int, ...] = () if thoughts is None else (thoughts.open, thoughts.close)
        self.thinking, self.tokens = thinking, 0
        self.logprobs: list[JsonValue] = []
        self.steps: list[int] = []  # those of the answer, without thoughts
        self.thought = IncrementalDetokenizer(decode)
        self.text = IncrementalDetokenizer(decode, ticket.request.stop)
        self.finish: str | None = None
        if recorder is not None:
            ticket.show("", recorder.start())

    def take(self, token: int) -> bool:
        """Add the row's next token; return whether the row ends here."""
        record = None if self.recorder is None else self.recorder.step(token)
        self.tokens += 1
        if token in self.end:
            self.ticket.show("", record)
            self.finish = "stop"
            return True
        if token in self.marks:
            self.thinking = token == self.marks[0]
            self.ticket.show("", record, thought=self.thought.finish())
        elif self.thinking:
            self.ticket.show("", record, thought=self.thought.feed(token))
        else:
            top = self.ticket.request.logprobs
            logprobs = [] if top is None else [self._logprobs(token, top)]
            self.logprobs += logprobs
            self.steps.append(self.tokens - 1)
            self.ticket.show(self.text.feed(token), record, logprobs)
        if self.text.stopped:
            self.finish = "stop"
        elif self.tokens >= self.ticket.request.decoding.max_new_tokens:
            self.finish = "length"
        return self.finish is not None or self.ticket.abandoned

    def close(
        self,
        prompt_tokens: int,
        method: str,
        counters: Mapping[str, float],
        check: Callable[[str, Sequence[int], Sequence[int]], Json] | None = None,
    ) -> None:
        """Send the end of the answer."""
        if self.finish is None and self.ticket.abandoned:
            return  # the batcher reports the timeout
        self.ticket.show("", thought=self.thought.finish())
        self.ticket.show(self.text.finish())
        names = ("steps", "applied", "changed", "vision_tokens", "outside", "unclosed")
        self.ticket.finish(
            Reply(
                self.text.shown,
                self.finish or "length",
                prompt_tokens,
                self.tokens,
                method,
                {name: int(counters[name]) for name in names if name in counters},
                {} if self.recorder is None else self.recorder.end(),
                None if check is None else check(self.text.shown, self.text.tokens, self.steps),
                self.logprobs,
                self.thought.shown,
                len(self.thought.tokens),
            )
        )


VALUE = re.compile(r'("(?:[^"\\]|\\.)*"|[^\s",:\[\]{}]+)(\s*:)?')  # of a JSON text; a colon follows keys


def rated_values(check: Check) -> list[JsonValue]:
    """List the values of a JSON answer with the support of their weakest word; null where no word was checked."""
    found: list[JsonValue] = []
    for value in VALUE.finditer(check.text):
        start, end = value.span(1)
        support = [word.support for word in check.checked if start <= word.start < end]
        if value[2] is None:
            found.append({"value": value[1], "start": start, "end": end, "support": min(support, default=None)})
    return found


def as_json(check: Check) -> Json:
    """Convert a check to the `check` field of an answer."""
    return {name: finite(value) for name, value in check.to_dict().items() if name != "model"}
