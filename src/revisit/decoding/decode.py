"""Decode prompts and return what came out: `decode`, behind every command, function and engine that shows an answer.

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
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from revisit.decoding.generate import generate
from revisit.decoding.method import METHODS
from revisit.decoding.processors import Repeatable
from revisit.decoding.settings import Decoding
from revisit.decoding.trace import StepRecord, Trace, row_trace
from revisit.errors import RevisitError
from revisit.models.devices import widest_float
from revisit.models.outputs import end_tokens, new_tokens, read_outputs, until_end
from revisit.models.prompts import prepare_opened
from revisit.models.thoughts import thoughts_of
from revisit.registry import MAX_SEED
from revisit.video.clip import frame_count

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.models.types import Inputs, Model, Processor
    from revisit.video.clip import Visual

# (row, token) -> whether the row ends here; called for every token of a row until the row has ended, with beams after the search.
OnToken = Callable[[int, int], bool]


@dataclass(frozen=True)
class Decoded:
    """One answer.

    Attributes:
        tokens: All new tokens, with the thought and the end token.
        text: The answer, without thoughts, special tokens and surrounding blanks; empty within an unclosed thought.
        thought: What a model that thinks wrote between the tokens of its thoughts.
        unclosed: Whether it ended within a thought.
        finish: Whether it reached its end ("stop") or its largest length ("length").
        trace: What the method did; one row, or one per beam.
    """

    tokens: tuple[int, ...]
    text: str
    thought: str
    unclosed: bool
    finish: Literal["stop", "length"]
    trace: Trace

    @property
    def steps(self) -> list[StepRecord]:
        """The record of each token, with `record=True`."""
        return self.trace.rows[0].records

    @property
    def changed(self) -> list[int]:
        """The recorded steps, from 0, at which the method's best token was not the model's."""
        return [number for number, step in enumerate(self.steps) if step.changed]

    def counters(self) -> dict[str, float]:
        """Return the trace's counters, summed over beams."""
        rows = self.trace.rows
        rare = {name: sum(getattr(row, name) for row in rows) for name in ("outside", "exhausted", "overruled")}
        rare["unclosed"] = int(self.unclosed)
        return {
            "steps": sum(row.step_count for row in rows),
            "applied": sum(row.applied for row in rows),
            "changed": sum(row.changed for row in rows),
            "vision_tokens": rows[0].vision_tokens,
            "plausible_tokens": sum(size for row in rows for size in row.plausible_tokens),
            **{name: count for name, count in rare.items() if count},
        }


