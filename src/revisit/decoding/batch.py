"""Decoding of a batch into answers, for evaluation, the server and the studies.

Every row has its own decoding settings and seed, and its answer does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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

from revisit.decoding.generate import generate
from revisit.decoding.method import METHODS
from revisit.decoding.processors import Repeatable
from revisit.decoding.settings import Decoding
from revisit.decoding.trace import RowTrace, Trace
from revisit.errors import RevisitError
from revisit.models.devices import widest_float
from revisit.models.prompts import end_tokens, new_tokens, prepare, until_end
from revisit.models.thoughts import Split, Thoughts, thoughts_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.models.types import Inputs, Model, Processor

# (row, token) -> whether the row ends here; called for every token of a row until the row has ended, with beams after the search.
OnToken = Callable[[int, int], bool]


@dataclass(frozen=True)
class Decoded:
    """One answer: its text without thoughts and surrounding blanks, its tokens including the end token, and why it ended."""

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    traces: tuple[RowTrace, ...]  # one per beam
    thought: str = ""  # text between the thought tokens of a model that thinks
    unclosed: bool = False  # whether it ended within a thought

    def counters(self) -> dict[str, float]:
        """Return the trace's counters, summed over beams."""
        rare = {"outside": sum(row.outside for row in self.traces), "unclosed": int(self.unclosed)}
        return {
            "steps": sum(row.step_count for row in self.traces),
            "applied": sum(row.applied for row in self.traces),
            "changed": sum(row.changed for row in self.traces),
            "vision_tokens": self.traces[0].vision_tokens,
            "plausible_tokens": sum(size for row in self.traces for size in row.plausible_tokens),
            **{name: count for name, count in rare.items() if count},
        }


def decode_prompts(
    model: Model,
    processor: Processor,
    prompts: Sequence[str],
    images: Sequence[Sequence[Image]],
    method: Method,
    decoding: Decoding | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Decoded]:
    """Answer prompts about images. Prompts without an image are decoded plainly, whatever the method."""
    answers: dict[int, Decoded] = {}
    with_image = [row for row in range(len(prompts)) if images[row]]
    without = [row for row in range(len(prompts)) if not images[row]]
    for rows, used in ((with_image, method), (without, METHODS.get("greedy"))):
        if rows:
            inputs = prepare(processor, [prompts[row] for row in rows], [images[row] for row in rows], model.device)
            row_seeds = None if seeds is None else [seeds[row] for row in rows]
            decoded = decode_batch(model, processor, inputs, used, [decoding or Decoding()] * len(rows), row_seeds)
            answers.update(zip(rows, decoded, strict=True))
    return [answers[row] for row in range(len(prompts))]


def decode_batch(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    method: Method,
    decodings: Sequence[Decoding],
    seeds: Sequence[int] | None = None,
    on_token: OnToken | None = None,
    trace: Trace | None = None,
    processors: Sequence[LogitsProcessor] = (),
    **more: Any,
) -> list[Decoded]:
    """Answer prepared prompts, one per row of `inputs`, each by its own settings and seed.

    Args:
        model: The model.
        processor: Its processor.
        inputs: The processor's outputs for the prompts.
        method: The decoding method.
        decodings: The settings of each row; all rows must have the same number of beams.
        seeds: The seed of each row; its number by default.
        on_token: Called for every token; ends a row by returning True.
        trace: Filled with what the method does.
        processors: Applied after the method, before temperature, top-k and top-p.
        **more: Passed to `generate`, for example a cache that holds the prompts.
    """
    (beams,) = {decoding.num_beams for decoding in decodings} or {1}
    if beams == 1 and (beams := method.own_beams) > 1 and _any_sampled(decodings):
        raise RevisitError(
            f"{method.name} uses beam search, not sampling: remove the temperature, or use another method."
        )
    limits = [decoding.max_new_tokens for decoding in decodings]
    seeds = list(range(len(decodings))) if seeds is None else seeds
    trace, end = trace or Trace(), end_tokens(model.generation_config)
    criteria = StoppingCriteriaList()
    if beams > 1 and len(set(limits)) > 1:
        criteria.append(BeamLimits(limits, inputs["input_ids"].shape[1]))
    elif beams == 1 and (on_token is not None or len(set(limits)) > 1):
        criteria.append(RowEnds(limits, end, on_token))
    output = generate(
        model,
        **inputs,
        **more,
        method=method,
        processor=processor,
        trace=trace,
        do_sample=False,  # RowSampling draws
        temperature=None,
        top_p=None,
        top_k=None,
        num_beams=beams,
        max_new_tokens=max(limits),
        pad_token_id=processor.tokenizer.pad_token_id,
        logits_processor=LogitsProcessorList(
            [*processors, *([RowSampling(decodings, seeds)] if _any_sampled(decodings) else [])]
        ),
        stopping_criteria=criteria,
    )
    rows = new_tokens(output, inputs).tolist()
    ends = criteria[0].lengths if criteria and beams == 1 else limits
    tokens = [until_end(row[:length], end) for row, length in zip(rows, ends, strict=True)]
    if on_token is not None and beams > 1:
        tokens = [_until_stopped(on_token, number, row) for number, row in enumerate(tokens)]
    thoughts = thoughts_of(model, processor)
    opened = [thoughts is not None and thoughts.open_at_end(row) for row in inputs["input_ids"].tolist()]
    texts = decode_texts(processor, thoughts, tokens, opened)
    return [
        Decoded(
            text,
            tuple(row),
            "length" if len(row) == limit and row[-1] not in end else "stop",
            tuple(trace.rows[number * beams : (number + 1) * beams]),
            thought,
            unclosed,
        )
        for number, ((text, thought, unclosed), row, limit) in enumerate(zip(texts, tokens, limits, strict=True))
    ]


