"""Decode a batch of requests with one call of `revisit.generate`, each row with its own settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue
from torch import Tensor
from transformers import LogitsProcessor

from revisit.decoding.decode import decode
from revisit.errors import RevisitError
from revisit.explain.check import check_text, settings_of
from revisit.explain.lens import patch_words
from revisit.explain.prefill import watch_prefill
from revisit.explain.support import ModelText, answer_text, read_texts
from revisit.forward.states import outside_calls
from revisit.models.geometry import layout_of
from revisit.models.outputs import end_tokens
from revisit.models.parts import ModelParts
from revisit.models.prompts import check_no_image_tokens, encode, render, require_videos
from revisit.models.reader import scale_for
from revisit.models.thoughts import thoughts_of
from revisit.pages.answers import AnswerPage, payload
from revisit.serve.batcher import Abandoned, Ticket
from revisit.serve.detokenizer import IncrementalDetokenizer
from revisit.serve.errors import ApiError
from revisit.serve.processors import Grammar, JsonAnswers, LogProbabilities
from revisit.serve.replies import Choice, Json, Piece, Reply
from revisit.serve.requests import ChatRequest, reasoning_options
from revisit.video.clip import Video, shown_images

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model, Processor

logger = logging.getLogger(__name__)
_innermost = threading.local()  # .tickets: the batch that this thread decodes


@contextmanager
def stoppable(model: Model, tickets: Sequence[Ticket]) -> Iterator[None]:
    """Raise `Abandoned` at the model's next forward pass once all tickets are abandoned.

    Every decoding loop runs the model, so this ends all of them: tokens, beams, a beam's candidates, descriptions.
    Other threads that use the same model, and batches within this one, are not affected.
    """
    outer, _innermost.tickets = getattr(_innermost, "tickets", None), tickets

    def check(*_: object) -> None:
        if getattr(_innermost, "tickets", None) is tickets and all(ticket.abandoned for ticket in tickets):
            raise Abandoned

    hook = model.register_forward_pre_hook(check)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hook.remove()
        _innermost.tickets = outer


@contextmanager
def own_errors(ticket: Ticket) -> Iterator[None]:
    """Answer one request of a batch with the error of its own work, which must not reach the others."""
    try:
        yield
    except BaseException as error:  # also a panic of a library in Rust
        if not isinstance(error, RevisitError):
            logger.error("A request failed: %s", type(error).__name__, exc_info=error)
        ticket.finish(error)


class Decoder:
    """A loaded model that answers tickets; `between_tokens` may decode another batch before a running one goes on."""

    def __init__(self, model: Model, processor: Processor) -> None:
        self.model, self.processor = model, processor
        self.between_tokens: Callable[[], None] = lambda: None
        self.end = end_tokens(model.generation_config)
        self.thoughts = thoughts_of(model, processor)
        self.scale = scale_for(processor)

    def prompt(self, request: ChatRequest) -> str:
        """Apply the chat template; raise RevisitError for texts that contain an image token."""
        if any(isinstance(visual, Video) for visual in request.images):
            require_videos(self.processor)
        messages = [message.for_template() for message in request.chat.messages]
        for message in messages:
            for part in message["content"]:
                check_no_image_tokens(self.processor, "message", part.get("text", ""))
        template = str(getattr(self.processor, "chat_template", ""))
        effort = reasoning_options(request.chat, template)
        return render(self.processor, messages, **effort)

    def decode(self, tickets: Sequence[Ticket], *, prompt_limit: int) -> None:
        """Answer all tickets, or raise; a ticket whose prompt is too long fails alone."""
        rows = [ticket for ticket in tickets for _ in range(ticket.request.chat.n)]
        prompts, images = [t.prompt for t in rows], [list(t.request.images) for t in rows]
        inputs = encode(self.processor, prompts, images, self.model.device)
        texts = self.processor.tokenizer([t.request.text or "" for t in rows], add_special_tokens=False)["input_ids"]
        prompt_lengths = inputs["attention_mask"].sum(-1).tolist()
        lengths = [length + len(text) for length, text in zip(prompt_lengths, texts, strict=True)]
        for ticket, length in zip(rows, lengths, strict=True):
            if length > prompt_limit:
                message = f"The request has {length} tokens (images included); at most {prompt_limit} are allowed."
                ticket.finish(ApiError(400, message, param="messages" if ticket.request.text is None else "text"))
        fitting = [ticket for ticket in tickets if not ticket.finished]
        if fitting and len(fitting) < len(tickets):
            self.decode(fitting, prompt_limit=prompt_limit)
        elif fitting:
            run = self._generate if tickets[0].request.text is None else self._check
            with outside_calls(self.model), stoppable(self.model, tickets):
                run(rows, inputs, lengths)

    @cached_property
    def grammar_tokenizer(self) -> Any:
        """The tokenizer in llguidance's form."""
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self.processor.tokenizer
        return from_tokenizer(tokenizer, eos_token=sorted(self.end))

    def _generate(self, tickets: Sequence[Ticket], inputs: Inputs, lengths: Sequence[int]) -> None:
        """Answer the requests of a batch; each row has a ticket, and the choices of a request follow each other."""
        requests, first = [ticket.request for ticket in tickets], [tickets.index(ticket) for ticket in tickets]
        method, record, thoughts = requests[0].method, requests[0].record, self.thoughts
        tokenizer = self.processor.tokenizer
        logprobs = LogProbabilities(tokenizer)
        opened = [thoughts is not None and thoughts.open_at_end(ids) for ids in inputs["input_ids"].tolist()]
        rows = [
            BatchRow(self, ticket, n - first[n], opened[n], partial(logprobs.entry, n))
            for n, ticket in enumerate(tickets)
        ]
        processors: list[LogitsProcessor] = []
        if any(request.chat.logprobs for request in requests):
            processors.append(logprobs)
        if any(request.grammar for request in requests):
            processors.append(JsonAnswers([row.allowed for row in rows]))
        states, layers = None, list[int]()

        def add(row: int, token: int) -> bool:
            self.between_tokens()
            return rows[row].add(token)

        with ExitStack() as stack:
            if record or requests[0].chat.check is not None:
                layers = sorted({settings_of(self.model)[0], ModelParts.of(self.model).depth})
                states = stack.enter_context(watch_prefill(self.model, inputs, layers))
            answers = decode(
                self.model,
                self.processor,
                inputs,
                method,
                [request.decoding for request in requests],
                seeds=[wrapped(request.seed + row.number) for request, row in zip(requests, rows, strict=True)],
                on_token=add,
                processors=processors,
                record=record,
            )
        images = [list(request.images) for request in requests]
        for n, ticket in enumerate(tickets):
            if first[n] != n:
                continue
            own = slice(n, n + ticket.request.chat.n)
            with own_errors(ticket):
                if not all(row.end() for row in rows[own]):
                    continue
                answer, row = answers[n], rows[n]
                decoding: Json = {"method": method.name, **counters([answer.counters() for answer in answers[own]])}
                check = None
                if states is not None:
                    layout = layout_of(self.model, self.processor, images, inputs, n)
                    shown = shown_images(images[n])
                    text = answer_text(tokenizer, row.answer.text, row.answer.tokens, shown, layout, states[n])
                    check = None if requests[n].chat.check is None else self._checked(requests[n], text)
                    if (choice := requests[n].chat.decoding) is not None and choice.record:
                        words = patch_words(states[n], layers[-1], tokenizer)
                        # The page itself has the prompt and the name of the model.
                        decoding["page"] = payload(AnswerPage(shown, "", "", layout, [answer], choice.objects, words))
                choices = [row.choice() for row in rows[own]]
                ticket.finish(Reply(choices, lengths[n], decoding, check))

    def _check(self, tickets: Sequence[Ticket], inputs: Inputs, lengths: Sequence[int]) -> None:
        """Check the texts of requests, in one forward pass."""
        requests, prompts = [ticket.request for ticket in tickets], [ticket.prompt for ticket in tickets]
        texts, images = [request.text or "" for request in requests], [list(request.images) for request in requests]
        layer = settings_of(self.model)[0]
        read = read_texts(self.model, self.processor, inputs, prompts, images, texts, [layer])
        for ticket, text, length in zip(tickets, read, lengths, strict=True):
            with own_errors(ticket):
                choice = Choice(text.text, "stop", 0)
                ticket.finish(Reply([choice], length, check=self._checked(ticket.request, text)))

    def _checked(self, request: ChatRequest, text: ModelText) -> Json:
        choice = request.chat.check
        assert choice is not None
        check = check_text(self.model, self.processor.tokenizer, text, choice.threshold, choice.words)
        return {name: value for name, value in check.to_dict().items() if name != "model"}


