"""Beam search as transformers does it, for methods that search by a loop of their own.

A `Beams` is one moment of a search and never changes: `step` makes the next one. A method that goes back keeps the moments
that it may return to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from revisit.decoding.loop import Loop
    from revisit.decoding.run import Run

STOPPED = 1e9  # what a beam loses that cannot go on


@dataclass(frozen=True)
class Beams:
    """The beams of every item of a batch, and the answers that have ended."""

    said: Tensor  # (items, beams, n) tokens after the prompt
    scores: Tensor  # (items, beams) sums of log-probabilities
    rows: Tensor  # (items, beams) the row that each beam went on from at the last step
    ended: Tensor  # (items, beams, most) answers that have ended, best first, filled up at the end
    ended_scores: Tensor  # (items, beams) by the length penalty; -inf where there is no answer
    lengths: Tensor  # (items, beams) tokens of the answers that have ended
    open: Tensor  # (items,) whether a beam may still become better than these answers
    over: Tensor  # (items,) whether the search has ended

    @classmethod
    def start(cls, run: Run) -> Beams:
        """The search before its first token."""
        config, device = run.generation_config, run.input_ids.device
        items, beams = len(run.input_ids) // config.num_beams, config.num_beams
        scores = torch.zeros(items, beams, device=device)
        scores[:, 1:] = -STOPPED  # all beams are equal, so the first one alone goes on
        most = config.max_length - run.input_ids.shape[1]
        flags = torch.ones(items, dtype=torch.bool, device=device)
        return cls(
            said=run.input_ids.new_empty(items, beams, 0),
            scores=scores,
            rows=torch.arange(items * beams, device=device).view(items, beams),
            ended=run.input_ids.new_full((items, beams, most), _filler(config)),
            ended_scores=torch.full_like(scores, -torch.inf),
            lengths=run.input_ids.new_zeros(items, beams),
            open=flags,
            over=~flags,
        )

    def ids(self, prompt: Tensor) -> Tensor:
        """The rows as the model sees them.  (rows, T) -> (rows, T + n)"""
        return torch.cat([prompt, self.said.flatten(0, 1)], dim=1)

    def step(self, log_probs: Tensor, run: Run, loop: Loop) -> Beams:
        """The search one token later, by the log-probabilities (rows, V) of that token."""
        config = run.generation_config
        items, beams = self.scores.shape
        totals = (log_probs.view(items, beams, -1) + self.scores[..., None]).flatten(1)  # (items, beams · V)
        kept = min(max(2, 1 + len(_end(config))) * beams, totals.shape[-1])
        best, place = totals.topk(kept)  # (items, kept)
        source, token = place // log_probs.shape[-1], place % log_probs.shape[-1]
        said = torch.cat([_take(self.said, source), token[..., None]], dim=-1)  # (items, kept, n + 1)
        length = said.shape[-1]
        prompts = run.input_ids[::beams].repeat_interleave(kept, dim=0)
        stops = loop.ended(torch.cat([prompts, said.flatten(0, 1)], dim=1)).view(items, kept)

        scores, on = (best - STOPPED * stops).topk(beams)  # (items, beams)
        offsets = torch.arange(items, device=source.device)[:, None] * beams

        full = self.ended_scores.isfinite().all(-1, keepdim=True) & (config.early_stopping is True)
        counts = stops & self.open[:, None] & ~full
        counts[:, beams:] = False  # the others are only there to replace beams that end
        values = (best / length**config.length_penalty).masked_fill(~counts, -torch.inf)
        ended_scores, keep = torch.cat([self.ended_scores, values], dim=1).topk(beams)
        padded = torch.nn.functional.pad(said, (0, self.ended.shape[-1] - length), value=_filler(config))
        lengths = torch.cat([self.lengths, torch.full_like(token, length)], dim=1)

        never = config.early_stopping == "never" and config.length_penalty > 0
        hoped = scores[:, 0] / (self.ended.shape[-1] if never else length) ** config.length_penalty
        still = self.open & (hoped > ended_scores.amin(-1))
        all_ended = ended_scores.isfinite().all(-1) & (config.early_stopping is True)
        return Beams(
            said=_take(said, on),
            scores=scores,
            rows=source.gather(1, on) + offsets,
            ended=_take(torch.cat([self.ended, padded], dim=1), keep),
            ended_scores=ended_scores,
            lengths=lengths.gather(1, keep),
            open=still,
            over=~still | all_ended | stops.all(-1),
        )

    def mixed(self, items: Tensor, other: Beams) -> Beams:
        """This moment with some items (items,) as they are in another one of the same length."""
        return Beams(
            **{
                field.name: torch.where(
                    items.view(-1, *[1] * (getattr(self, field.name).ndim - 1)),
                    getattr(other, field.name),
                    getattr(self, field.name),
                )
                for field in fields(self)
            }
        )

    @staticmethod
    def answers(run: Run, moments: Sequence[Beams]) -> GenerateBeamDecoderOnlyOutput | Tensor:
        """The prompts with their best answers, as transformers returns them; `moments` are where each item's search ended."""
        config, beams = run.generation_config, run.generation_config.num_beams
        count = config.num_return_sequences
        ended, scores, lengths = (
            torch.stack([getattr(moment, name)[item, :count] for item, moment in enumerate(moments)])
            for name in ("ended", "ended_scores", "lengths")
        )
        prompts = run.input_ids[::beams].repeat_interleave(count, dim=0)
        said = ended[..., : int(lengths.max())].flatten(0, 1)
        sequences = torch.cat([prompts, said], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            sequences_scores=scores.flatten(),  # type: ignore[arg-type]
        )


def _take(beams: Tensor, index: Tensor) -> Tensor:
    """(items, a, n), (items, b) -> (items, b, n)"""
    return beams.take_along_dim(index[..., None], dim=1)


def _end(config: GenerationConfig) -> list[int]:
    """The tokens that end an answer."""
    given = config.eos_token_id
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def _filler(config: GenerationConfig) -> int:
    return config.pad_token_id or next(iter(_end(config)), 0)
