"""The shape of the model and of the pool, which every process of a vLLM server computes from its configuration.

The API server rejects what can never fit, the scheduler lets requests wait for room, and the worker stores the states: all
three count the same blocks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from revisit import settings
from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.models.families import resolve_layers, vllm_architectures
from revisit.models.parts import vision_token_ids
from revisit.models.types import Configured
from revisit.vllm.request import kept_layers

POOL_SWITCH = "REVISIT_VLLM_POOL_MB"
# Configuration fields with a fixed number of tokens per image; blocks then hold whole images.
TOKENS_OF_AN_IMAGE = ("image_seq_length", "mm_tokens_per_image")
BLOCK, LARGEST_BLOCK = 512, 1024  # states, where one layer is collected, and where several are
SMALLEST_BLOCK, FEWEST_BLOCKS = 64, 16  # blocks are smaller in a pool with fewer
PATIENCE = 64  # requests that may overtake one that waits for room


@dataclass(frozen=True)
class Plan:
    """The shape of the model and the size of the pool."""

    vision_ids: tuple[int, ...]
    depth: int  # decoder layers
    tied: bool  # whether the LM head is the embedding
    width: int  # of a hidden state
    dtype: torch.dtype  # of the states in the pool
    blocks: int  # in the pool
    block: int  # states of a block
    model: Configured  # for recommended settings, see `request.parse`
    kept: str | tuple[int, ...] = "last"  # layers that are stored besides the last
    ranks: int = 1  # of tensor parallelism

    @property
    def summary(self) -> str:
        """What a server stores, in one line for its log."""
        layers = sorted({*resolve_layers(self.kept, self.depth, self.tied), self.depth})
        megabytes = self.blocks * self.block * self.width * self.dtype.itemsize / 2**20
        return (
            f"ReVisiT stores vision states of {'layers' if len(layers) > 1 else 'layer'} {', '.join(map(str, layers))} of {self.depth}: "
            f"{megabytes:,.4g} MB in each worker, room for {self.blocks * self.block // len(layers):,} vision tokens at a time."
        )

    def layers(self, method: ReVisiT) -> tuple[int, ...]:
        return resolve_layers(method.layers, self.depth, self.tied)

    def positions(self, prompt_ids: Sequence[int]) -> np.ndarray:
        """Return the positions of the vision tokens in a prompt.  -> (N,)"""
        return np.isin(np.asarray(prompt_ids, dtype=np.int64), self.vision_ids).nonzero()[0]

    def blocks_of(self, method: ReVisiT, prompt_ids: Sequence[int]) -> int:
        """Return the number of pool blocks that a request needs."""
        return self.blocks_for(len(self.positions(prompt_ids)) * len(self.layers(method)))

    def blocks_for(self, states: int) -> int:
        """Return the number of blocks for this many states."""
        return -(-states // self.block)

    def check_fit(self, method: ReVisiT, prompt_ids: Sequence[int]) -> None:
        """Raise RevisitError if a request needs more than the whole pool."""
        if self.blocks_of(method, prompt_ids) <= self.blocks:
            return
        tokens, layers = len(self.positions(prompt_ids)), len(self.layers(method))
        raise RevisitError(
            f"revisit: the images of this request have {tokens} vision tokens at {layers} layer{'s' * (layers > 1)}, "
            f"{tokens * layers} states, and this server has room for {self.blocks * self.block}: send smaller or fewer images, leave "
            f'"revisit" out, or start the server with a larger {POOL_SWITCH}.'
        )


class Reservations:
    """The requests that have blocks of the pool, and those that wait for some, in the scheduler."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._taken: dict[str, int] = {}  # blocks of each request
        self._waiting: dict[str, int] = {}  # how often each was overtaken

    def forget(self, alive: Container[str]) -> None:
        """Free the blocks of requests that have ended."""
        self._taken = {name: need for name, need in self._taken.items() if name in alive}
        self._waiting = {name: count for name, count in self._waiting.items() if name in alive}

    def take(self, name: str, need: int) -> bool:
        """Reserve blocks and return whether there was room; waiting requests are overtaken at most `PATIENCE` times."""
        if name in self._taken:
            return True
        patient = all(count < PATIENCE for other, count in self._waiting.items() if other != name)
        if not patient or sum(self._taken.values()) + need > self.blocks:
            self._waiting.setdefault(name, 0)
            return False
        self._waiting.pop(name, None)
        self._waiting = {other: count + 1 for other, count in self._waiting.items()}
        self._taken[name] = need
        return True


