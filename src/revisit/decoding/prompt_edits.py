"""Variants of a prompt: without its image, or with a method's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from revisit.errors import RevisitError
from revisit.forward.pixels import prompt_inputs
from revisit.forward.prompt import Prompt
from revisit.models import families
from revisit.models.prompts import Message, render
from revisit.models.types import Processor

# An edited prompt (n,): columns of the old prompt that are kept, and `new_tokens`, which are negative.
Edit = Tensor
# (an item's number, its token ids (n,), which of them are vision tokens (n,)) -> the edit; without padding
EditItem = Callable[[int, Tensor, Tensor], Edit]


def new_tokens(ids: Tensor) -> Edit:
    """Return tokens as a part of an edited prompt.  (n,) -> (n,)"""
    return -1 - ids


def image_span(ids: Tensor, vision: Tensor, edges: families.Edges) -> Tensor:
    """Return the mask of vision tokens, and of the tokens around and between them.  (n,), (n,) -> (n,)"""
    marks, words = (torch.isin(ids, ids.new_tensor(sorted(part))) for part in edges)
    grown, span = vision, ~vision
    while not torch.equal(grown, span):
        span = grown
        before, after = pad(span[:-1], (1, 0)), pad(span[1:], (0, 1))
        grown = span | ((before | after) & (marks | words))
    kept, span = span, ~span
    while not torch.equal(kept, span):
        span = kept
        before, after = pad(span[:-1], (1, 0)), pad(span[1:], (0, 1))
        kept = span & (~words | vision | (before & after))  # words at its ends are text
    return span


def without_image(ids: Tensor, vision: Tensor, edges: families.Edges) -> Edit:
    """Remove the image."""
    return (~image_span(ids, vision, edges)).nonzero().squeeze(-1)


def edited(prompt: Prompt, edit_item: EditItem, *, pixels: bool) -> dict[str, Any]:
    """Return the inputs of the prompt with every item that has an image edited, padded on the left.

    Other inputs with one entry per token follow the edit; with `pixels=False`, all other inputs are dropped.
    """
    ids = prompt.ids[:: prompt.rows_per_item]  # (items, T)
    if ids.shape[1] == 0:
        raise RevisitError(
            f"{prompt.method} rewrites the prompt, which was passed as inputs_embeds: pass input_ids and the image instead."
        )
    inputs = prompt_inputs(prompt)
    edits = []
    for number, (row, seen, real) in enumerate(
        zip(ids, prompt.vision[:: prompt.rows_per_item], prompt.real[:: prompt.rows_per_item], strict=True)
    ):
        columns = real.nonzero().squeeze(-1)
        if bool(seen.any()):
            edit = edit_item(number, row[columns], seen[columns])
            columns = torch.where(edit >= 0, columns[edit.clamp_min(0)], edit)
        edits.append(columns)
    if min(map(len, edits)) == 0:
        raise RevisitError(f"{prompt.method}: the prompt has no text, only an image; add a question.")
    pad_id = prompt.config.pad_token_id
    padding = -1 - pad_id if isinstance(pad_id, int) and pad_id >= 0 else -1
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    source = pad_left(edits, padding_value=padding)  # (items, longest)
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
        "attention_mask": pad_left([torch.ones_like(edit) for edit in edits]),
    }


# -- a method's words in a prompt ------------------------------------------------------------------------------------


def image_edges(prompt: Prompt) -> families.Edges:
    """Return the tokens around an image in this model's prompts; raise RevisitError if they are unknown."""
    family = families.of(prompt.model.config.model_type)
    edges = families.edges(prompt.processor.tokenizer, family) if family.image_edges else families.Edges()
    if family.image_edges is None or (family.image_edges and not edges.marks):
        raise RevisitError(
            f"{prompt.method} needs the tokens that open and close an image in the prompts of {type(prompt.model).__name__}. They "
            "are not declared for this model family, or its tokenizer does not mark them as special: use another method."
        )
    return edges


def prompt_without_image(prompt: Prompt) -> dict[str, Any]:
    """Return the inputs of the prompt without its image."""
    edges = image_edges(prompt)
    return edited(prompt, lambda _, ids, vision: without_image(ids, vision, edges), pixels=False)


def text_ids(prompt: Prompt, ids: Sequence[int]) -> Tensor:
    """Return token ids as a tensor (n,); raise RevisitError for one that is outside the vocabulary or marks an image."""
    size = prompt.model.get_input_embeddings().weight.shape[0]
    for token in ids:
        if not 0 <= token < size or token in prompt.parts.vision_ids:
            raise RevisitError(
                f"{prompt.method}: its words contain token {token}, which is not a text token of this model (0 to {size - 1})."
            )
    return prompt.ids.new_tensor(ids)


def around_image(
    processor: Processor, family: families.Family, words: str, system: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids before and after the image of a request in the processor's chat format.

    Tokens that open and close the image are in neither: they are taken from the prompt that is decoded.
    """
    tokenizer = processor.tokenizer
    placeholder = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None) or "<image>"
    if has_chat_format(processor):
        content = [{"type": "image"}, {"type": "text", "text": words}]
        turns: list[Message] = [{"role": "user", "content": content}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        text = render(processor, turns)
    else:
        text = f"{placeholder}\n{words}" if system is None else f"{system} {placeholder}\n{words}"
    ids = tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token or "\0"))["input_ids"]
    image = tokenizer.convert_tokens_to_ids(placeholder)
    marks = {image, *families.edges(tokenizer, family).marks} & families.special_ids(tokenizer)
    places = [i for i, token in enumerate(ids) if token in marks and token != tokenizer.unk_token_id]
    if not places:
        raise RevisitError(
            f"Nothing tells an image from text in this model's prompts: its tokenizer has no special token {placeholder!r}, or its chat "
            "format does not write it. So no request about the image can be made: use another method."
        )
    if marks & set(tokenizer(f"{system or ''}{words}")["input_ids"]):
        raise RevisitError(
            f"The sentence {system or words!r} contains a token that marks an image in this model; leave it out."
        )
    return tuple(ids[: places[0]]), tuple(ids[places[-1] + 1 :])


def has_chat_format(processor: Processor) -> bool:
    """Return whether the processor has a chat template."""
    return bool(getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None))
