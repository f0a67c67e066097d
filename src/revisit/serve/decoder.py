"""Decodes a batch of requests with one call of `revisit.generate`, each row by its own rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from revisit.decoding.loop import generate
from revisit.decoding.trace import RowTrace, Trace
from revisit.errors import RevisitError
from revisit.evaluation.engines.local import ItemDraw, end_tokens
from revisit.models.prompts import encode, vision_texts
from revisit.serve.batcher import Ticket
from revisit.serve.protocol import Ask, Reply, Sampling
from revisit.serve.text import Unfolding


class Decoder:
    """A loaded model that answers tickets."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.end = end_tokens(model)
        self.special = vision_texts(processor)

    # -- before the queue -----------------------------------------------------------------------------------------

    def prompt(self, ask: Ask) -> str:
        """The conversation as the model's chat template writes it; refuses texts that imitate an image."""
        for message in ask.messages:
            for part in message["content"]:
                for token in self.special:
                    if token in part.get("text", ""):
                        raise RevisitError(
                            f"A message contains {token!r}, which stands for an image in this model; leave it out."
                        )
        if getattr(self.processor, "chat_template", None) is not None:
            text: str = self.processor.apply_chat_template(
                list(ask.messages), add_generation_prompt=True, tokenize=False
            )
            return text
        return plain_template(ask, getattr(self.processor, "image_token", "<image>"))

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
            self.processor, [t.prompt for t in tickets], [list(t.ask.images) for t in tickets], self.model.device
        )

    def _generate(self, tickets: Sequence[Ticket], inputs: Any, lengths: Sequence[int]) -> None:
        rows = [Progress(ticket, self._text, self.end) for ticket in tickets]
        method = tickets[0].ask.method
        trace = Trace()
        generate(
            self.model,
            **inputs,
            method=method,
            trace=trace,
            do_sample=False,  # draws are made row by row
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=max(t.ask.max_tokens for t in tickets),
            pad_token_id=self.processor.tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([RowSampling([t.ask.sampling for t in tickets])]),
            stopping_criteria=StoppingCriteriaList([RowsDone(rows)]),
            streamer=Distribute(rows),
        )
        for row, length, counters in zip(rows, lengths, trace.rows, strict=True):
            row.close(length, method.name, counters)

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Progress:
    """One row of a running batch."""

    def __init__(self, ticket: Ticket, decode: Callable[[Sequence[int]], str], end: set[int]) -> None:
        self.ticket, self.end = ticket, end
        self.text = Unfolding(decode, ticket.ask.stop)
        self.finish: str | None = None

    def take(self, token: int) -> None:
        """The next token of this row; tokens after its end are the batch's padding."""
        if self.finish is not None:
            return
        if token in self.end:
            self.text.tokens.append(token)
            self.finish = "stop"
            return
        self.ticket.show(self.text.feed(token))
        if self.text.stopped:
            self.finish = "stop"
        elif len(self.text.tokens) >= self.ticket.ask.max_tokens:
            self.finish = "length"

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted of this row: it ended, or nobody waits for it any more."""
        return self.finish is not None or self.ticket.abandoned

    def close(self, prompt_tokens: int, method: str, counters: RowTrace) -> None:
        """Hand over what was made."""
        if self.finish is None and self.ticket.abandoned:
            return  # the ticket says why
        self.ticket.show(self.text.finish())
        about = {
            "method": method,
            "steps": counters.steps,
            "applied": counters.applied,
            "changed": counters.changed,
            "vision_tokens": counters.vision_tokens,
        }
        self.ticket.succeed(
            Reply(self.text.shown, self.finish or "length", prompt_tokens, len(self.text.tokens), about)
        )


class Distribute(BaseStreamer):  # type: ignore[misc]
    """Gives every row its tokens as transformers' loop makes them."""

    def __init__(self, rows: Sequence[Progress]) -> None:
        self.rows, self.prompt = rows, True

    def put(self, value: Tensor) -> None:
        if self.prompt:  # the first thing a streamer is given
            self.prompt = False
            return
        for row, token in zip(self.rows, value.reshape(-1).tolist(), strict=True):
            row.take(token)

    def end(self) -> None:
        """Rows are closed by whoever started them."""


class RowsDone(StoppingCriteria):  # type: ignore[misc]
    """Which rows have ended; the loop pads them until all have."""

    def __init__(self, rows: Sequence[Progress]) -> None:
        self.rows = rows
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        # The streamer is told of a token after this is asked, so a limit on tokens is counted here.
        ended = [row.done or self.calls >= row.ticket.ask.max_tokens for row in self.rows]
        return torch.tensor(ended, device=input_ids.device)


class RowSampling(LogitsProcessor):  # type: ignore[misc]
    """Temperature, top-k, top-p and the draw, each row by its own settings; greedy rows pass unchanged."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self.rows = [(number, warpers(s)) for number, s in enumerate(rows) if s.temperature is not None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for number, chain in self.rows:
            row = slice(number, number + 1)
            scores[row] = chain(input_ids[row], scores[row])  # type: ignore[arg-type]
        return scores


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """What a sampled row's logits go through; the last step leaves one token."""
    assert sampling.temperature is not None
    chain = LogitsProcessorList()
    if sampling.temperature != 1:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    chain.append(ItemDraw([sampling.seed]))
    return chain


def plain_template(ask: Ask, image_token: str) -> str:
    """A conversation for models without a chat template."""
    names = {"system": "", "user": "USER: ", "assistant": "ASSISTANT: "}
    turns = [
        names[message["role"]]
        + "".join(f"{image_token}\n" if part["type"] == "image" else part["text"] for part in message["content"])
        for message in ask.messages
    ]
    return " ".join([*turns, "ASSISTANT:"])
