"""OPERA (Huang et al.): beam search with an over-trust penalty and rollback.

Each candidate is run for its attention in the last layer: the maximum over heads at each position, normalized. For each token
of the answer, `scale` times the attention that all later tokens pay to it is multiplied; the largest product is the candidate's
penalty (the first ten tokens instead gain their attention to the image). When all beams have over-trusted a token too often,
the search rolls back and takes others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateOutput
from typing_extensions import Self

from revisit.decoding.loop import Loop
from revisit.decoding.method import Method
from revisit.decoding.run import Run
from revisit.errors import RevisitError
from revisit.hooks.attention import Call
from revisit.models.prompts import end_tokens
from revisit.registry import Beams as BeamCount
from revisit.registry import Count, Strength

IMAGE_TOKENS = 10  # first tokens of the answer, scored by their attention to the image; never rolled back to
WINDOW = 512  # how far the search may roll back, and the last token it may roll back to
SMALL = 1e-7  # factor of the products
OTHERS = -999.0  # the logit of tokens that are not candidates


def column_products(products: Tensor, attention: Tensor, scale: float) -> Tensor:
    """Multiply the columns' products by one more row, and append the row's own column.  (..., n), (..., n + 1) -> (..., n + 1)"""
    # bounded, so that a later 0 gives 0 and not NaN
    return (torch.nn.functional.pad(products, (0, 1), value=1.0) * (scale * attention)).clamp(max=1e30)


def rounded(products: Tensor) -> Tensor:
    """Return a candidate's penalty for each column; in half precision, as published, which rounds small ones to 0."""
    return (SMALL * products).half().float()


def first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of the last axis and its first place, alike on every device.  (..., n) -> (...), (...)"""
    top = values.amax(-1)
    places = torch.arange(values.shape[-1], device=values.device)
    return top, places.expand_as(values).masked_fill(values < top[..., None], values.shape[-1]).amin(-1)


def most_frequent(values: Tensor) -> Tensor:
    """Return the most frequent number of the last axis, the smallest of several.  (..., n) -> (...)"""
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
    """

    beams: BeamCount = 5
    candidates: Annotated[int, Field(ge=1, le=64)] = 5
    scale: Strength = 50.0
    weight: Strength = 1.0
    threshold: Count = 15
    scorer: Literal["current", "released"] = "current"

    name = "opera"
    summary = "beam search with an over-trust penalty and rollback"
    cost = "1 forward and 1 for each candidate, all of them with one row per beam"
    source = "Huang et al., OPERA, arXiv:2311.17911"
    released: ClassVar[dict[str, Any]] = {"scorer": "released"}
    changes_forward = True

    @classmethod
    def fast(cls, **overrides: Any) -> Self:
        """Return what its documentation calls the more efficient version: one candidate, so only the rollback is left."""
        return cls.official(**{"candidates": 1, "threshold": 25, **overrides})

    @property
    def own_beams(self) -> int:
        return self.beams

    def decode(self, run: Run, loop: Loop) -> GenerateOutput | Tensor:
        if run.generation_config.do_sample:
            raise RevisitError("OPERA uses beam search and cannot sample: turn sampling off, or use another method.")
        return Search(self, run, loop).answers()


@dataclass(frozen=True)
class Moment:
    """The search before its n-th step: its beams, and the products of their columns without the newest token's row."""

    beams: Beams
    products: Tensor  # (rows, n - 1)


@dataclass
class ItemSearch:
    """The state of the search for one item of the batch; a column is a token of the answer that others attend to."""

    next: int = 0  # the next step
    over: bool = False
    returning: int | None = None  # the column that it has just rolled back to
    returned: int | None = None  # the step that it last rolled back to
    times: dict[int, int] = field(default_factory=dict)  # column -> number of rollbacks to it
    excluded: dict[int, list[Tensor]] = field(default_factory=dict)  # column -> choices: beam · V + token