def block_size(image: int | None, layers: int, room: int) -> int:
    """Choose the number of states in a block.

    For every block, the candidates' rows of the LM head are gathered (written once and read twice), as many bytes as 3 · 64 states
    for 64 candidates; the last block of a request is read whole, even if nearly empty. So blocks are large where a request
    has many states, and hold whole images where these have one size.

    Args:
        image: Vision tokens of an image; None if that varies.
        layers: Number of layers whose states are stored.
        room: States that the pool has room for.
    """
    if image is None or image > LARGEST_BLOCK:
        size = BLOCK if layers == 1 else LARGEST_BLOCK
    else:
        size = max(SMALLEST_BLOCK, image * min(layers, LARGEST_BLOCK // image))
    return min(size, max(SMALLEST_BLOCK, room // FEWEST_BLOCKS))


def make_plan(config: Any) -> Plan:
    """Compute the plan of a server from vLLM's configuration."""
    from vllm.platforms import current_platform

    check_model(config.model_config.architecture)
    model, scheduler = config.model_config, config.scheduler_config
    text = model.hf_text_config
    depth, tied = int(text.num_hidden_layers), bool(getattr(text, "tie_word_embeddings", False))
    width = int(model.get_hidden_size())
    dtype = torch.float32 if current_platform.is_cpu() else model.dtype  # half precision is slow on CPUs
    about = describe(model)
    kept = kept_layers(about)
    states = len({*resolve_layers(kept, depth, tied), depth})  # of one vision token, at most
    declared = (getattr(model.hf_config, name, None) for name in TOKENS_OF_AN_IMAGE)
    megabytes = settings.vllm_pool_mb()
    room = int(megabytes * 2**20 / (width * dtype.itemsize))  # in states
    block = block_size(next((size for size in declared if isinstance(size, int)), None), states, room)
    most = scheduler.max_num_seqs * -(-model.max_model_len * states // block)
    blocks = min(most, room // block)
    if not blocks:
        raise RevisitError(
            f"{POOL_SWITCH}={megabytes:g} has no room for {block} vision states of width {width}; make it larger."
        )
    ranks = config.parallel_config.tensor_parallel_size
    return Plan(vision_token_ids(model.hf_config), depth, tied, width, dtype, blocks, block, about, kept, ranks)


def check_model(architecture: str) -> None:
    """Raise RevisitError unless the model that is about to be loaded is one of our subclasses."""
    from vllm import ModelRegistry

    if architecture not in vllm_architectures():
        raise RevisitError(
            f"ReVisiT's vLLM plug-in supports {', '.join(sorted(vllm_architectures()))}, not {architecture}; disable the plug-in "
            "for this model (REVISIT_VLLM=0)."
        )
    if getattr(ModelRegistry.models[architecture], "module_name", None) != "revisit.vllm.models":
        raise RevisitError(
            f"Another plug-in replaced vLLM's {architecture} after ReVisiT's plug-in, so vision states cannot be "
            "captured; disable the other plug-in (VLLM_PLUGINS=revisit)."
        )


def describe(model_config: Any) -> Configured:
    """Return what recommended settings depend on, from vLLM's configuration of the model."""
    declared = model_config.try_get_generation_config().get("revisit")
    return SimpleNamespace(config=model_config.hf_config, generation_config=SimpleNamespace(revisit=declared))