def decode(
    model: Model,
    processor: Processor,
    inputs: Inputs,
    method: Method,
    settings: Decoding | Sequence[Decoding],
    *,
    seeds: Sequence[int] | None = None,
    on_token: OnToken | None = None,
    processors: Sequence[LogitsProcessor] = (),
    criteria: Sequence[StoppingCriteria] = (),
    record: bool = False,
    **more: Any,
) -> list[Decoded]:
    """Answer prepared prompts, one per row of `inputs`.

    Args:
        model: The model.
        processor: Its processor.
        inputs: The processor's outputs for the prompts.
        method: The decoding method.
        settings: Length, sampling and beams of all rows, or of each one; all rows must have the same number of beams.
        seeds: The seed of each row's draws; by default drawn from torch's generator, as `torch.manual_seed` sets it.
        on_token: Called for every token; ends a row by returning True.
        processors: Applied after the method, before temperature, top-k and top-p.
        criteria: Further stopping criteria.
        record: Record every step in the answers' traces, with texts.
        **more: Passed to `generate`, for example a cache that holds the prompts.
    """
    rows = len(inputs["input_ids"])
    settings = [settings] * rows if isinstance(settings, Decoding) else settings
    sampled = any(row.temperature is not None for row in settings)
    (beams,) = {row.num_beams for row in settings}
    if beams == 1 and (beams := method.own_beams) > 1 and sampled:
        raise RevisitError(
            f"{method.name} uses beam search, not sampling: remove the temperature, or use another method."
        )
    limits = [row.max_new_tokens for row in settings]
    end = end_tokens(more.get("generation_config") or model.generation_config, more.get("eos_token_id"))
    trace, stopping = Trace(record=record), StoppingCriteriaList(criteria)
    if more.get("stop_strings") is not None:
        stopping.append(StopStringCriteria(processor.tokenizer, more.pop("stop_strings")))
    ends: RowEnds | None = None
    if beams == 1 and (stopping or on_token is not None or len(set(limits)) > 1):
        ends = RowEnds(limits, end, stopping, on_token)
        stopping = StoppingCriteriaList([ends])
    elif beams > 1 and len(set(limits)) > 1:
        stopping.append(BeamLimits(limits, inputs["input_ids"].shape[1]))
    if sampled:
        seeds = torch.randint(MAX_SEED, (rows,)).tolist() if seeds is None else seeds
        processors = [*processors, RowSampling(settings, seeds)]
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
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=stopping,
    )
    lengths = limits if ends is None else ends.lengths
    tokens = [until_end(r[:n], end) for r, n in zip(new_tokens(output, inputs).tolist(), lengths, strict=True)]
    if on_token is not None and beams > 1:
        for number, row in enumerate(tokens):  # up to the token where `on_token` ends it
            del row[next((count for count, token in enumerate(row, 1) if on_token(number, token)), len(row)) :]
    texts = read_outputs(processor, thoughts_of(model, processor), inputs["input_ids"].tolist(), tokens)
    answers = []
    for number, (row, limit, found) in enumerate(zip(tokens, limits, texts, strict=True)):
        finish: Literal["stop", "length"] = "length" if len(row) == limit and row[-1] not in end else "stop"
        own = row_trace(trace, number, beams)
        for step, in_thought in zip(own.rows[0].records, found.in_thought, strict=False):  # beams have more steps
            step.thought = in_thought
        answers.append(Decoded(tuple(row), found.text, found.thought, found.unclosed, finish, own))
    return answers


def decode_prompts(
    model: Model,
    processor: Processor,
    prompts: Sequence[str],
    visuals: Sequence[Sequence[Visual]],
    method: Method,
    settings: Decoding,
    seeds: Sequence[int] | None = None,
) -> list[Decoded]:
    """Answer questions about images and videos. Questions without any are answered plainly, whatever the method."""
    groups: dict[frozenset[int], list[int]] = {}
    for row, seen in enumerate(visuals):  # some models cannot mix images with videos, or videos of different lengths
        lengths = frozenset(map(frame_count, seen))
        groups.setdefault(lengths, []).append(row)
    answers: dict[int, Decoded] = {}
    for lengths, rows in groups.items():
        used = method if lengths else METHODS.get("greedy")
        inputs = prepare_opened(processor, [prompts[row] for row in rows], [visuals[row] for row in rows], model.device)
        row_seeds = None if seeds is None else [seeds[row] for row in rows]
        answers.update(zip(rows, decode(model, processor, inputs, used, settings, seeds=row_seeds), strict=True))
    return [answers[row] for row in range(len(prompts))]


class RowEnds(StoppingCriteria):  # type: ignore[misc]
    """End each row at its own limit, at another criterion, or where `on_token` returns True.

    `lengths` has the number of tokens of the rows that have ended.
    """

    def __init__(
        self, limits: Sequence[int], end: set[int], others: StoppingCriteriaList, on_token: OnToken | None
    ) -> None:
        self.limits, self.end, self.others, self.on_token = limits, end, others, on_token
        self.lengths: list[int | None] = [None] * len(limits)
        self.steps = 0

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.steps += 1
        over = self.others(input_ids, scores, **kwargs).tolist() if self.others else [False] * len(self.limits)
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.lengths[row] is None:
                stop = self.on_token is not None and self.on_token(row, token)
                if stop or over[row] or token in self.end or self.steps >= self.limits[row]:
                    self.lengths[row] = self.steps
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


class BeamLimits(StoppingCriteria):  # type: ignore[misc]
    """End the beams of each item at the item's own limit."""

    def __init__(self, limits: Sequence[int], prompt: int) -> None:
        self.limits, self.prompt = limits, prompt

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        reached = [input_ids.shape[1] - self.prompt >= limit for limit in self.limits]
        return torch.tensor(reached, device=input_ids.device).repeat_interleave(len(input_ids) // len(reached))


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
