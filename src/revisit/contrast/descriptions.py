"""The model's own description of an image, written once per image."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.contrast.pixels import item_digests
from revisit.contrast.prompt_edits import Edit, edited, image_span
from revisit.models.prompts import end_tokens, until_end
from revisit.models.types import Model
from revisit.taps.states import saved_positions, taps_paused

if TYPE_CHECKING:
    from revisit.decoding.run import Run

Tokens = tuple[int, ...]

# model -> what it was asked about which image -> what it wrote; as long as the model lives
_WRITTEN: weakref.WeakKeyDictionary[Model, OrderedDict[object, Tokens]] = weakref.WeakKeyDictionary()
REMEMBERED = 10_000


def descriptions(
    run: Run, mask: Tensor, request: tuple[Tokens, Tokens], around: Iterable[int], length: int
) -> list[Tokens]:
    """Token ids of each item's description, greedily decoded, without its end; () for items without an image."""
    book = _WRITTEN.setdefault(run.model, OrderedDict())
    ends = tuple(sorted(end_tokens(run.generation_config)))
    keys = [(name, request, length, ends) for name in item_digests(run, mask)]
    has_image = mask[:: run.copies].any(-1).tolist()
    if any(key not in book for key, seen in zip(keys, has_image, strict=True) if seen):
        for key, text in zip(keys, _write(run, mask, request, tuple(around), length), strict=True):
            book.setdefault(key, text)
    found = [book[key] if seen else () for key, seen in zip(keys, has_image, strict=True)]
    while len(book) > REMEMBERED:
        book.popitem(last=False)
    return found


def forget(model: Model) -> None:
    """Drop what a model wrote; needed if its weights have changed since."""
    _WRITTEN.pop(model, None)


def _write(
    run: Run, mask: Tensor, request: tuple[Tokens, Tokens], around: tuple[int, ...], length: int
) -> list[Tokens]:
    """Ask for a description of every item's image."""

    def ask(_item: int, ids: Tensor, vision: Tensor) -> Edit:
        columns = image_span(ids, vision, around).nonzero().squeeze(-1)
        image = torch.arange(int(columns[0]), int(columns[-1]) + 1, device=ids.device)
        head, tail = (ids.new_tensor(part) for part in request)
        new = torch.full_like(head, -1), torch.full_like(tail, -1)
        return Edit(torch.cat([head, ids[image], tail]), torch.cat([new[0], image, new[1]]))

    inputs = edited(run, mask, ask, pixels=True)
    given = run.generation_config
    with saved_positions(run.model), taps_paused():  # other methods of a chain have no part in it
        sequences = run.model.generate(
            **inputs,
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            pad_token_id=given.pad_token_id,
            eos_token_id=given.eos_token_id,
            repetition_penalty=1.0,  # plainly, whatever the model's own settings are
            no_repeat_ngram_size=0,
            min_new_tokens=None,
        )
    ends = end_tokens(given)
    rows = (until_end(row, ends) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist())
    return [tuple(row[:-1] if row and row[-1] in ends else row) for row in rows]
