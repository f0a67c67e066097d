"""What the tests of all methods share: prompts with pictures of different sizes, and every method ready to run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import families
import revisit
from revisit import (
    APC,
    CODE,
    FLB,
    ICD,
    M3ID,
    ONLY,
    PAI,
    RITUAL,
    SADT,
    SID,
    VAF,
    VCD,
    VISTA,
    AvisC,
    Chain,
    DeCo,
    DoLa,
    MemVR,
    MiddleLayers,
    Trace,
)
from revisit.decoding.method import Method

FAMILIES = ("llava", "qwen2_5_vl", "internvl")
PROMPTS = (("what is it", 1, (40, 32)), ("describe all of it now please", 2, (56, 28)))
LENGTH = 5

CONTRASTIVE: dict[str, Method] = {
    "vcd": VCD(),
    "m3id": M3ID(decay=0.3, start=1),  # strong from the first tokens on
    "code": CODE(description_tokens=4),
    "sid": SID(),
    "icd": ICD(),
    "pai": PAI(gamma=1.5),
    "ritual": RITUAL(),
    "avisc": AvisC(),
}
METHODS: dict[str, Method] = {
    **CONTRASTIVE,
    "dola": DoLa(),
    "deco": DeCo(layers=(1, 2, 3)),
    "apc": APC(),
    "flb": FLB(decay=1.0),
    "middle_layers": MiddleLayers(),
    "vaf": VAF(),
    "sadt": SADT(
        words=tuple("!#$%&'()*+-./0123456789:;<=>?@[]^_`abcdefghijklmnopqrstuvwxyz{|}~")
    ),  # tokens of random models
    "vista": VISTA(layers=(1, 2, 3)),
    "memvr": MemVR(threshold=0.8),
    "only": ONLY(),
    "chain": Chain([VCD(), DoLa(layers=(1, 2)), revisit.ReVisiT()]),
}


@functools.cache
def batch(family: str) -> Any:
    """Two prompts of different lengths with pictures of different sizes, padded on the left."""
    return families.inputs(
        family, [text for text, _, _ in PROMPTS], [[families.picture(seed, size)] for _, seed, size in PROMPTS]
    )


@functools.cache
def single(family: str, row: int) -> Any:
    text, seed, size = PROMPTS[row]
    return families.inputs(family, [text], [[families.picture(seed, size)]])


def decode(family: str, inputs: Any, method: Method | None, **kwargs: Any) -> tuple[Any, Trace]:
    """(output with scores and raw logits, trace) of a decode of exactly LENGTH tokens."""
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


VOCABULARY = families.VOCAB + 1  # an end of text that no model can say: every row runs to the full length


def new_tokens(output: Any, inputs: Any) -> Tensor:
    return output.sequences[:, inputs["input_ids"].shape[1] :]


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], rows: slice = slice(None)) -> None:
    """Scores of every step within 1e-4, with the same tokens cut."""
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine[rows], other, atol=1e-4, rtol=1e-4)
