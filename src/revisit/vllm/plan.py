"""The shape of the model and of the pool, which every process of a vLLM server computes from its configuration.

The API server rejects requests that can never fit, the scheduler makes requests wait for room, and the worker stores the states:
all three count the same blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from revisit import settings
from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.forward.support import check_layer
from revisit.methods.revisit import ReVisiT
from revisit.models.families import resolve_layers, vllm_architectures
from revisit.models.names import Categories
from revisit.models.parts import vision_token_ids
from revisit.models.spelling import Spelling
from revisit.models.thoughts import Thoughts, find_thoughts
from revisit.models.types import Configured, Tokenizer
from revisit.vllm.request import LAYERS_SWITCH, check, kept_layers, parse
from revisit.vllm.reservations import Need

POOL_SWITCH = "REVISIT_VLLM_POOL_MB"
DEVICE_SHARE = 0.1  # of a device's memory that the pool may have by default
CPU_POOL_MB = 1024.0
TOKENS_PER_IMAGE = ("image_seq_length", "mm_tokens_per_image")  # configuration fields of models with a fixed number
BLOCK, LARGEST_BLOCK = 512, 1024  # states of a block, if one layer is stored, and if several are
SMALLEST_BLOCK, FEWEST_BLOCKS = 64, 16  # blocks are smaller in a pool that would have fewer
# Sampling parameters with which vLLM may exclude every plausible token.
EXCLUDING = ("structured_outputs", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
MASKED_LOGIT_GAP = 1e5

Entry = tuple[int, bool]  # a layer whose states are stored, and whether they pass the final norm


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
    more: tuple[int, ...] = ()  # and the one that a floor reads by default
    ranks: int = 1  # of tensor parallelism
    drafts: int = 0  # most candidates of speculative decoding that a step verifies for a request
    caching: bool = False  # whether vLLM has a prefix cache
    tokenizer: Tokenizer | None = None
    thoughts: Thoughts | None = None  # tokens around a thought, if the tokenizer has them
    processors: bool = False  # whether the server has logits processors of its own
    most_rows: int = 0  # requests that the server decodes at a time

    @property
    def collected(self) -> tuple[int, ...]:
        """The layers whose states the server stores, ascending, including the last."""
        return tuple(sorted({*resolve_layers(self.kept, self.depth, self.tied), *self.more, self.depth}))

    def spelling(self, names: Categories) -> Spelling:
        """Return how the tokenizer spells the names that a floor withholds."""
        return find_spelling(self.tokenizer, names)

    @property
    def summary(self) -> str:
        """One line for the server's log: the layers, the memory and the room of the pool."""
        layers = self.collected
        megabytes = self.blocks * self.block * self.width * self.dtype.itemsize / 2**20
        return (
            f"ReVisiT stores vision states of {'layers' if len(layers) > 1 else 'layer'} {', '.join(map(str, layers))} of {self.depth}: "
            f"{megabytes:,.4g} MB in each worker, room for {self.room:,} vision tokens at a time."
        )

    @property
    def room(self) -> int:
        """Vision tokens whose states fit in the pool, if every request needs all collected layers."""
        return self.blocks * self.block // len(self.collected)

    def images(self, tokens: int) -> int:
        """Return the number of images of this many vision tokens that fit in the pool."""
        blocks = self.blocks_for(tokens * len(self.collected))
        return self.blocks // blocks

    def admit(self, extra_args: Mapping[str, object] | None) -> Method | None:
        """Return the method of a request, or None if it is decoded plainly; raise RevisitError if the server does not support it."""
        method = parse(extra_args, self.model)
        if method is None:
            return None
        if isinstance(method, ReVisiT):
            check(method, self.kept)
        if method.floor:
            self.check_floor(method)
        if method.phase != "both" and self.thoughts is None:
            raise RevisitError("revisit: this model's tokenizer has no tokens around thoughts: leave out phase.")
        random = isinstance(method, ReVisiT) and method.select == "random"
        if self.drafts and (random or needs_tokens(method)):
            raise RevisitError(
                "revisit: floor, once, phase and select='random' cannot be used with speculative decoding, where the tokens in front "
                "of a token are not known before they are accepted; leave them out, or use a server without --speculative-config."
            )
        return method

    def check_floor(self, method: Method) -> None:
        """Raise RevisitError if the server cannot withhold a request's names."""
        layer = check_layer(self.model, self.depth, method.floor_layer)
        if layer not in self.collected:
            raise RevisitError(
                f"revisit: floor reads layer {layer}, and this server stores vision states of layers "
                f"{', '.join(map(str, self.collected))}; use floor_layer={self.depth}, or start it with {LAYERS_SWITCH}={layer}."
            )
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            raise RevisitError(
                "revisit: floor needs a tokenizer of transformers, which this server does not have: leave it out."
            )
        self.spelling(method.names)

    def gap(self, params: Any) -> float:
        """Return how far a request's tokens outside the plausible set lie below their logits.

        The distance is infinite, as vLLM's top-p kernel requires, unless something else may exclude the whole set: then the
        excluded tokens are sampled in the model's own order.
        """
        excluding = self.processors or any(getattr(params, name, None) for name in EXCLUDING)
        return MASKED_LOGIT_GAP if excluding else math.inf

    def layers(self, method: Method) -> tuple[int, ...]:
        """Return the layers whose states a method compares."""
        return resolve_layers(method.layers, self.depth, self.tied) if isinstance(method, ReVisiT) else ()

    def entries(self, method: Method) -> tuple[Entry, ...]:
        """Return what a request stores of each vision token: the states that its method reads, then that of its floor."""
        normed = isinstance(method, ReVisiT) and method.norm == "final"
        entries = [(layer, normed and layer != self.depth) for layer in self.layers(method)]
        if method.floor and self.floor_entry(method) not in entries:
            entries.append(self.floor_entry(method))
        return tuple(entries)

    def floor_entry(self, method: Method) -> Entry:
        """Return what the floor of a method reads."""
        return check_layer(self.model, self.depth, method.floor_layer), False

    def positions(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the positions of the vision tokens in a prompt.  -> (N,)"""
        return np.isin(np.asarray(prompt_ids, dtype=np.int64), self.vision_ids).nonzero()[0]

    def blocks_for(self, states: int) -> int:
        """Return the number of blocks for this many states."""
        return -(-states // self.block)

    def need(self, method: Method, request: Any) -> Need | None:
        """Return the room that a request needs, None without an image; raise RevisitError if the pool is smaller.

        States depend on the prompt up to the last vision token, on its images, and on the layers.
        """
        prompt = np.asarray(request.prompt_token_ids or [], dtype=np.int64)
        positions, layers = self.positions(prompt), self.entries(method)
        if not len(positions):
            return None
        tokens, states = len(positions), len(positions) * len(layers)
        if self.blocks_for(states) > self.blocks:
            raise RevisitError(
                f"revisit: the images of this request have {tokens} vision tokens at {len(layers)} layer{'s' * (len(layers) > 1)}, "
                f"{states} states, and this server has room for {self.blocks * self.block}: send smaller or fewer images, leave "
                f'"revisit" out, or start the server with a larger {POOL_SWITCH}.'
            )
        last = int(positions[-1])
        images = [(image.identifier, image.mm_position.offset) for image in request.mm_features or ()]
        images = [(name, offset) for name, offset in images if offset <= last]
        inputs = repr((layers, request.cache_salt, images)).encode() + prompt[: last + 1].tobytes()
        return Need(self.blocks_for(states), last, hashlib.sha256(inputs).digest())


def needs_tokens(method: Method) -> bool:
    """Return whether a step of a method depends on the tokens generated so far."""
    return method.phase != "both" or method.floor > 0 or bool(getattr(method, "once", 0))


@lru_cache(maxsize=8)  # requests may send lists of their own
def find_spelling(tokenizer: Tokenizer, names: Categories) -> Spelling:
    """Return how a tokenizer spells names; raise RevisitError if it cannot."""
    return Spelling(tokenizer, names)


def block_size(image: int | None, layers: int, room: int) -> int:
    """Choose the number of states in a block.

    The last block of a request is read whole, even if nearly empty, so blocks are large only where a request has many states, and
    hold whole images where these have one size.

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
    from vllm.tokenizers import cached_tokenizer_from_config

    model, text = config.model_config, config.model_config.hf_text_config
    check_model(model.architecture)
    depth, tied = int(text.num_hidden_layers), bool(getattr(text, "tie_word_embeddings", False))
    width = int(model.get_hidden_size())
    dtype = torch.float32 if current_platform.is_cpu() else model.dtype  # half precision is slow on CPUs
    generation = model.try_get_generation_config()
    entries = SimpleNamespace(**{name: generation.get(name) for name in ("revisit", "check", "rates")})
    described: Configured = SimpleNamespace(config=model.hf_config, generation_config=entries)
    kept = kept_layers(described)
    more = () if settings.vllm_layers() else (check_layer(described, depth),)
    layers = len({*resolve_layers(kept, depth, tied), *more, depth})  # whose states are stored
    image_sizes = (getattr(model.hf_config, name, None) for name in TOKENS_PER_IMAGE)
    megabytes = settings.vllm_pool_mb()
    if megabytes is None and current_platform.is_cpu():
        megabytes = CPU_POOL_MB
    elif megabytes is None:
        megabytes = DEVICE_SHARE * current_platform.get_device_total_memory() / 2**20
    room = int(megabytes * 2**20 / (width * dtype.itemsize))  # in states
    block = block_size(next((size for size in image_sizes if isinstance(size, int)), None), layers, room)
    if room < block:
        raise RevisitError(
            f"{POOL_SWITCH}={megabytes:g} has no room for {block} vision states of width {width}; make it larger."
        )
    most = config.scheduler_config.max_num_seqs * -(-model.max_model_len * layers // block)
    tokenizer = cached_tokenizer_from_config(model)
    return Plan(
        vision_ids=vision_token_ids(model.hf_config),
        depth=depth,
        tied=tied,
        width=width,
        dtype=dtype,
        blocks=min(most, room // block),
        block=block,
        model=described,
        kept=kept,
        more=more,
        ranks=config.parallel_config.tensor_parallel_size,
        drafts=config.num_speculative_tokens,
        caching=bool(config.cache_config.enable_prefix_caching),
        tokenizer=tokenizer,
        thoughts=tokenizer and find_thoughts(tokenizer, model.hf_config.model_type),
        processors=bool(model.logits_processors),
        most_rows=config.scheduler_config.max_num_seqs,
    )


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
