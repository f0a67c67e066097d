"""OPERA (Huang et al.): beams that lean on one word of their own answer pay for it, and are searched again from there.

1. Every beam's likeliest tokens are candidates. Each is run through the model, to see how its attention in the last layer
   (of each place the most of all heads, normalized) is spread.
2. For each token of the answer, multiply `scale` times the attention that all later tokens pay to it: a column that stays
   large is a word that everything after it leans on. A candidate pays the largest of these products; the first ten tokens
   earn what attention they pay to the image instead.
3. Where all beams have leaned on the same word too often, the search returns to that word and takes other tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.registry import Beams as BeamCount
from revisit.registry import Count, Strength

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation.utils import GenerateOutput
    from typing_extensions import Self

    from revisit.decoding.beams import Beams
    from revisit.decoding.loop import Loop
    from revisit.decoding.run import Run
    from revisit.taps.attention import Call

IMAGE_TOKENS = 10  # tokens of the answer that are judged by their attention to the image, and to which nothing returns
WINDOW = 512  # how far the search may return, and the last token it may return to
SMALL = 1e-7  # what products of columns are multiplied with
OTHERS = -999.0  # the logit of tokens that are not candidates


def column_products(products: Tensor, attention: Tensor, scale: float) -> Tensor:
    """Each column's product with one more row, and a column for the row's own place.  (..., n), (..., n + 1) -> (..., n + 1)"""
    import torch

    # bounded, so that a later 0 makes 0 of it
    return (torch.nn.functional.pad(products, (0, 1), value=1.0) * (scale * attention)).clamp(max=1e30)


def rounded(products: Tensor) -> Tensor:
    """What a candidate would pay for each column; in half precision, as published, where small ones are all 0."""
    return (SMALL * products).half().float()


def first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the last axis and the first place where it is, on every device.  (..., n) -> (...), (...)"""
    import torch

    top = values.amax(-1)
    places = torch.arange(values.shape[-1], device=values.device)
    return top, places.expand_as(values).masked_fill(values < top[..., None], values.shape[-1]).amin(-1)


def most_frequent(values: Tensor) -> Tensor:
    """The most frequent number of the last axis, the smallest of several.  (..., n) -> (...)"""
    counts = (values[..., None] == values[..., None, :]).sum(-1)
    often = counts == counts.amax(-1, keepdim=True)
    return values.masked_fill(~often, 2**62).amin(-1)


class OPERA(Method):
    """Settings of OPERA; the defaults are those of its command lines.

    Args:
        beams: Beams to search with, where the call asks for none (`num_beams`).
        candidates: Tokens that each beam may go on with; each of them takes one forward.
        scale: What attention is multiplied with before products are taken.
        weight: Strength of the penalty.
        threshold: How many steps may lean on the same word before the search returns to it.
    """

    beams: BeamCount = 5
    candidates: Annotated[int, Field(ge=1, le=64)] = 5
    scale: Strength = 50.0
    weight: Strength = 1.0
    threshold: Count = 15

    name = "opera"
    summary = "beams pay for leaning on one word of the answer, and are searched again from there"
    cost = "1 forward and 1 for each candidate, all of them with one row per beam"
    source = "Huang et al., OPERA, arXiv:2311.17911"

    @classmethod
    def fast(cls, **overrides: Any) -> Self:
        """What its documentation calls the more efficient version: one candidate, so only the way back is left of it."""
        return cls(**{"candidates": 1, "threshold": 25, **overrides})

    @property
    def own_beams(self) -> int:
        return self.beams

    def decode(self, run: Run, loop: Loop) -> GenerateOutput | Tensor:
        if not run.beams:
            raise RevisitError("OPERA needs beams: pass num_beams=5, or use revisit.generate, which does.")
        if run.generation_config.do_sample:
            raise RevisitError("OPERA uses beam search and cannot sample: turn sampling off, or use another method.")
        return Search(self, run, loop).answers()


@dataclass(frozen=True)
class Moment:
    """The search before its n-th step: its beams, and their columns' products without the newest token's row."""

    beams: Beams
    products: Tensor  # (rows, n - 1)