def decode_texts(
    processor: Processor, thoughts: Thoughts | None, tokens: Sequence[Sequence[int]], opened: Sequence[bool]
) -> list[tuple[str, str, bool]]:
    """Return each row's answer, its thought, and whether it ended within a thought; without special tokens and surrounding blanks.

    `opened` is true for rows whose prompt ends within a thought.
    """
    splits = [
        Split([], list(row), [False] * len(row), unclosed=False) if thoughts is None else thoughts.split(row, inside)
        for row, inside in zip(tokens, opened, strict=True)
    ]
    parts = [part for split in splits for part in (split.answer, split.thought)]
    texts = [text.strip() for text in processor.batch_decode(parts, skip_special_tokens=True)]
    return [
        (answer, thought, split.unclosed)
        for answer, thought, split in zip(texts[::2], texts[1::2], splits, strict=True)
    ]


class RowEnds(StoppingCriteria):  # type: ignore[misc]
    """End each row at its own limit, or where `on_token` returns True. `lengths` has the tokens of rows that have ended."""

    def __init__(self, limits: Sequence[int], end: set[int], on_token: OnToken | None) -> None:
        self.limits, self.end, self.on_token = limits, end, on_token
        self.lengths: list[int | None] = [None] * len(limits)
        self.steps = 0

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.steps += 1
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.lengths[row] is None:
                stop = self.on_token is not None and self.on_token(row, token)
                if stop or token in self.end or self.steps >= self.limits[row]:
                    self.lengths[row] = self.steps
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


class BeamLimits(StoppingCriteria):  # type: ignore[misc]
    """End the beams of each item at the item's own limit."""

    def __init__(self, limits: Sequence[int], prompt: int) -> None:
        self.limits, self.prompt = limits, prompt

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        reached = [input_ids.shape[1] - self.prompt >= limit for limit in self.limits]
        return torch.tensor(reached, device=input_ids.device).repeat_interleave(len(input_ids) // len(reached))


def _until_stopped(on_token: OnToken, row: int, tokens: list[int]) -> list[int]:
    """Return the tokens of a finished row up to the one where `on_token` ends it."""
    for count, token in enumerate(tokens, 1):
        if on_token(row, token):
            return tokens[:count]
    return tokens


class RowSampling(Repeatable):
    """Apply temperature, top-k and top-p and draw a token, by each row's own settings; greedy rows pass unchanged."""

    def __init__(self, decodings: Sequence[Decoding], seeds: Sequence[int]) -> None:
        groups: dict[tuple[float, int | None, float | None], list[int]] = {}
        for row, how in enumerate(decodings):
            if how.temperature is not None:
                groups.setdefault((how.temperature, how.top_k, how.top_p), []).append(row)
        self.groups = [(rows, _warpers(*how, [seeds[row] for row in rows])) for how, rows in groups.items()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone() if self.groups else scores
        for rows, chain in self.groups:
            scores[rows] = chain(input_ids[rows], scores[rows])  # type: ignore[arg-type]
        return scores


def _any_sampled(decodings: Sequence[Decoding]) -> bool:
    return any(decoding.temperature is not None for decoding in decodings)


def _warpers(temperature: float, top_k: int | None, top_p: float | None, seeds: Sequence[int]) -> LogitsProcessorList:
    """Return the processors of sampled rows; the last one leaves one token per row."""
    chain = LogitsProcessorList()
    if temperature != 1:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        chain.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    chain.append(ItemDraw(seeds))
    return chain


class ItemDraw(Repeatable):
    """Draw each row's token with its own generator, and leave only that token possible.

    The draw inverts the cumulative distribution at one uniform number per step, so that an item's answer is the same in any
    batch. A second call at the same step, as by `OtherProcessors`, uses the same numbers. Rows with no token left are returned
    unchanged, so that `OtherProcessors` finds them.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.length = -1  # of the step that `uniform` belongs to
        self.uniform = torch.empty(0, 1)  # (rows, 1)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wide = widest_float(scores.device)
        if input_ids.shape[1] != self.length:
            self.length = input_ids.shape[1]
            draws = [torch.rand(1, generator=generator, dtype=wide) for generator in self.generators]
            self.uniform = torch.stack(draws).to(scores.device)
        cumulative = scores.to(wide).softmax(-1).cumsum(-1)  # (rows, vocabulary), NaN in rows with no token left
        place = torch.searchsorted(cumulative, self.uniform * cumulative[:, -1:], right=True)
        chosen = torch.full_like(scores, -torch.inf)
        chosen.scatter_(1, place.clamp(max=scores.shape[-1] - 1), 0.0)
        return chosen.where((scores > -torch.inf).any(-1, keepdim=True), scores)
