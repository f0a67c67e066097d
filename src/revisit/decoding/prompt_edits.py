"""Variants of a prompt: without its image, or with other words after it, in its place, or as the system message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revisit.decoding.run import Run
from revisit.errors import RevisitError
from revisit.hooks.pixels import prompt_inputs
from revisit.models import families
from revisit.models.prompts import Message, render
from revisit.models.types import Processor

# An edited prompt (n,): the columns of the old prompt that stay, and `new_tokens`, which are negative.
Edit = Tensor
# (an item's number, its token ids (n,), which of them are vision tokens (n,)) -> the edit; without padding
EditItem = Callable[[int, Tensor, Tensor], Edit]


def new_tokens(ids: Tensor) -> Edit:
    """Return tokens as a part of an edited prompt.  (n,) -> (n,)"""
    return -1 - ids


def image_span(ids: Tensor, vision: Tensor, boundary: Iterable[int]) -> Tensor:
    """Return the mask of vision tokens and of boundary tokens next to them.  (n,), (n,) -> (n,)"""
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
    """Remove the image."""
    return (~image_span(ids, vision, boundary)).nonzero().squeeze(-1)


def after_image(ids: Tensor, vision: Tensor, boundary: Iterable[int], words: Tensor) -> Edit:
    """Insert words right after the (last) image."""
    span = image_span(ids, vision, boundary).nonzero().squeeze(-1)
    at = int(span[-1]) + 1 if len(span) else 0
    columns = torch.arange(len(ids), device=ids.device)
    return torch.cat([columns[:at], new_tokens(words), columns[at:]])


def with_beginning(ids: Tensor, words: Tensor, system: Tensor, user: Tensor, bos: int | None) -> Edit:
    """Use words as the system message.

    `system` are the tokens up to the first user's turn, with the words in them, and `user` those that open such a turn. If no
    turn is found, or they are empty, the words go to the beginning, after the BOS token.
    """
    at = find_tokens(ids, user)
    if at is None or not len(system):
        at = int(len(ids) > 0 and bos is not None and int(ids[0]) == bos)
        system = torch.cat([ids[:at], words])
    return torch.cat([new_tokens(system), torch.arange(at, len(ids), device=ids.device)])


def find_tokens(ids: Tensor, wanted: Tensor) -> int | None:
    """Return where some tokens first occur in a row, or None.  (n,), (k,)"""
    if not len(wanted) or len(wanted) > len(ids):
        return None
    places = (ids.unfold(0, len(wanted), 1) == wanted).all(-1).nonzero().flatten()
    return int(places[0]) if len(places) else None


def in_place_of_image(vision: Tensor, words: Tensor) -> Edit:
    """Replace the (first) image by words; the tokens around an image stay."""
    at = int(vision.nonzero()[0])
    columns = torch.arange(len(vision), device=vision.device)
    return torch.cat([columns[:at], new_tokens(words), columns[at:][~vision[at:]]])


def edited(run: Run, mask: Tensor, edit_item: EditItem, *, pixels: bool) -> dict[str, Any]:
    """Return the inputs of the prompt with every item that has an image edited, padded on the left.

    Other inputs with one entry per token follow the edit; with `pixels=False`, all other inputs are dropped.
    """
    ids = run.input_ids[:: run.copies]  # (items, T)
    if ids.shape[1] == 0:
        raise RevisitError(
            f"{type(run.method).__name__} rewrites the prompt, which was passed as inputs_embeds: pass input_ids and the image instead."
        )
    inputs = prompt_inputs(run)
    edits = []
    for number, (row, seen, real) in enumerate(
        zip(ids, mask[:: run.copies], run.real_tokens(mask)[:: run.copies], strict=True)
    ):
        columns = real.nonzero().squeeze(-1)
        if bool(seen.any()):
            edit = edit_item(number, row[columns], seen[columns])
            columns = torch.where(edit >= 0, columns[edit.clamp_min(0)], edit)
        edits.append(columns)
    if min(map(len, edits)) == 0:
        raise RevisitError(f"{type(run.method).__name__}: the prompt has no text, only an image; add a question.")
    pad = run.generation_config.pad_token_id
    padding = -1 - pad if isinstance(pad, int) and pad >= 0 else -1
    left = partial(pad_sequence, batch_first=True, padding_side="left")
    source = left(edits, padding_value=padding)  # (items, longest)
    old, column = source >= 0, source.clamp_min(0)
    per_token = {
        name: value.gather(1, column.to(value.device)).where(old.to(value.device), 0)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape == ids.shape
    }
    return {
        **(inputs if pixels else {}),
        **per_token,
        "input_ids": torch.where(old, ids.gather(1, column), -1 - source),
        "attention_mask": left([torch.ones_like(edit) for edit in edits]),
    }


# -- words of a method in a prompt -----------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def image_edges(run: Run) -> tuple[int, ...]:
    """Return the ids of the tokens around an image in this model's prompts; raise RevisitError if they are unknown."""
    family = families.of(run.model.config.model_type)
    if family.image_edges is None:
        raise RevisitError(
            f"{type(run.method).__name__} needs to know which tokens open and close an image in the prompts of "
            f"{type(run.model).__name__}, which are unknown for this family: use another method."
        )
    return tuple(sorted(families.edge_ids(run.processor.tokenizer, family))) if family.image_edges else ()