class BatchRow:
    """One row of a running batch."""

    def __init__(
        self, decoder: Decoder, ticket: Ticket, number: int, thinking: bool, logprobs: Callable[[int, int], JsonValue]
    ) -> None:
        decode = partial(decoder.processor.tokenizer.decode, skip_special_tokens=True)
        self.decoder, self.ticket, self.number = decoder, ticket, number  # of the ticket's rows
        self.thinking, self._logprobs = thinking, logprobs
        self.tokens = 0
        self.logprobs: list[JsonValue] = []
        self.thought = IncrementalDetokenizer(decode)
        self.answer = IncrementalDetokenizer(decode, ticket.request.chat.stop or ())
        self.finish: str | None = None
        self.ended = False
        compiled = ticket.request.grammar
        self.grammar = None if compiled is None else Grammar(compiled, decoder.grammar_tokenizer)

    def allowed(self, vocabulary: int) -> Tensor | None:
        """Return which tokens can follow in the grammar, (vocabulary,); None if all can, as in thoughts and after the end."""
        if self.grammar is not None and not self.thinking and not self.ended:
            with own_errors(self.ticket):
                return self.grammar.allowed(vocabulary)
        return None

    def add(self, token: int) -> bool:
        """Add the next token; return whether it is the last one."""
        self.ended = True
        if not self.ticket.finished:
            with own_errors(self.ticket):
                self.ended = self._add(token)
        return self.ended

    def _add(self, token: int) -> bool:
        chat, thoughts = self.ticket.request.chat, self.decoder.thoughts
        self.tokens += 1
        if self.grammar is not None and not self.thinking:
            self.grammar.accept(token)
        if token in self.decoder.end:
            self.finish = "stop"
            return True
        if thoughts is not None and token in (thoughts.open, thoughts.close):
            self.thinking = token == thoughts.open
            self._stream("", thought=self.thought.finish())
        elif self.thinking:
            self._stream("", thought=self.thought.feed(token))
        else:
            logprobs = [self._logprobs(token, chat.top_logprobs or 0)] if chat.logprobs else []
            self.logprobs += logprobs
            self._stream(self.answer.feed(token), logprobs)
        if self.answer.stopped:
            self.finish = "stop"
        elif self.tokens >= self.ticket.request.decoding.max_new_tokens:
            self.finish = "length"
        return self.finish is not None or self.ticket.abandoned

    def end(self) -> bool:
        """Send the text that was held back; return False if it failed or was abandoned, which the batcher reports."""
        if self.ticket.finished or (self.finish is None and self.ticket.abandoned):
            return False
        self._stream("", thought=self.thought.finish())
        self._stream(self.answer.finish())
        if self.answer.stopped:
            self.finish = "stop"
        return True

    def _stream(self, text: str, logprobs: Sequence[JsonValue] = (), thought: str = "") -> None:
        self.ticket.stream(Piece(text, logprobs, thought, self.number))

    def choice(self) -> Choice:
        """Return the finished answer."""
        thought = self.thought
        return Choice(
            self.answer.text, self.finish or "length", self.tokens, self.logprobs, thought.text, len(thought.tokens)
        )


def wrapped(seed: int) -> int:
    """Return a seed within 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def counters(rows: Sequence[Mapping[str, float]]) -> Json:
    """Add up the counters of the rows of one request, whose vision tokens are the same."""
    names = [name for name in rows[0] if name != "plausible_tokens"]
    added = {name: sum(int(row.get(name, 0)) for row in rows) for name in names}
    return {**added, "vision_tokens": int(rows[0]["vision_tokens"])}
