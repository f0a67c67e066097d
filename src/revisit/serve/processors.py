"""Logits processors for log-probabilities and for answers that follow a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from revisit.decoding.processors import Repeatable
from revisit.errors import RevisitError, need
from revisit.explain.tokens import token_text

if TYPE_CHECKING:
    from pydantic import JsonValue

    from revisit.models.types import Tokenizer

SCHEMA_CHARACTERS = 20_000
ITEMS = 1_000  # of a list; llguidance's time and memory grow with their number


class LogProbabilities(Repeatable):
    """Keep the distribution of each step after the method, before temperature, top-p and a JSON schema."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.length = tokenizer, -1
        self.kept: list[Tensor] = []  # (rows, vocabulary); the second, if any, is the fallback to the model's own

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.length:
            self.length, self.kept = input_ids.shape[1], []
        self.kept.append(scores)
        return scores

    def entry(self, row: int, token: int, top: int) -> JsonValue:
        """Return the last step of a row in OpenAI's form, with the `top` likeliest tokens."""
        for scores in self.kept:
            logprobs = scores[row].float().log_softmax(-1)
            if logprobs[token] > -torch.inf:
                break
        values, ids = (found.tolist() for found in logprobs.topk(min(top, len(logprobs))))
        best: list[JsonValue] = [
            self._token(other, value) for other, value in zip(ids, values, strict=True) if value > -torch.inf
        ]
        return {**self._token(token, float(logprobs[token])), "top_logprobs": best}

    def _token(self, token: int, logprob: float) -> dict[str, JsonValue]:
        text = token_text(self.tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": [*text.encode("utf-8", "replace")]}


def grammar(schema: Mapping[str, JsonValue]) -> str:
    """Return llguidance's grammar of a JSON schema; raise RevisitError if it cannot be used."""
    need("llguidance")
    from llguidance import LLMatcher, LLTokenizer

    text = json.dumps(schema)
    if len(text) > SCHEMA_CHARACTERS:
        raise RevisitError(f"The JSON schema has more than {SCHEMA_CHARACTERS:,} characters.")
    if any(float(count) > ITEMS for count in re.findall(r'"(?:min|max)Items": ([\d.e+]+)', text)):
        raise RevisitError(f"The JSON schema has lists of more than {ITEMS:,} items.")
    compiled: str = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    if problem := LLMatcher.validate_grammar(compiled):
        raise RevisitError(f"The JSON schema cannot be used: {problem.splitlines()[0]}")
    matcher = LLMatcher(LLTokenizer("byte"), compiled)
    matcher.compute_logit_bias()
    if matcher.is_stopped():  # before the first byte
        raise RevisitError("No JSON value matches the JSON schema; check its references ($ref) for a circle.")
    return compiled


class JsonAnswers(LogitsProcessor):  # type: ignore[misc]
    """Allow only tokens that continue each row's grammar; rows without one pass unchanged.

    `close` has the token that ends the thought of rows whose prompt opened one: the grammar begins after it.
    """

    def __init__(self, grammars: Sequence[str | None], tokenizer: Any, close: Sequence[int | None]) -> None:
        from llguidance import LLMatcher

        self.close = [*close]
        self.matchers = [None if text is None else LLMatcher(tokenizer, text) for text in grammars]
        self.length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores, new = scores.clone(), self.length is not None and input_ids.shape[1] > self.length
        self.length = input_ids.shape[1]
        for row, matcher in enumerate(self.matchers):
            if matcher is None or (matcher.is_stopped() and new):
                continue
            if self.close[row] is not None:
                if not new or int(input_ids[row, -1]) != self.close[row]:
                    continue
                self.close[row] = None
            elif new and not matcher.consume_token(int(input_ids[row, -1])):
                raise RevisitError(f"The answer could not follow the JSON schema: {matcher.get_error()}")
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[: scores.shape[1]]
            scores[row, : len(allowed)].masked_fill_(allowed.to(scores.device) == 0, -torch.inf)
            scores[row, len(allowed) :] = -torch.inf
        return scores