def prompt_without_image(run: Run, mask: Tensor) -> dict[str, Any]:
    """Return the inputs of the prompt without its image; `mask` are the vision positions (rows, T)."""
    around = image_edges(run)
    return edited(run, mask, lambda _, ids, vision: without_image(ids, vision, around), pixels=False)


def text_ids(run: Run, ids: Sequence[int]) -> Tensor:
    """Return token ids as a tensor (n,); raise RevisitError for one that is outside the vocabulary or marks an image."""
    size = run.model.get_input_embeddings().weight.shape[0]
    for token in ids:
        if not 0 <= token < size or token in run.parts.vision_ids:
            raise RevisitError(
                f"{type(run.method).__name__}: its words contain token {token}, which is not a text token of this model (0 to {size - 1})."
            )
    return run.input_ids.new_tensor(ids)


def word_ids(processor: Processor, words: str) -> tuple[int, ...]:
    """Return the token ids of some words, without special tokens."""
    tokenizer = processor.tokenizer
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RevisitError(f"The processor's tokenizer returns no tokens for {words!r}.")
    return tuple(int(i) for i in ids)


def around_image(
    processor: Processor, words: str, system: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids before and after the image of a request in the processor's chat format.

    Tokens that open and close the image are in neither: they are taken from the prompt that is decoded.
    """
    tokenizer = processor.tokenizer
    placeholder = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None) or "<image>"
    if _has_chat_format(processor):
        content = [{"type": "image"}, {"type": "text", "text": words}]
        turns: list[Message] = [{"role": "user", "content": content}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        text = render(processor, turns)
    else:
        text = f"{placeholder}\n{words}" if system is None else f"{system} {placeholder}\n{words}"
    ids = tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token or "\0"))["input_ids"]
    marks = {tokenizer.convert_tokens_to_ids(placeholder), *families.edge_ids(tokenizer)} - {tokenizer.unk_token_id}
    places = [i for i, token in enumerate(ids) if token in marks]
    if not places:
        raise RevisitError(
            f"The processor's chat format has no {placeholder!r} token for an image, so no request about it can be made: use another "
            "method."
        )
    return tuple(ids[: places[0]]), tuple(ids[places[-1] + 1 :])


def system_turn(processor: Processor, words: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before the first user's turn with words as the system message, and those that open that turn.

    Both are empty if the processor has no chat format, or one without system messages.
    """
    if not _has_chat_format(processor):
        return (), ()
    try:
        plain, _ = around_image(processor, "?")
        with_words, _ = around_image(processor, "?", words)
    except RevisitError as error:
        logger.info("The chat format has no system message (%s).", error)
        return (), ()
    same = 0
    while same < min(len(plain), len(with_words)) and plain[-1 - same] == with_words[-1 - same]:
        same += 1
    if not same or with_words == plain:
        return (), ()
    return with_words[: len(with_words) - same], with_words[len(with_words) - same :]


def space_after_image(processor: Processor) -> bool:
    """Return whether the processor's chat format has white space between an image and the question after it."""
    tokenizer = processor.tokenizer
    _, tail = around_image(processor, "?")
    return bool(str(tokenizer.decode(list(tail)))[:1].isspace())


def _has_chat_format(processor: Processor) -> bool:
    return bool(getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None))


def starts_with_bos(processor: Processor) -> tuple[int, ...]:
    """Return the BOS id if the tokenizer adds it to every text, else nothing."""
    tokenizer = processor.tokenizer
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ()
