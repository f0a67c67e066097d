"""Where the vision tokens of a prompt are, and their hidden states as the prefill computes them.

Forward hooks keep the vision tokens' states at the chosen layers and nothing else, and are gone once the prefill is over: later
steps run the model exactly as if nobody had looked.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.models.parts import ModelParts, describe
from revisit.taps.hooks import Hooks, normed

# States of images that a KV cache already holds: a later call that reuses the cache never sees them in its prefill.
_OF_CACHE: weakref.WeakKeyDictionary[Any, list[VisionStates]] = weakref.WeakKeyDictionary()


def remember(cache: Any, items: list[VisionStates]) -> None:
    """Tie the vision states of a batch to the KV cache that holds its prompt, for later calls that reuse the cache."""
    _OF_CACHE[cache] = items


def remembered(cache: Any) -> list[VisionStates] | None:
    """The vision states that belong to what a KV cache holds, one per item, if they were kept."""
    return _OF_CACHE.get(cache)


def vision_mask(input_ids: Tensor, vision_ids: Sequence[int]) -> Tensor:
    """True where a prompt position holds a vision token.  (B, T) -> (B, T)"""
    return torch.isin(input_ids, torch.tensor(vision_ids, device=input_ids.device))


def run_lengths(positions: Tensor) -> list[int]:
    """Lengths of the unbroken runs of ascending positions, in order.  (n,)"""
    if not len(positions):
        return []
    breaks = (positions.diff() != 1).nonzero().squeeze(-1) + 1
    return [end - start for start, end in itertools.pairwise([0, *breaks.tolist(), len(positions)])]


@dataclass
class VisionStates:
    """The hidden states of one item's vision tokens: state j·N + i is vision token i at the j-th chosen layer."""

    positions: Tensor  # (N,) absolute positions in the padded prompt, on the CPU
    layers: tuple[int, ...]
    by_layer: dict[int, Tensor] = field(default_factory=dict)  # layer -> (N, d), views of one tensor
    _all: Tensor | None = None  # (|J|, N, d)

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def keep_in(self, buffer: Tensor) -> None:
        """Keep all layers in this (|J|, N, d) tensor."""
        self._all = buffer

    def filled(self, layer: int) -> Tensor:
        """The part (N, d) of the buffer for one layer, which is about to hold its states."""
        assert self._all is not None
        self.by_layer[layer] = self._all[self.layers.index(layer)]
        return self.by_layer[layer]

    def stacked(self) -> Tensor:
        """All states, layer-major.  -> (|J|·N, d)"""
        assert self._all is not None
        assert len(self.by_layer) == len(self.layers)
        return self._all.flatten(0, 1)

    def place(self, state: int) -> tuple[int, int]:
        """(layer, vision token) of a state of `stacked`."""
        j, i = divmod(state, self.tokens)
        return self.layers[j], i