class Search:
    """The search of one call, in which every item of the batch is searched as it would be alone.

    Items roll back to different places. The whole batch steps back to the first of these, and the other items repeat their
    choices up to their own place.
    """

    def __init__(self, method: OPERA, run: Run, loop: Loop) -> None:
        self.method, self.run, self.loop = method, run, loop
        self.image = run.find_vision_tokens()  # (rows, T)
        self.has_image = self.image.any(-1)
        self.row: Tensor | None = None  # (rows, columns) the newest position's attention, of the last forward
        run.watch_attention(self._attention_hook, "OPERA")
        self.candidates = min(method.candidates, run.model.config.get_text_config().vocab_size)
        start = Beams.start(run, self._prompt_lengths() if method.scorer == "released" else None)
        count, self.width = start.scores.shape
        self.items = [ItemSearch() for _ in range(count)]
        self.moments = [Moment(start, self.image.new_empty(len(self.image), 0, dtype=torch.float32))]
        most = start.ended.shape[-1]
        self.trusted = torch.full((len(self.image), most), -1, device=self.image.device)  # (rows, steps) column

    def answers(self) -> GenerateOutput | Tensor:
        """Search to the end, and return the prompts with their best answers."""
        step = 0
        while not all(item.over for item in self.items):
            self._step(step)
            step = self._move(step)
        return Beams.answers(self.run, [self.moments[item.next].beams for item in self.items])

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        """Take one step of every item: a new one, one after a rollback, or a repeated one."""
        moment = self.moments[step]
        ids = moment.beams.ids(self.run.input_ids)
        logits = self.run.forward(ids)
        self.vocabulary = logits.shape[-1]
        products = moment.products
        if step:
            products = column_products(products, self._newest()[:, self.image.shape[1] :], self.method.scale)
        chooses = [item.next == step and item.returning is None for item in self.items]
        scores, trusts = logits, None
        if any(chooses):
            scores, trusts = self._penalized(step, ids, logits, products)
        self.run.raw = logits.log_softmax(-1)
        for number, item in enumerate(self.items):
            if item.returning is not None and item.next == step:
                scores = self._without_excluded(scores, logits, number, item.excluded[item.returning])
        log_probs = scores.log_softmax(-1)
        self.run.recorder.note_scores(ids, logits, log_probs, acted=self.has_image)
        beams = moment.beams.step(self.loop.scores(ids, log_probs), self.run, self.loop)
        repeats = [item.next > step for item in self.items]
        if any(repeats):
            beams = beams.mixed(torch.tensor(repeats, device=ids.device), self.moments[step + 1].beams)
        rows = beams.rows.flatten()
        self._decide(step, chooses, trusts, beams)
        self.moments[step + 1 :] = [Moment(beams, products[rows]), *self.moments[step + 2 :]]

    def _penalized(self, step: int, ids: Tensor, logits: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates' logits after their penalty, all others far below; and the column that each item over-trusts, and
        whether too often.

        -> (rows, V), (2, items)
        """
        length = self.image.shape[1]
        best, tokens = logits.topk(self.candidates)  # (rows, candidates)
        rows = []
        for token in tokens.T:
            self.run.forward(torch.cat([ids, token[:, None]], dim=1))
            self.run.crop(ids.shape[1])
            rows.append(self._newest())
        attention = torch.stack(rows, dim=1)  # (rows, candidates, T + n + 1)
        largest, columns = first_largest(
            rounded(
                column_products(products[:, None].expand(-1, len(rows), -1), attention[..., length:], self.method.scale)
            )
        )
        at_image = (attention[..., :length] * self.image[:, None]).sum(-1)
        penalty = -at_image if step < IMAGE_TOKENS else largest
        scores = torch.full_like(logits, OTHERS).scatter(1, tokens, best - self.method.weight * penalty)
        of_rows = most_frequent(columns)  # (rows,)
        self.trusted[:, step] = of_rows
        column = most_frequent(of_rows.view(-1, self.width))  # (items,)
        before = self.trusted[:, : step + 1].view(len(self.items), self.width, -1)
        often = (before == column[:, None, None]).sum(-1) > self.method.threshold
        often = often.all(-1) & (column >= IMAGE_TOKENS) & self.has_image[:: self.width]
        return torch.where(self.has_image[:, None], scores, logits), torch.stack([column, often])

    def _without_excluded(self, scores: Tensor, logits: Tensor, number: int, choices: list[Tensor]) -> Tensor:
        """Use the model's own logits for an item's beams, with its earlier choices as the least likely tokens.  (rows, V)"""
        mine = slice(number * self.width, (number + 1) * self.width)
        excluded = torch.cat(choices)
        own = logits[mine].flatten().clone()
        lowest = logits[mine].amin(-1)
        own[excluded] = lowest[excluded // logits.shape[-1]]
        return torch.cat([scores[: mine.start], own.view(self.width, -1), scores[mine.stop :]])

    def _decide(self, step: int, chooses: list[bool], trusts: Tensor | None, beams: Beams) -> None:
        """Decide where each item continues: at the next step, or at an earlier one."""
        facts = beams.over[None].long() if trusts is None else torch.cat([beams.over[None], trusts])
        over, *trusted = (
            facts.tolist()
        )  # of each item: over, and after a choice its column and whether it was trusted too often
        for number, item in enumerate(self.items):
            if item.next != step or item.over:
                continue
            item.returning = None
            if chooses[number] and trusted[1][number]:
                item.returning = self._target(number, trusted[0][number] + 1, step)
            if item.returning is None:
                item.next, item.over = step + 1, bool(over[number])
                continue
            item.next = min(item.returning, step - 1)
            chosen = self.moments[item.next + 1].beams
            source, token = chosen.rows[number] - number * self.width, chosen.tokens[number, :, item.next]
            item.excluded.setdefault(item.returning, []).append(source * self.vocabulary + token)
            item.excluded.pop(item.returning + 1, None)
            if self.method.scorer == "released":
                self._keep_ended(number, item, step)

    def _keep_ended(self, number: int, item: ItemSearch, step: int) -> None:
        """Keep the answers that ended since an item's last rollback for the next one to the same step, as the released program does."""
        last, item.returned = item.returned, item.next
        if last is None or last > item.next:
            return
        moment, newest = self.moments[last], self.moments[step].beams
        mine = torch.arange(len(self.items), device=self.image.device) == number
        ended = {name: _mixed(mine, moment.beams, newest, name) for name in ENDED}
        self.moments[last] = replace(moment, beams=replace(moment.beams, **ended))

    def _target(self, number: int, column: int, step: int) -> int | None:
        """Return the column to roll back to: this one, or the one before if all candidates were tried here; None for neither."""
        if column + 1 >= WINDOW or step + 1 - column > WINDOW + 1:
            return None
        times = self.items[number].times
        for target in (column, column - 1):
            if times.get(target, 0) < self.method.candidates:
                times[target] = times.get(target, 0) + 1
                return target
        return None

    def _move(self, step: int) -> int:
        """Bring the model to the next step."""
        following = min((item.next for item in self.items if not item.over), default=step + 1)
        if following == step + 1:
            self.run.reorder(self.moments[following].beams.rows.flatten())
        else:
            self.run.crop(self.run.input_ids.shape[1])
        return following

    def _prompt_lengths(self) -> Tensor:
        """Return the length of each item's prompt, with each image as one token.  -> (items,)"""
        text = self.run.real_tokens(self.image) & ~self.image
        first = self.image & ~torch.nn.functional.pad(self.image, (1, 0))[:, :-1]
        return (text | first).sum(-1)[:: self.run.generation_config.num_beams]

    # -- attention ------------------------------------------------------------------------------------------------

    def _attention_hook(self, call: Call) -> None:
        if call.layer == self.run.parts.depth - 1:
            most = call.last_attention().amax(1)  # (rows, columns)
            self.row = most / most.sum(-1, keepdim=True)

    def _newest(self) -> Tensor:
        """Return the attention of the position that was run last.  -> (rows, columns)"""
        row, self.row = self.row, None
        assert row is not None
        return row.to(self.image.device)


# -- beam search as in transformers ----------------------------------------------------------------------------------

ENDED = ("ended", "ended_scores", "lengths")
MIXED = ("tokens", "scores", "rows", "open", "over", *ENDED)
STOPPED = 1e9  # subtracted from the scores of beams that cannot continue


@dataclass(frozen=True)
class Beams:
    """One moment of a beam search: the beams of every item of a batch, and the answers that have ended.

    It never changes; `step` returns the next moment, so that a search can return to an earlier one.
    """

    tokens: Tensor  # (items, beams, n) after the prompt
    scores: Tensor  # (items, beams) sums of log-probabilities
    rows: Tensor  # (items, beams) the row that each beam continued at the last step
    ended: Tensor  # (items, beams, most) answers that have ended, best first, filled up at the end
    ended_scores: Tensor  # (items, beams) by the length penalty; -inf where there is no answer
    lengths: Tensor  # (items, beams) tokens of the answers that have ended
    open: Tensor  # (items,) whether a beam may still become better than these answers
    over: Tensor  # (items,) whether the search has ended
    prompts: Tensor | None = None  # (items,) lengths that count in an answer's score, for transformers 4.29's scorer

    @classmethod
    def start(cls, run: Run, prompts: Tensor | None = None) -> Beams:
        """Return the search before its first token."""
        config, device = run.generation_config, run.input_ids.device
        items, beams = len(run.input_ids) // config.num_beams, config.num_beams
        scores = torch.zeros(items, beams, device=device)
        scores[:, 1:] = -STOPPED  # all beams are equal, so only the first continues
        most = config.max_length - run.input_ids.shape[1]
        flags = torch.ones(items, dtype=torch.bool, device=device)
        return cls(
            tokens=run.input_ids.new_empty(items, beams, 0),
            scores=scores,
            rows=torch.arange(items * beams, device=device).view(items, beams),
            ended=run.input_ids.new_full((items, beams, most), _filler(config)),
            ended_scores=torch.full_like(scores, -torch.inf),
            lengths=run.input_ids.new_zeros(items, beams),
            open=flags,
            over=~flags,
            prompts=prompts,
        )

    def ids(self, prompt: Tensor) -> Tensor:
        """Return the rows with their prompts.  (rows, T) -> (rows, T + n)"""
        return torch.cat([prompt, self.tokens.flatten(0, 1)], dim=1)

    def step(self, log_probs: Tensor, run: Run, loop: Loop) -> Beams:
        """Return the search one token later, by the log-probabilities (rows, V) of that token."""
        config = run.generation_config
        items, beams = self.scores.shape
        totals = (log_probs.view(items, beams, -1) + self.scores[..., None]).flatten(1)  # (items, beams · V)
        kept = min(max(2, 1 + len(end_tokens(config))) * beams, totals.shape[-1])
        best, place = totals.topk(kept)  # (items, kept)
        source, token = place // log_probs.shape[-1], place % log_probs.shape[-1]
        tokens = torch.cat([_take(self.tokens, source), token[..., None]], dim=-1)  # (items, kept, n + 1)
        length = tokens.shape[-1]
        prompts = run.input_ids[::beams].repeat_interleave(kept, dim=0)
        stops = loop.ended(torch.cat([prompts, tokens.flatten(0, 1)], dim=1)).view(items, kept)

        scores, on = (best - STOPPED * stops).topk(beams)  # (items, beams)
        offsets = torch.arange(items, device=source.device)[:, None] * beams

        is_end = torch.zeros_like(token, dtype=torch.bool)  # (items, kept)
        for end in end_tokens(config):  # a tensor of them would have to be copied to the device
            is_end |= token == end
        most, released = self.ended.shape[-1], self.prompts is not None
        full = self.ended_scores.isfinite().all(-1, keepdim=True) & (config.early_stopping is True)
        counts = stops & self.open[:, None] & ~full
        counts[:, beams:] = False  # the others only replace beams that end
        divisor = torch.full_like(best, length)
        if self.prompts is not None:
            divisor += self.prompts[:, None]
            if length == most:
                counts &= is_end  # the others follow below
        values = best / (divisor - is_end.float() if released else divisor) ** config.length_penalty
        padded = torch.nn.functional.pad(tokens, (0, most - length), value=_filler(config))
        ended = self._with(values.masked_fill(~counts, -torch.inf), padded, length)

        never = config.early_stopping == "never" and config.length_penalty > 0
        reached = divisor[:, 0] + (most - length if never else 0)
        hoped = (best if released else scores)[:, 0] / reached**config.length_penalty
        still = self.open & (hoped > ended.ended_scores.amin(-1))
        if released and length == most:
            unended = ~is_end & ((~is_end).cumsum(-1) <= beams) & still[:, None]
            ended = ended._with(values.masked_fill(~unended, -torch.inf), padded, length)
        all_ended = ended.ended_scores.isfinite().all(-1) & (config.early_stopping is True)
        return replace(
            ended,
            tokens=_take(tokens, on),
            scores=scores,
            rows=source.gather(1, on) + offsets,
            open=still,
            over=~still | all_ended | stops.all(-1),
        )

    def _with(self, scores: Tensor, answers: Tensor, length: int) -> Beams:
        """Return this moment with more answers that have ended, (items, more) and (items, more, most); only the best are kept."""
        ended_scores, keep = torch.cat([self.ended_scores, scores], dim=1).topk(self.ended_scores.shape[1])
        lengths = torch.cat([self.lengths, torch.full_like(answers[..., 0], length)], dim=1)
        ended = _take(torch.cat([self.ended, answers], dim=1), keep)
        return replace(self, ended=ended, ended_scores=ended_scores, lengths=lengths.gather(1, keep))

    def mixed(self, items: Tensor, other: Beams) -> Beams:
        """Return this moment with some items (items,) as in another moment of the same length."""
        return replace(self, **{name: _mixed(items, self, other, name) for name in MIXED})

    @staticmethod
    def answers(run: Run, moments: Sequence[Beams]) -> GenerateBeamDecoderOnlyOutput | Tensor:
        """Return the prompts with their best answers as transformers does; `moments` has the last one of each item."""
        config, beams = run.generation_config, run.generation_config.num_beams
        count = config.num_return_sequences
        ended, scores, lengths = (
            torch.stack([getattr(moment, name)[item, :count] for item, moment in enumerate(moments)])
            for name in ("ended", "ended_scores", "lengths")
        )
        prompts = run.input_ids[::beams].repeat_interleave(count, dim=0)
        tokens = ended[..., : int(lengths.max())].flatten(0, 1)
        sequences = torch.cat([prompts, tokens], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            sequences_scores=scores.flatten(),  # type: ignore[arg-type]
        )


def _mixed(items: Tensor, own: Beams, other: Beams, name: str) -> Tensor:
    """Return a field of one moment, for some items (items,) that of another."""
    a, b = getattr(own, name), getattr(other, name)
    return torch.where(items.view(-1, *[1] * (a.ndim - 1)), b, a)


def _take(beams: Tensor, index: Tensor) -> Tensor:
    """(items, a, n), (items, b) -> (items, b, n)"""
    return beams.take_along_dim(index[..., None], dim=1)


def _filler(config: GenerationConfig) -> int:
    return config.pad_token_id or next(iter(end_tokens(config)), 0)
