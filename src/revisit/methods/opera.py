"""OPERA (Huang et al.): beam search with an over-trust penalty and rollback.

Each candidate for the next token is run to read its attention in the last layer: the maximum over heads at each position,
normalized. Each token of the answer has the product of `scale` times the attention that it gets from itself and from every later
token; the largest product is the candidate's penalty. (The first ten tokens are rewarded for attention to the image instead.)
When all beams have over-trusted the same token too often, the search rolls back to it and makes other choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateOutput
from typing_extensions import Self

from revisit.decoding.loop import Loop
from revisit.decoding.method import Method, StepResult
from revisit.errors import RevisitError
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.models.outputs import end_tokens
from revisit.registry import Beams as BeamCount
from revisit.registry import Count, Strength

IMAGE_STEPS = 10  # first steps, which reward attention to the image; their tokens never cause a rollback
WINDOW = 512  # how far the search may roll back, and the last token it may roll back to
PENALTY_SCALE = 1e-7  # factor of the products in a penalty
OUTPUTS = ("hidden_states", "attentions")  # of the model, which a call may ask for
OTHER_LOGIT = -999.0  # of tokens that are not candidates


def column_products(products: Tensor, attention: Tensor, scale: float) -> Tensor:
    """Multiply each column's product by the attention of a new token, and append its own column.  (..., n), (..., n + 1) -> (..., n + 1)"""
    # bounded, so that a later 0 gives 0 and not NaN
    return (torch.nn.functional.pad(products, (0, 1), value=1.0) * (scale * attention)).clamp(max=1e30)


def penalties(products: Tensor) -> Tensor:
    """Return the penalty for each product; in half precision, as published, which rounds small ones to 0."""
    return (PENALTY_SCALE * products).half().float()