class Capture:
    """Keeps the vision tokens' states at the chosen layers while the first forward of a generate call runs.

    Rows of the batch that are copies of one item (beams, return sequences) share one set of states. The state of the
    last position is kept too: it tells how the model turns states into logits.
    """

    def __init__(
        self,
        parts: ModelParts,
        mask: Tensor,
        layers: tuple[int, ...],
        copies: int,
        stack: ExitStack,
        *,
        final_norm: bool = False,
        cache: Any = None,
    ) -> None:
        self.parts, self.layers, self.copies = parts, layers, copies
        self.length = mask.shape[1]
        self.items = [VisionStates(row.nonzero().squeeze(-1), layers) for row in mask[::copies].cpu()]
        self.last: Tensor | None = None  # (items, d) normed state of the last prompt position
        self.norm = parts.final_norm if final_norm else None
        self.cache = cache
        self.kept = remembered(cache) if cache is not None else None
        self.store: Tensor | None = None  # (items, |J|, N, d), padded to the largest item
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._hooks = Hooks(stack, force_eager=True)
        for layer in layers:
            if layer < parts.depth:
                self._hooks.state(parts, layer, partial(self._keep, layer))
        self._hooks.state(parts, parts.depth, self._keep_last)

    def after_forward(self, model: Any, see: Callable[[Any], None]) -> None:
        """`see` is given what the whole model returns, until the capture is released."""
        self._hooks.output(model, see)

    def release(self) -> None:
        """Remove every hook; the states stay."""
        self._hooks.release()

    @property
    def complete(self) -> bool:
        return self.last is not None

    def _keep_last(self, hidden: Tensor) -> None:
        """The final states, and the last position's of every item; the capture is complete with them."""
        if self.complete:
            return
        if self.parts.depth in self.layers:
            self._keep(self.parts.depth, hidden)
        self.last = hidden[:: self.copies, -1].clone()
        if self.cache is not None:
            remember(self.cache, self.items)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        """Store the vision tokens' part of one layer's (rows, q, d) states; q < T where a cache holds the prompt's start."""
        if self.complete:
            return
        offset = self.length - hidden.shape[1]
        if offset < 0 or hidden.shape[0] != len(self.items) * self.copies:
            raise RevisitError(
                f"The prompt has {self.length} positions × {len(self.items) * self.copies} rows but the decoder ran "
                f"{hidden.shape[1]} × {hidden.shape[0]}: this way of running the model is not supported."
            )
        if self.store is None:
            longest = max(item.tokens for item in self.items)
            shape = (len(self.items), len(self.layers), longest, hidden.shape[-1])
            self.store = torch.zeros(shape, dtype=hidden.dtype, device=self.parts.head.device)
            for item, buffer in zip(self.items, self.store, strict=True):
                item.keep_in(buffer[:, : item.tokens])
        norm = self.norm if layer < self.parts.depth else None
        if offset == 0:
            states = hidden[self._index(hidden.device)]  # (items, N, d), all of them by one kernel
            self.store[:, self.layers.index(layer)] = states if norm is None else normed(norm, states)
            for item in self.items:
                item.filled(layer)
            return
        for number, item in enumerate(self.items):
            new = item.positions[item.positions >= offset]
            states = hidden[number * self.copies, (new - offset).to(hidden.device)]  # (N_new, d), a copy
            states = (states if norm is None else normed(norm, states)).to(self.store.device)
            if len(new) < item.tokens:
                states = torch.cat([self._from_cache(number, layer, item.tokens - len(new)), states])
            item.filled(layer).copy_(states)

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and position of every item's vision tokens, padded by position 0.  -> (items, 1), (items, N)"""
        if device not in self._indices:
            rows = torch.arange(len(self.items))[:, None] * self.copies
            columns = torch.nn.utils.rnn.pad_sequence([item.positions for item in self.items], batch_first=True)
            self._indices[device] = rows.to(device), columns.to(device)
        return self._indices[device]

    def padded(self) -> tuple[Tensor, Tensor]:
        """The states of all items and a mask of what is not padding.  -> (items, |J| · N, d), (items, |J| · N)"""
        assert self.store is not None
        counts = torch.tensor([item.tokens for item in self.items], device=self.store.device)
        inside = torch.arange(self.store.shape[2], device=self.store.device) < counts[:, None]  # (items, N)
        return self.store.flatten(1, 2), inside.repeat(1, len(self.layers))

    def _from_cache(self, number: int, layer: int, count: int) -> Tensor:
        """States of the first `count` vision tokens, which this prefill skipped because the cache holds them."""
        if self.kept is not None and number < len(self.kept):
            old = self.kept[number]
            if layer in old.by_layer and torch.equal(old.positions[:count], self.items[number].positions[:count]):
                return old.by_layer[layer][:count]
        raise RevisitError(
            "The KV cache passed as past_key_values already holds the image, and the hidden states of its vision tokens at layer "
            f"{layer} were not kept with it: start from an empty cache, or reuse a cache that the same method filled with the "
            "same layers on the same prompt."
        )


def no_image(model: Any) -> RevisitError:
    return RevisitError(
        f"There is no image in the prompt: none of its tokens is a vision token of {describe(model)}; pass an image (with its "
        "placeholder in the text, which the processor's chat template writes), or decode plainly with method='greedy'."
    )
