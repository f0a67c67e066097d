"""Decodes a batch of requests with one call of `revisit.generate`, each row by its own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from revisit.decoding.batch import decode_batch
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.models import templates
from revisit.models.prompts import encode, end_tokens, vision_texts
from revisit.serve.batcher import Ticket
from revisit.serve.detokenizer import IncrementalDetokenizer
from revisit.serve.replies import Reply
from revisit.serve.requests import ChatRequest


class Decoder:
    """A loaded model that answers tickets."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.end = end_tokens(model.generation_config)
        self.special = vision_texts(processor)

    # -- before the queue -----------------------------------------------------------------------------------------

    def prompt(self, request: ChatRequest) -> str:
        """The conversation as the model's chat template writes it; refuses texts that imitate an image."""
        for message in request.messages:
            for part in message["content"]:
                for token in self.special:
                    if token in part.get("text", ""):
                        raise RevisitError(
                            f"A message contains {token!r}, which stands for an image in this model; leave it out."
                        )
        if getattr(self.processor, "chat_template", None) is not None:
            return templates.render(self.processor, request.messages, add_generation_prompt=True)
        return plain_template(request, getattr(self.processor, "image_token", "<image>"))

    def text_length(self, text: str) -> int:
        """Tokens of a prompt, each image counted as one: a lower bound that needs no image processing."""
        return len(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- the batch ------------------------------------------------------------------------------------------------

    def decode(self, tickets: Sequence[Ticket], prompt_limit: int) -> None:
        """Answer all tickets; every one is finished, with a reply or an error, when this returns."""
        try:
            inputs = self._encode(tickets)
        except Exception as error:
            if len(tickets) == 1:  # one bad request must not spoil the others
                tickets[0].fail(
                    error
                    if isinstance(error, RevisitError)
                    else RevisitError(f"The request cannot be encoded: {error}")
                )
                return
            for ticket in tickets:
                self.decode([ticket], prompt_limit)
            return
        lengths = inputs["attention_mask"].sum(-1).tolist()
        if max(lengths) > prompt_limit:
            keep = [t for t, n in zip(tickets, lengths, strict=True) if n <= prompt_limit]
            for ticket, length in zip(tickets, lengths, strict=True):
                if length > prompt_limit:
                    ticket.fail(
                        RevisitError(
                            f"The prompt has {length} tokens (images included); at most {prompt_limit} are allowed."
                        )
                    )
            if keep:
                self.decode(keep, prompt_limit)
            return
        self._generate(tickets, inputs, lengths)

    def _encode(self, tickets: Sequence[Ticket]) -> Any:
        return encode(
            self.processor, [t.prompt for t in tickets], [list(t.request.images) for t in tickets], self.model.device
        )

    def _generate(self, tickets: Sequence[Ticket], inputs: Any, lengths: Sequence[int]) -> None:
        rows = [Progress(ticket, self._text, self.end) for ticket in tickets]
        method = tickets[0].request.method
        found = decode_batch(
            self.model,
            self.processor,
            inputs,
            method,
            [decoding_of(ticket.request) for ticket in tickets],
            [ticket.request.sampling.seed for ticket in tickets],
            lambda row, token: rows[row].take(token),
        )
        for row, length, answer in zip(rows, lengths, found, strict=True):
            row.close(length, method.name, answer.counters())

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Progress:
    """One row of a running batch."""

    def __init__(self, ticket: Ticket, decode: Callable[[Sequence[int]], str], end: set[int]) -> None:
        self.ticket, self.end = ticket, end
        self.text = IncrementalDetokenizer(decode, ticket.request.stop)
        self.finish: str | None = None

    def take(self, token: int) -> bool:
        """The next token of this row; whether nothing more is wanted of it."""
        if token in self.end:
            self.text.tokens.append(token)
            self.finish = "stop"
            return True
        self.ticket.show(self.text.feed(token))
        if self.text.stopped:
            self.finish = "stop"
        elif len(self.text.tokens) >= self.ticket.request.max_tokens:
            self.finish = "length"
        return self.finish is not None or self.ticket.abandoned

    def close(self, prompt_tokens: int, method: str, counters: Mapping[str, float]) -> None:
        """Hand over what was made."""
        if self.finish is None and self.ticket.abandoned:
            return  # the ticket says why
        self.ticket.show(self.text.finish())
        about = {
            "method": method,
            **{name: int(counters[name]) for name in ("steps", "applied", "changed", "vision_tokens")},
        }
        self.ticket.succeed(
            Reply(self.text.shown, self.finish or "length", prompt_tokens, len(self.text.tokens), about)
        )


def decoding_of(request: ChatRequest) -> Decoding:
    """A request's sampling settings as every engine reads them."""
    sampling = request.sampling
    if sampling.temperature is None:
        return Decoding(request.max_tokens)
    return Decoding(request.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k)


def plain_template(request: ChatRequest, image_token: str) -> str:
    """A conversation for models without a chat template."""
    names = {"system": "", "user": "USER: ", "assistant": "ASSISTANT: "}
    turns = [
        names[message["role"]]
        + "".join(f"{image_token}\n" if part["type"] == "image" else part["text"] for part in message["content"])
        for message in request.messages
    ]
    return " ".join([*turns, "ASSISTANT:"])