def first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of the last axis and its first index, the same on every device.  (..., n) -> (...), (...)"""
    top = values.amax(-1)
    places = torch.arange(values.shape[-1], device=values.device)
    return top, places.expand_as(values).masked_fill(values < top[..., None], values.shape[-1]).amin(-1)


def most_frequent(values: Tensor) -> Tensor:
    """Return the most frequent number of the last axis, the smallest in case of a tie.  (..., n) -> (...)"""
    counts = (values[..., None] == values[..., None, :]).sum(-1)
    often = counts == counts.amax(-1, keepdim=True)
    return values.masked_fill(~often, 2**62).amin(-1)


class OPERA(Method):
    """OPERA; the defaults are those of its command lines.

    Args:
        beams: Number of beams in calls that do not set `num_beams`.
        candidates: Tokens that each beam may continue with; each of them takes one forward.
        scale: Factor of the attention before products are taken.
        weight: Strength of the penalty.
        threshold: Steps that may over-trust the same token before the search rolls back to it.
        scorer: How answers are compared: "current", by their log-probability divided by their length, as transformers does today, or
            "released", divided by the length of the prompt (each image as one token) and the answer without its end, as the
            released program does. It favors shorter answers.
        precision: Of the attention and its products: "float32", or "half" as in the released program, where a product above 65,504
            is infinite and rules its candidate out.
    """

    beams: BeamCount = 5
    candidates: Annotated[int, Field(ge=1, le=64)] = 5
    scale: Strength = 50.0
    weight: Strength = 1.0
    threshold: Count = 15
    scorer: Literal["current", "released"] = "current"
    precision: Literal["float32", "half"] = "float32"

    name = "opera"
    summary = "beam search with an over-trust penalty and rollback"
    cost = "1 forward and 1 for each candidate, all of them with one row per beam"
    source = "Huang et al., OPERA, arXiv:2311.17911"
    released = {"scorer": "released", "precision": "half"}
    changes_forward = True

    @classmethod
    def fast(cls, **overrides: Any) -> Self:
        """Return what its documentation calls the more efficient version: one candidate, so only the rollback is left."""
        return cls.official(**{"candidates": 1, "threshold": 25, **overrides})

    @property
    def own_beams(self) -> int:
        return self.beams

    def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> GenerateOutput | Tensor:
        if prompt.config.do_sample:
            raise RevisitError("OPERA uses beam search and cannot sample: turn sampling off, or use another method.")
        return Search(self, prompt, passes, loop).answers()


@dataclass(frozen=True)
class Snapshot:
    """The search before its n-th step."""

    beams: Beams
    products: Tensor  # (rows, n - 1) of the columns, without the attention of the newest token


@dataclass
class ItemSearch:
    """The search for one item of the batch. The target of a rollback is the step after that of the over-trusted token, or that step."""

    next: int = 0  # the next step
    done: bool = False
    target: int | None = None  # of the rollback that leads to the next step
    last_rollback: int | None = None  # the step that the last rollback led to
    rollbacks: dict[int, int] = field(default_factory=dict)  # number of rollbacks, by target
    excluded: dict[int, list[Tensor]] = field(default_factory=dict)  # (2, beams) beams and their tokens, by target


class Search:
    """The search of one call, in which every item of the batch is searched as it would be alone.

    Items roll back to different steps. The whole batch goes back to the first of these, and the other items repeat their
    choices up to their own next step. A column is a token of the answer, as a column of the attention matrix.
    """

    def __init__(self, method: OPERA, prompt: Prompt, passes: Passes, loop: Loop) -> None:
        self.method, self.prompt, self.loop = method, prompt, loop
        self.image, self.has_image = prompt.vision, prompt.has_image  # (rows, T), (rows,)
        self.attention: Tensor | None = None  # (rows, positions) of the newest position, in the last forward
        passes.on_attention(self._attention_hook, (prompt.parts.depth - 1,))
        self.candidates = min(method.candidates, prompt.model.config.get_text_config().vocab_size)
        beams = Beams.start(prompt)
        items, self.width = beams.scores.shape
        self.items = [ItemSearch() for _ in range(items)]
        self.prompt_lengths = self._prompt_lengths() if method.scorer == "released" else None
        self.snapshots = [Snapshot(beams, self.image.new_empty(len(self.image), 0, dtype=torch.float32))]
        self.kept: list[dict[str, Any]] = []  # of each step, what the call asked for
        steps = beams.ended.shape[-1]
        self.over_trusted = torch.full((len(self.image), steps), -1, device=self.image.device)  # (rows, steps) columns

    def answers(self) -> GenerateOutput | Tensor:
        """Search to the end, and return the prompts with their best answers."""
        step = 0
        while not all(item.done for item in self.items):
            self._step(step)
            step = self._move(step)
        output = best_answers(self.prompt, [self.snapshots[item.next].beams for item in self.items])
        if not isinstance(output, Tensor):
            for name in self.kept[0]:
                output[name] = tuple(kept[name] for kept in self.kept)
        return output

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        """Take one step of every item: a new one, one after a rollback, or a repeated one."""
        snapshot, config = self.snapshots[step], self.prompt.config
        ids = snapshot.beams.ids(self.prompt.ids)
        logits = self.loop.forward(ids)
        asked = {name: getattr(self.loop.output, name) for name in OUTPUTS if getattr(config, f"output_{name}")}
        products = snapshot.products
        if step:
            products = column_products(products, self._take_attention()[:, self.image.shape[1] :], self.method.scale)
        scores, over_trust = logits, torch.zeros(2, len(self.items), dtype=torch.long, device=ids.device)
        if any(item.next == step and item.target is None for item in self.items):
            scores, over_trust = self._penalized(step, ids, logits, products)
        for number, item in enumerate(self.items):
            if item.next == step and item.target is not None:
                scores = self._without_excluded(scores, logits, number, item.excluded[item.target])
        result = StepResult(scores.log_softmax(-1), acted=self.has_image, comparable=True)
        log_probs = self.loop.scores(ids, logits.log_softmax(-1), result)
        asked |= {"logits": logits} if config.output_logits else {}
        self.kept[step:] = [asked | {"scores": log_probs} if config.output_scores else asked]
        beams = snapshot.beams.step(log_probs, self.prompt, self.loop, self.prompt_lengths)
        repeated = [item.next > step for item in self.items]
        if any(repeated):
            beams = beams.mixed(torch.tensor(repeated, device=ids.device), self.snapshots[step + 1].beams)
        self.snapshots[step + 1 : step + 2] = [Snapshot(beams, products[beams.rows.flatten()])]
        self._decide(step, beams.done, over_trust)

    def _penalized(self, step: int, ids: Tensor, logits: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates' logits minus their penalties, with all other tokens far below; and the result of `_over_trust`.

        -> (rows, V), (2, items)
        """
        best, tokens = logits.topk(self.candidates)  # (rows, candidates)
        rows = []
        for token in tokens.T:
            self.loop.forward(torch.cat([ids, token[:, None]], dim=1))
            self.loop.crop(ids.shape[1])
            rows.append(self._take_attention())
        attention = torch.stack(rows, dim=1)  # (rows, candidates, T + n + 1)
        to_prompt, to_answer = attention.tensor_split([self.image.shape[1]], dim=-1)
        before = products[:, None].expand(-1, self.candidates, -1)  # (rows, candidates, n)
        products = column_products(before, to_answer, self.method.scale).to(to_answer.dtype)
        penalty, columns = first_largest(penalties(products))
        if step < IMAGE_STEPS:
            penalty = -(to_prompt * self.image[:, None]).sum(-1)  # (rows, candidates)
        scores = torch.full_like(logits, OTHER_LOGIT).scatter(1, tokens, best - self.method.weight * penalty)
        scores = torch.where(self.has_image[:, None], scores, logits)
        return scores, self._over_trust(step, most_frequent(columns))

    def _over_trust(self, step: int, columns: Tensor) -> Tensor:
        """Return the column that each item over-trusts, and whether all of its beams have done so too often.  (rows,) -> (2, items)"""
        self.over_trusted[:, step] = columns
        column = most_frequent(columns.view(-1, self.width))  # (items,)
        so_far = self.over_trusted[:, : step + 1].view(len(self.items), self.width, -1)
        counts = (so_far == column[:, None, None]).sum(-1)  # (items, beams)
        too_often = (counts > self.method.threshold).all(-1) & (column >= IMAGE_STEPS) & self.has_image[:: self.width]
        return torch.stack([column, too_often])

    def _without_excluded(self, scores: Tensor, logits: Tensor, number: int, choices: list[Tensor]) -> Tensor:
        """Use the model's own logits for an item's beams, with its earlier choices as the least likely tokens.  (rows, V)"""
        rows = slice(number * self.width, (number + 1) * self.width)
        own = logits[rows].clone()  # (beams, V)
        beam, token = torch.cat(choices, dim=1)
        own[beam, token] = own.amin(-1)[beam]
        return torch.cat([scores[: rows.start], own, scores[rows.stop :]])

    # -- rollback -------------------------------------------------------------------------------------------------

    def _decide(self, step: int, done: Tensor, over_trust: Tensor) -> None:
        """Decide where each item continues: at the next step, or at an earlier one.  (items,), (2, items)"""
        facts = torch.cat([done[None], over_trust]).T.tolist()
        for number, (item, (is_done, column, too_often)) in enumerate(zip(self.items, facts, strict=True)):
            if item.next != step or item.done:
                continue
            may_roll_back = too_often and item.target is None  # not right after another rollback
            item.target = self._target(number, column + 1, step) if may_roll_back else None
            if item.target is None:
                item.next, item.done = step + 1, bool(is_done)
            else:
                self._roll_back(number, item.target, step)

    def _target(self, number: int, target: int, step: int) -> int | None:
        """Return the step to roll back to: this one, or the one before if all candidates were tried here; None for neither."""
        if target + 1 >= WINDOW or step + 1 - target > WINDOW + 1:
            return None
        rollbacks = self.items[number].rollbacks
        for possible in (target, target - 1):
            if rollbacks.get(possible, 0) < self.method.candidates:
                rollbacks[possible] = rollbacks.get(possible, 0) + 1
                return possible
        return None

    def _roll_back(self, number: int, target: int, step: int) -> None:
        """Continue an item at an earlier step, and exclude what it chose there."""
        item = self.items[number]
        item.next = min(target, step - 1)
        chosen = self.snapshots[item.next + 1].beams
        beam, token = chosen.rows[number] - number * self.width, chosen.tokens[number, :, item.next]
        item.excluded.setdefault(target, []).append(torch.stack([beam, token]))
        item.excluded.pop(target + 1, None)
        if self.method.scorer == "released":
            self._keep_ended(number, item, step)

    def _keep_ended(self, number: int, item: ItemSearch, step: int) -> None:
        """Keep the answers that ended since an item's last rollback for the next one to the same step, as the released program does."""
        last, item.last_rollback = item.last_rollback, item.next
        if last is None or last > item.next:
            return
        snapshot = self.snapshots[last]
        only_this = torch.arange(len(self.items), device=self.image.device) == number
        self.snapshots[last] = replace(
            snapshot, beams=snapshot.beams.mixed(only_this, self.snapshots[step].beams, ENDED)
        )

    def _move(self, step: int) -> int:
        """Bring the model to the next step of the batch, and return that step."""
        following = min((item.next for item in self.items if not item.done), default=step + 1)
        if following == step + 1:
            self.loop.reorder(self.snapshots[following].beams.rows.flatten())
        else:
            self.loop.crop(self.prompt.ids.shape[1])
        return following

    def _prompt_lengths(self) -> Tensor:
        """Return the length of each item's prompt, with each image as one token.  -> (items,)"""
        text = self.prompt.real & ~self.image
        first = self.image & ~torch.nn.functional.pad(self.image, (1, 0))[:, :-1]
        return (text | first).sum(-1)[:: self.width]

    # -- attention ------------------------------------------------------------------------------------------------

    def _attention_hook(self, call: Call) -> None:
        largest = call.last_attention().amax(1)  # (rows, positions)
        largest = largest.half() if self.method.precision == "half" else largest.float()
        self.attention = largest / largest.sum(-1, keepdim=True)

    def _take_attention(self) -> Tensor:
        """Return the newest position's attention in the last forward.  -> (rows, positions)"""
        attention, self.attention = self.attention, None
        assert attention is not None
        return attention.to(self.image.device)


