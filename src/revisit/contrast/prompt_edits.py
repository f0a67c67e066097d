"""Variants of a prompt, token by token: without its image, with words after the image, with words in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.contrast.pixels import prompt_inputs
from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.decoding.run import Run


@dataclass(frozen=True)
class Edit:
    """One item's new prompt: its token ids, and the column of the old prompt each comes from (-1: a new token)."""

    ids: Tensor  # (n,)
    source: Tensor  # (n,)


# (an item's number, its token ids (n,), which of them are vision tokens (n,)) -> the edit; without padding
EditItem = Callable[[int, Tensor, Tensor], Edit]


def image_span(ids: Tensor, vision: Tensor, boundary: Iterable[int]) -> Tensor:
    """True at vision tokens and at boundary tokens that touch them.  (n,), (n,) -> (n,)"""
    span = vision.clone()
    edge = torch.isin(ids, torch.tensor(sorted(boundary), dtype=ids.dtype, device=ids.device))
    while True:
        near = torch.zeros_like(span)
        near[1:] |= span[:-1]
        near[:-1] |= span[1:]
        grown = span | (near & edge)
        if torch.equal(grown, span):
            return span
        span = grown


def without_image(ids: Tensor, vision: Tensor, boundary: Iterable[int]) -> Edit:
    """The text alone."""
    keep = (~image_span(ids, vision, boundary)).nonzero().squeeze(-1)
    return Edit(ids[keep], keep)


def after_image(ids: Tensor, vision: Tensor, boundary: Iterable[int], words: Tensor) -> Edit:
    """The prompt with words right after its (last) image."""
    span = image_span(ids, vision, boundary).nonzero().squeeze(-1)
    at = int(span[-1]) + 1 if len(span) else 0
    columns = torch.arange(len(ids), device=ids.device)
    return Edit(
        torch.cat([ids[:at], words, ids[at:]]), torch.cat([columns[:at], torch.full_like(words, -1), columns[at:]])
    )


def with_beginning(ids: Tensor, words: Tensor, system: Tensor, user: Tensor, bos: int | None) -> Edit:
    """The prompt with words in place of its system message.

    `system` are the tokens up to the first user's turn with the words in them, `user` those that open such a turn. Where
    no turn is found, or they are not known, the words go to the beginning, behind the token that opens a text.
    """
    columns = torch.arange(len(ids), device=ids.device)
    at = find_tokens(ids, user)
    if at is None or not len(system):
        at = int(len(ids) > 0 and bos is not None and int(ids[0]) == bos)
        system = torch.cat([ids[:at], words])
    return Edit(torch.cat([system, ids[at:]]), torch.cat([torch.full_like(system, -1), columns[at:]]))


def find_tokens(ids: Tensor, wanted: Tensor) -> int | None:
    """Where some tokens first occur in a row, or None.  (n,), (k,)"""
    if not len(wanted) or len(wanted) > len(ids):
        return None
    places = (ids.unfold(0, len(wanted), 1) == wanted).all(-1).nonzero().flatten()
    return int(places[0]) if len(places) else None


def in_place_of_image(ids: Tensor, vision: Tensor, words: Tensor) -> Edit:
    """The prompt with words where its (first) image was; the tokens around an image stay."""
    at = int(vision.nonzero()[0])
    columns = torch.arange(len(ids), device=ids.device)
    before, after = columns[:at], columns[at:][~vision[at:]]
    return Edit(torch.cat([ids[before], words, ids[after]]), torch.cat([before, torch.full_like(words, -1), after]))


def edited(run: Run, mask: Tensor, edit: EditItem, *, pixels: bool) -> dict[str, Any]:
    """Inputs of the prompt with every item that has an image edited, padded on the left again.

    Everything else that has one entry per token follows the edit; with `pixels=False` nothing else is kept.
    """
    ids = run.input_ids[:: run.copies]  # (items, T)
    if ids.shape[1] == 0:
        raise RevisitError(
            f"{type(run.method).__name__} rewrites the prompt, which was passed as inputs_embeds: pass input_ids and the image instead."
        )
    inputs = prompt_inputs(run)
    vision, valid = mask[:: run.copies], _valid(run, inputs)
    edits = []
    for number in range(len(ids)):
        columns = valid[number].nonzero().squeeze(-1)
        own, seen = ids[number, columns], vision[number, columns]
        made = edit(number, own, seen) if bool(seen.any()) else Edit(own, torch.arange(len(own), device=own.device))
        edits.append(Edit(made.ids, torch.where(made.source >= 0, columns[made.source.clamp_min(0)], -1)))
    longest = max(len(made.ids) for made in edits)
    if min(len(made.ids) for made in edits) == 0:
        raise RevisitError(f"{type(run.method).__name__}: the prompt has no text, only an image; add a question.")
    pad = run.generation_config.pad_token_id
    new = ids.new_full((len(edits), longest), pad if isinstance(pad, int) and pad >= 0 else 0)
    source = ids.new_full((len(edits), longest), -1)
    attention = ids.new_zeros((len(edits), longest))
    for number, made in enumerate(edits):
        new[number, longest - len(made.ids) :] = made.ids
        source[number, longest - len(made.ids) :] = made.source
        attention[number, longest - len(made.ids) :] = 1
    per_token = {
        name: value.gather(1, source.clamp_min(0).to(value.device)).masked_fill(source.to(value.device) < 0, 0)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape == ids.shape
    }
    rest = inputs if pixels else {}
    return {**rest, **per_token, "input_ids": new, "attention_mask": attention}


def _valid(run: Run, inputs: dict[str, Any]) -> Tensor:
    """Which columns of each item are not padding.  -> (items, T)"""
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = run.model_kwargs.get("attention_mask")
        mask = None if mask is None else mask[:: run.copies]
    ids = run.input_ids[:: run.copies]
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device).bool()
