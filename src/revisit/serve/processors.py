"""Logits processors for log-probabilities and for answers that follow a JSON schema."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from revisit.decoding.processors import Repeatable
from revisit.errors import RevisitError, need
from revisit.models.tokens import token_text

if TYPE_CHECKING:
    from pydantic import JsonValue

    from revisit.models.types import Tokenizer

SCHEMA_CHARACTERS = 20_000
ITEMS = 1_000  # of a list; llguidance's time and memory grow with their number
# Keywords of JSON Schema: those that describe the same value once more, name schemas, and hold values that are no schemas.
COMBINING = {"$ref", "if", "anyOf", "oneOf", "allOf", "dependentSchemas"}
NAMING = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
VALUES = {"const", "enum", "default", "examples"}
UNUSABLE = (
    "No answer could be found that follows the JSON schema: check its references ($ref) for a circle, and simplify its patterns "
    "and numbers."
)


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


def closed(schema: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Allow no keys but those that an object's schema lists, unless it has `additionalProperties`; xgrammar and vLLM do the same.

    A schema that describes one object in several places is returned as it is: each of them may list other keys.
    """
    whole = copy.deepcopy(schema)
    nodes = list(_subschemas(whole))
    several = (node.keys() & COMBINING if "properties" in node else _length(node.get("allOf")) > 1 for node in nodes)
    if not any(several):
        for node in nodes:
            if "properties" in node and "unevaluatedProperties" not in node:
                node.setdefault("additionalProperties", False)
    return whole


def _subschemas(schema: Any, named: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it; `named` ones are in an object by name."""
    if isinstance(schema, list):
        for one in schema:
            yield from _subschemas(one)
    elif isinstance(schema, dict):
        if not named:
            yield schema
        for key, value in schema.items():
            if named or key not in VALUES:
                yield from _subschemas(value, named=not named and key in NAMING)


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def grammar(schema: Mapping[str, JsonValue]) -> str:
    """Return llguidance's grammar of a JSON schema; raise RevisitError if it cannot be used."""
    need("llguidance")
    from llguidance import LLMatcher, LLTokenizer

    text = json.dumps(closed(schema))
    if len(text) > SCHEMA_CHARACTERS:
        raise RevisitError(f"The JSON schema has more than {SCHEMA_CHARACTERS:,} characters.")
    if any(float(count) > ITEMS for count in re.findall(r'"(?:min|max)Items": ([\d.e+]+)', text)):
        raise RevisitError(f"The JSON schema has lists of more than {ITEMS:,} items.")
    compiled: str = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    if problem := LLMatcher.validate_grammar(compiled):
        raise RevisitError(f"The JSON schema cannot be used: {problem.splitlines()[0]}")
    Grammar(compiled, LLTokenizer("byte")).allowed(256)
    return compiled


class Grammar:
    """How far one answer has got in its grammar."""

    def __init__(self, compiled: str, tokenizer: Any) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, compiled, log_level=0)

    def allowed(self, vocabulary: int) -> Tensor:
        """Return which tokens can follow, (vocabulary,); raise RevisitError if the parser has given up."""
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[:vocabulary] != 0
        if self._matcher.is_error() or not bool(mask.any()):  # the details are the parser's state
            raise RevisitError(UNUSABLE)
        return torch.nn.functional.pad(mask, (0, vocabulary - len(mask)))

    def accept(self, token: int) -> None:
        """Continue with this token."""
        if not self._matcher.consume_token(token):
            raise RevisitError(UNUSABLE)


class JsonAnswers(LogitsProcessor):  # type: ignore[misc]
    """Allow only the tokens that each row's function returns for the size of the vocabulary; None allows all."""

    def __init__(self, rows: Sequence[Callable[[int], Tensor | None]]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masks = {number: mask for number, row in enumerate(self.rows) if (mask := row(scores.shape[1])) is not None}
        if not masks:
            return scores
        allowed = torch.stack([*masks.values()]).to(scores.device)
        return scores.index_put(
            (torch.tensor([*masks], device=scores.device),), scores[[*masks]].masked_fill(~allowed, -torch.inf)
        )
