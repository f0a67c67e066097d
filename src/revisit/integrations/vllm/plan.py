"""What every process of a vLLM server agrees on, computed from its configuration alone.

The API server refuses what can never fit, the scheduler lets requests wait for room, and the worker holds the states: all
three count the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from revisit import settings
from revisit.errors import RevisitError
from revisit.integrations.vllm.request import collectable
from revisit.methods.revisit import ReVisiT
from revisit.models.parts import vision_token_ids
from revisit.taps.vision import resolve_layers

POOL_SWITCH = "REVISIT_VLLM_POOL_MB"
# How many tokens an image has, where a configuration says so: then an image fills a block at each layer. Every block costs a copy
# of its row's part of the LM head, so blocks should not be small.
TOKENS_OF_AN_IMAGE = ("image_seq_length", "mm_tokens_per_image")
BLOCK = 256


@dataclass(frozen=True)
class Plan:
    """The model's shape, as far as it matters here, and the size of the pool."""

    vision_ids: tuple[int, ...]
    depth: int  # decoder layers
    tied: bool  # whether the LM head is the embedding
    width: int  # of a hidden state
    dtype: torch.dtype  # of the states in the pool
    blocks: int  # in the pool
    block: int = BLOCK  # states of a block

    def layers(self, method: ReVisiT) -> tuple[int, ...]:
        return resolve_layers(method.layers, self.depth, self.tied)

    def positions(self, prompt_ids: Sequence[int]) -> np.ndarray:
        """Where the vision tokens of a prompt are.  -> (N,)"""
        return np.isin(np.asarray(prompt_ids, dtype=np.int64), self.vision_ids).nonzero()[0]

    def blocks_of(self, method: ReVisiT, prompt_ids: Sequence[int]) -> int:
        """How many blocks of the pool a request needs."""
        return self.blocks_for(len(self.positions(prompt_ids)) * len(self.layers(method)))

    def blocks_for(self, states: int) -> int:
        """How many blocks hold so many states."""
        return -(-states // self.block)

    def check_fit(self, method: ReVisiT, prompt_ids: Sequence[int]) -> None:
        """One clear sentence if a request needs more than the whole pool."""
        if self.blocks_of(method, prompt_ids) <= self.blocks:
            return
        tokens, layers = len(self.positions(prompt_ids)), len(self.layers(method))
        raise RevisitError(
            f"revisit: the images of this request have {tokens} vision tokens at {layers} layer{'s' * (layers > 1)}, "
            f"{tokens * layers} states, and this server has room for {self.blocks * self.block}: send smaller or fewer images, leave "
            f'"revisit" out, or start the server with a larger {POOL_SWITCH}.'
        )


def make_plan(config: Any) -> Plan:
    """The plan of a server, from vLLM's configuration; refuses models whose states would not be seen."""
    from vllm.platforms import current_platform

    from revisit.integrations.vllm import check_model

    check_model(config)
    model, scheduler = config.model_config, config.scheduler_config
    text = model.hf_text_config
    depth, tied = int(text.num_hidden_layers), bool(getattr(text, "tie_word_embeddings", False))
    width = int(model.get_hidden_size())
    dtype = torch.float32 if current_platform.is_cpu() else model.dtype  # half precision is slow on CPUs
    states = len({*resolve_layers(collectable(), depth, tied), depth})  # of one vision token, at most
    declared = (getattr(model.hf_config, name, None) for name in TOKENS_OF_AN_IMAGE)
    block = next((size for size in declared if isinstance(size, int) and 64 <= size <= 1024), BLOCK)
    most = scheduler.max_num_seqs * -(-model.max_model_len * states // block)
    megabytes = settings.vllm_pool_mb()
    blocks = min(most, int(megabytes * 2**20 / (block * width * dtype.itemsize)))
    if not blocks:
        raise RevisitError(
            f"{POOL_SWITCH}={megabytes:g} has no room for {block} vision states of width {width}; make it larger."
        )
    return Plan(vision_token_ids(model.hf_config), depth, tied, width, dtype, blocks, block)