# -- beam search as in transformers ----------------------------------------------------------------------------------

ENDED = ("ended", "ended_scores", "ended_lengths", "ended_sources")
STOPPED = 1e9  # subtracted from the scores of beams that cannot continue


@dataclass(frozen=True)
class Beams:
    """The beams of every item of a batch after n tokens, and the answers that have ended.

    They never change: `step` returns new ones, so that a search can go back to earlier ones.
    """

    tokens: Tensor  # (items, beams, n) after the prompt
    scores: Tensor  # (items, beams) sums of log-probabilities
    sources: Tensor  # (items, beams, n) the row that each of these tokens continued
    ended: Tensor  # (items, beams, most) answers that have ended, best first, filled up at the end
    ended_scores: Tensor  # (items, beams) by the length penalty; -inf where there is no answer
    ended_lengths: Tensor  # (items, beams) in tokens
    ended_sources: Tensor  # (items, beams, most) the row that each of their tokens continued, filled up with -1
    open: Tensor  # (items,) whether a beam may still become better than these answers
    done: Tensor  # (items,) whether the search has ended

    @classmethod
    def start(cls, prompt: Prompt) -> Beams:
        """Return the beams before the first token."""
        config, device = prompt.config, prompt.ids.device
        items, beams = len(prompt.ids) // config.num_beams, config.num_beams
        scores = torch.zeros(items, beams, device=device)
        scores[:, 1:] = -STOPPED  # all beams are equal, so only the first continues
        most = config.max_length - prompt.ids.shape[1]
        flags = torch.ones(items, dtype=torch.bool, device=device)
        return cls(
            tokens=prompt.ids.new_empty(items, beams, 0),
            scores=scores,
            sources=prompt.ids.new_empty(items, beams, 0),
            ended=prompt.ids.new_full((items, beams, most), _filler(config)),
            ended_scores=torch.full_like(scores, -torch.inf),
            ended_lengths=prompt.ids.new_zeros(items, beams),
            ended_sources=prompt.ids.new_full((items, beams, most), -1),
            open=flags,
            done=~flags,
        )

    @property
    def rows(self) -> Tensor:
        """The row that each beam continued at the last step.  -> (items, beams)"""
        return self.sources[..., -1]

    def ids(self, prompt: Tensor) -> Tensor:
        """Return the rows with their prompts.  (rows, T) -> (rows, T + n)"""
        return torch.cat([prompt, self.tokens.flatten(0, 1)], dim=1)

    def step(self, log_probs: Tensor, prompt: Prompt, loop: Loop, prompt_lengths: Tensor | None = None) -> Beams:
        """Return the beams one token later.

        Args:
            log_probs: (rows, V) of that token.
            prompt: The prompts of the call.
            loop: Its stopping criteria.
            prompt_lengths: (items,) for the scorer of transformers 4.29, which the released program uses: it divides by the
                length of prompt and answer without its end. None for today's.
        """
        config, released = prompt.config, prompt_lengths is not None
        items, beams = self.scores.shape
        totals = (log_probs.view(items, beams, -1) + self.scores[..., None]).flatten(1)  # (items, beams · V)
        kept = min(max(2, 1 + len(end_tokens(config))) * beams, totals.shape[-1])
        best, place = totals.topk(kept)  # (items, kept)
        source, token = place // log_probs.shape[-1], place % log_probs.shape[-1]
        offsets = torch.arange(items, device=source.device)[:, None] * beams
        sources = torch.cat(
            [_take(self.sources, source), (source + offsets)[..., None]], dim=-1
        )  # (items, kept, n + 1)
        tokens = torch.cat([_take(self.tokens, source), token[..., None]], dim=-1)  # (items, kept, n + 1)
        length, most = tokens.shape[-1], self.ended.shape[-1]
        prompts = prompt.ids[::beams].repeat_interleave(kept, dim=0)
        stops = loop.ended(torch.cat([prompts, tokens.flatten(0, 1)], dim=1)).view(items, kept)

        # Beams that continue.
        scores, running = (best - STOPPED * stops).topk(beams)  # (items, beams)

        # Answers that end with this token.
        is_end = torch.zeros_like(token, dtype=torch.bool)  # (items, kept)
        for end in end_tokens(config):  # a tensor of them would have to be copied to the device
            is_end |= token == end
        full = self.ended_scores.isfinite().all(-1, keepdim=True) & (config.early_stopping is True)
        ends = stops & self.open[:, None] & ~full
        ends[:, beams:] = False  # the others only replace beams that end
        if released and length == most:
            ends &= is_end  # the others follow below
        divisor = torch.full_like(best, length)
        if prompt_lengths is not None:
            divisor += prompt_lengths[:, None]
        values = best / (divisor - is_end.float() if released else divisor) ** config.length_penalty
        padded = torch.nn.functional.pad(tokens, (0, most - length), value=_filler(config))
        padded_sources = torch.nn.functional.pad(sources, (0, most - length), value=-1)
        after = self._with_answers(values.masked_fill(~ends, -torch.inf), padded, padded_sources, length)

        # Whether to go on.
        never = config.early_stopping == "never" and config.length_penalty > 0
        longest = divisor[:, 0] + (most - length if never else 0)
        attainable = (best if released else scores)[:, 0] / longest**config.length_penalty
        open_items = self.open & (attainable > after.ended_scores.amin(-1))
        if released and length == most:
            unended = ~is_end & ((~is_end).cumsum(-1) <= beams) & open_items[:, None]
            after = after._with_answers(values.masked_fill(~unended, -torch.inf), padded, padded_sources, length)
        all_ended = after.ended_scores.isfinite().all(-1) & (config.early_stopping is True)
        return replace(
            after,
            tokens=_take(tokens, running),
            scores=scores,
            sources=_take(sources, running),
            open=open_items,
            done=~open_items | all_ended | stops.all(-1),
        )

    def _with_answers(self, scores: Tensor, answers: Tensor, sources: Tensor, length: int) -> Beams:
        """Add answers that have ended, (items, more) and twice (items, more, most), and keep only the best."""
        ended_scores, keep = torch.cat([self.ended_scores, scores], dim=1).topk(self.ended_scores.shape[1])
        lengths = torch.cat([self.ended_lengths, torch.full_like(answers[..., 0], length)], dim=1)
        ended = _take(torch.cat([self.ended, answers], dim=1), keep)
        ended_sources = _take(torch.cat([self.ended_sources, sources], dim=1), keep)
        return replace(
            self,
            ended=ended,
            ended_scores=ended_scores,
            ended_lengths=lengths.gather(1, keep),
            ended_sources=ended_sources,
        )

    def mixed(self, items: Tensor, other: Beams, names: Sequence[str] = ()) -> Beams:
        """Return these beams with some items, (items,) bool, as in other beams; only the named fields of these, by default all."""
        changed = {}
        for name in names or [entry.name for entry in fields(self)]:
            own, others = getattr(self, name), getattr(other, name)
            changed[name] = torch.where(items.view(-1, *[1] * (own.ndim - 1)), others, own)
        return replace(self, **changed)


def best_answers(prompt: Prompt, last: Sequence[Beams]) -> GenerateBeamDecoderOnlyOutput | Tensor:
    """Return the prompts with their best answers as transformers does; `last` has the beams of each item at its end."""
    config = prompt.config
    count = config.num_return_sequences
    ended, scores, lengths, sources = (
        torch.stack([getattr(beams, name)[item, :count] for item, beams in enumerate(last)]) for name in ENDED
    )
    prompts = prompt.ids[:: config.num_beams].repeat_interleave(count, dim=0)
    sequences = torch.cat([prompts, ended[..., : int(lengths.max())].flatten(0, 1)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        sequences_scores=scores.flatten(),  # type: ignore[arg-type]
        beam_indices=sources[..., : int(lengths.max())].flatten(0, 1),  # type: ignore[arg-type]
    )


def _take(beams: Tensor, index: Tensor) -> Tensor:
    """(items, a, n), (items, b) -> (items, b, n)"""
    return beams.take_along_dim(index[..., None], dim=1)


def _filler(config: GenerationConfig) -> int:
    return config.pad_token_id or next(iter(end_tokens(config)), 0)
