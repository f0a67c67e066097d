"""Shared by the tests of all methods: prompts with images of different sizes, and every method with its settings."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import families
import revisit
from revisit import Trace, methods
from revisit.decoding.contrastive import Contrastive
from revisit.decoding.method import METHODS as registry
from revisit.decoding.method import Method

FAMILIES = ("llava", "qwen2_5_vl", "internvl")
PROMPTS = (("what is it", 1, (40, 32)), ("describe all of it now please", 2, (56, 28)))
LENGTH = 5

SETTINGS: dict[str, dict[str, Any]] = {  # for small random models and short answers
    "m3id": {"decay": 0.3, "start": 1},
    "code": {"description_tokens": 4},
    "pai": {"gamma": 1.5},
    "deco": {"layers": (1, 2, 3)},
    "flb": {"decay": 1.0},
    "sadt": {"words": tuple("!#$%&'()*+-./0123456789:;<=>?@[]^_`abcdefghijklmnopqrstuvwxyz{|}~")},
    "vista": {"layers": (1, 2, 3)},
    "memvr": {"threshold": 0.8},
    "chain": {"methods": ("vcd", revisit.DoLa(layers=(1, 2)), revisit.ReVisiT())},
}
# All built-in methods except those with tests of their own.
METHODS: dict[str, Method] = {
    name: methods.get(name, **SETTINGS.get(name, {}))
    for name in sorted(registry.built_in)
    if name not in ("greedy", "revisit", "opera", "tcd")
}
CONTRASTIVE = {name: method for name, method in METHODS.items() if isinstance(method, Contrastive)}


@functools.cache
def batch(family: str) -> Any:
    """Return two prompts of different lengths with images of different sizes, padded on the left."""
    return families.inputs(
        family, [text for text, _, _ in PROMPTS], [[families.image(seed, size)] for _, seed, size in PROMPTS]
    )


@functools.cache
def single(family: str, row: int) -> Any:
    text, seed, size = PROMPTS[row]
    return families.inputs(family, [text], [[families.image(seed, size)]])


def decode(family: str, inputs: Any, method: Method | None, **kwargs: Any) -> tuple[Any, Trace]:
    """Decode exactly LENGTH tokens; return the output, with scores and raw logits, and the trace."""
    model, processor = families.build(family)
    trace = Trace(record=True)
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": VOCABULARY, **kwargs}
    torch.manual_seed(0)
    output = revisit.generate(
        model,
        **inputs,
        method="greedy" if method is None else method,
        processor=processor,
        trace=trace,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )
    return output, trace


VOCABULARY = families.VOCAB + 1  # an end token outside the vocabulary, so that every row has the full length


def extended(inputs: Any, tokens: Tensor) -> dict[str, Any]:
    """Append tokens (rows, n) to the prompts."""
    longer = dict(inputs)
    for name, value in (("input_ids", tokens), ("attention_mask", tokens * 0 + 1), ("mm_token_type_ids", tokens * 0)):
        if name in longer:
            longer[name] = torch.cat([longer[name], value.to(longer[name].dtype)], dim=1)
    return longer


def image_tokens(family: str, ids: Tensor) -> Tensor:
    """Return the mask of the vision tokens and of the tokens around them, found by name."""
    model, processor = families.build(family)
    around = {"qwen2_5_vl": ["<|vision_start|>", "<|vision_end|>"], "internvl": ["<img>", "</img>"]}.get(family, [])
    tokens = [model.config.image_token_id, *processor.tokenizer.convert_tokens_to_ids(around)]
    return torch.isin(ids, torch.tensor(tokens))


def text_alone(family: str, inputs: Any) -> dict[str, Any]:
    """Return the prompt without its image and the tokens around it."""
    ids = inputs["input_ids"][:, ~image_tokens(family, inputs["input_ids"])[0]]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """Count the rows of logits, or of states, that a module returns in each of its calls within the context."""
    rows: list[int] = []

    def count(_module: object, _args: object, output: Any) -> None:
        logits = getattr(output, "logits", output)
        rows.append(len(logits) if logits is not output else output.shape[:-1].numel())

    hook = module.register_forward_hook(count)
    try:
        yield rows
    finally:
        hook.remove()


def new_tokens(output: Any, inputs: Any) -> Tensor:
    return output.sequences[:, inputs["input_ids"].shape[1] :]


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], rows: slice = slice(None)) -> None:
    """Check that the scores of every step are within 1e-4, with the same tokens cut."""
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine[rows], other, atol=1e-4, rtol=1e-4)