class Search:
    """One call. Every item of the batch is searched as it would be alone.

    Items return to different places. The whole batch goes back to the first of these, and the others repeat what they
    chose before until they are where they were.
    """

    def __init__(self, method: OPERA, run: Run, loop: Loop) -> None:
        import torch

        from revisit.decoding.beams import Beams

        self.method, self.run, self.loop = method, run, loop
        self.image = run.find_vision_tokens()  # (rows, T)
        self.has_image = self.image.any(-1)
        self.row: Tensor | None = None  # (rows, columns) the newest position's attention, of the last forward
        run.watch_attention(self._attention_hook, "OPERA")
        self.candidates = min(method.candidates, run.model.config.get_text_config().vocab_size)
        start = Beams.start(run)
        self.items, self.width = start.scores.shape
        self.moments = [Moment(start, self.image.new_empty(len(self.image), 0, dtype=torch.float32))]
        most = start.ended.shape[-1]
        self.leaned_on = torch.full((len(self.image), most), -1, device=self.image.device)  # by step, of each row
        self.next = [0] * self.items  # the step that each item has to take next
        self.returning: list[int | None] = [None] * self.items  # the place it has just returned to
        self.over = [False] * self.items
        self.times: list[dict[int, int]] = [{} for _ in range(self.items)]  # place -> how often it was returned to
        self.refused: list[dict[int, list[Tensor]]] = [{} for _ in range(self.items)]  # place -> beam · V + token

    def answers(self) -> GenerateOutput | Tensor:
        """Search to the end; the prompts and their best answers."""
        from revisit.decoding.beams import Beams

        step = 0
        while not all(self.over):
            self._step(step)
            step = self._move(step)
        return Beams.answers(self.run, [self.moments[step].beams for step in self.next])

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        """Take a step with every item: a new one, again after a return, or the one it took before."""
        import torch

        moment = self.moments[step]
        ids = moment.beams.ids(self.run.input_ids)
        logits = self.run.forward(ids)
        self.vocabulary = logits.shape[-1]
        products = moment.products
        if step:
            products = column_products(products, self._newest()[:, self.image.shape[1] :], self.method.scale)
        chooses = [at == step and place is None for at, place in zip(self.next, self.returning, strict=True)]
        scores, leans = logits, None
        if any(chooses):
            scores, leans = self._judged(step, ids, logits, products)
        self.run.raw = logits.log_softmax(-1)
        for item, place in enumerate(self.returning):
            if place is not None and self.next[item] == step:
                scores = self._without_refused(scores, logits, item, place)
        log_probs = scores.log_softmax(-1)
        self.run.recorder.note_scores(ids, logits, log_probs, acted=self.has_image)
        beams = moment.beams.step(self.loop.scores(ids, log_probs), self.run, self.loop)
        repeats = [at > step for at in self.next]
        if any(repeats):
            beams = beams.mixed(torch.tensor(repeats, device=ids.device), self.moments[step + 1].beams)
        rows = beams.rows.flatten()
        self._decide(step, chooses, leans, beams)
        self.moments[step + 1 :] = [Moment(beams, products[rows]), *self.moments[step + 2 :]]

    def _judged(self, step: int, ids: Tensor, logits: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates' logits after their penalty, all others' far below; which column each item leans on, and whether too often.

        -> (rows, V), (2, items)
        """
        import torch

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
        self.leaned_on[:, step] = of_rows
        column = most_frequent(of_rows.view(self.items, -1))  # (items,)
        before = self.leaned_on[:, : step + 1].view(self.items, self.width, -1)
        often = (before == column[:, None, None]).sum(-1) > self.method.threshold
        often = often.all(-1) & (column >= IMAGE_TOKENS) & self.has_image[:: self.width]
        return torch.where(self.has_image[:, None], scores, logits), torch.stack([column, often])

    def _without_refused(self, scores: Tensor, logits: Tensor, item: int, place: int) -> Tensor:
        """The model's own logits for an item's beams, with what was chosen there before as the least likely.  (rows, V)"""
        import torch

        mine = slice(item * self.width, (item + 1) * self.width)
        refused = torch.cat(self.refused[item][place])
        own = logits[mine].flatten().clone()
        lowest = logits[mine].amin(-1)
        own[refused] = lowest[refused // logits.shape[-1]]
        return torch.cat([scores[: mine.start], own.view(self.width, -1), scores[mine.stop :]])

    def _decide(self, step: int, chooses: list[bool], leans: Tensor | None, beams: Beams) -> None:
        """Where each item goes on: at the next step, or further back."""
        import torch

        facts = beams.over[None].long() if leans is None else torch.cat([beams.over[None], leans])
        over, *rest = facts.tolist()
        for item, at in enumerate(self.next):
            if at != step or self.over[item]:
                continue
            place = None
            if chooses[item] and rest[1][item]:
                place = self._place(item, rest[0][item] + 1, step)
            self.returning[item] = place
            if place is None:
                self.next[item], self.over[item] = step + 1, bool(over[item])
                continue
            back = min(place, step - 1)
            chosen = self.moments[back + 1].beams
            source, token = chosen.rows[item] - item * self.width, chosen.said[item, :, back]
            self.refused[item].setdefault(place, []).append(source * self.vocabulary + token)
            self.refused[item].pop(place + 1, None)
            self.next[item] = back

    def _place(self, item: int, place: int, step: int) -> int | None:
        """The place to return to: this one, or if it was returned to as often as there are candidates, the one before."""
        if place + 1 >= WINDOW or step + 1 - place > WINDOW + 1:
            return None
        for there in (place, place - 1):
            if self.times[item].get(there, 0) < self.method.candidates:
                self.times[item][there] = self.times[item].get(there, 0) + 1
                return there
        return None

    def _move(self, step: int) -> int:
        """Bring the model to the step that comes next."""
        following = min((at for at, over in zip(self.next, self.over, strict=True) if not over), default=step + 1)
        if following == step + 1:
            self.run.reorder(self.moments[following].beams.rows.flatten())
        else:
            self.run.crop(self.run.input_ids.shape[1])
        return following

    # -- attention ------------------------------------------------------------------------------------------------

    def _attention_hook(self, call: Call) -> None:
        if call.layer == self.run.parts.depth - 1:
            most = call.last_attention().amax(1)  # (rows, columns)
            self.row = most / most.sum(-1, keepdim=True)

    def _newest(self) -> Tensor:
        """The attention of the position that was run last.  -> (rows, columns)"""
        row, self.row = self.row, None
        assert row is not None  # each forward leaves one
        return row.to(self.image.device)
