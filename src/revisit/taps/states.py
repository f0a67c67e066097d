"""Hidden states of a running model: forward hooks, and the states of the prompt's vision tokens.

Hooks belong to one thread and are gone when the call ends. Those on vision tokens keep their states at the chosen layers and
nothing else, and are removed after the prefill: later steps run the model as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from revisit.errors import RevisitError
from revisit.models.parts import ModelParts, describe
from revisit.models.types import Model

# Is given hidden states (rows, q, d); what it returns, if anything, goes on in their place.
StateHook = Callable[[Tensor], "Tensor | None"]


_here = threading.local()  # .paused: whether this thread's taps are out of action


@contextlib.contextmanager
def taps_paused() -> Iterator[None]:
    """While inside, no tap of this thread sees or changes anything: the model runs as it is."""
    before, _here.paused = paused(), True
    try:
        yield
    finally:
        _here.paused = before


def paused() -> bool:
    """Whether this thread's taps are out of action."""
    return bool(getattr(_here, "paused", False))


class Hooks:
    """Forward hooks that see the forwards of the thread that made them, until released or the stack closes.

    With `force_eager`, compiled code runs as written until then: it would pass the hooks by.
    """

    def __init__(self, stack: ExitStack, *, force_eager: bool = False) -> None:
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        self._eager = force_eager
        if force_eager:
            _FORCE_EAGER.begin()
        stack.callback(self.release)

    def before(self, module: nn.Module, callback: StateHook) -> None:
        """`callback` gets what the module is about to read."""

        def hook(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]] | None:
            if not self._mine():
                return None
            changed = callback(args[0] if args else kwargs["hidden_states"])
            if changed is None:
                return None
            return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, callback: StateHook) -> None:
        """`callback` gets the states that the module returned; what it returns, if anything, takes their place.

        Some networks return the tokens of all rows in one list, and more behind it (the experts of Llama 4).
        """

        def hook(_module: nn.Module, args: tuple[Any, ...], output: object) -> object:
            if not self._mine():
                return None
            states = states_of(output)
            flat = states.ndim == 2 and bool(args) and args[0].ndim == 3
            changed = callback(states.view(args[0].shape) if flat else states)
            if changed is None:
                return None
            changed = changed.flatten(0, 1) if flat else changed
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        self._handles.append(module.register_forward_hook(hook))

    def output(self, module: nn.Module, callback: Callable[[Any], None]) -> None:
        """`callback` gets everything that the module returned."""

        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if self._mine():
                callback(output)

        self._handles.append(module.register_forward_hook(hook))

    def state(self, parts: ModelParts, layer: int, callback: StateHook) -> None:
        """`callback` gets hidden state number `layer`: what decoder layer `layer` reads, or the normed final state.

        That is the layer below's output, with whatever the model adds in between (DeepStack features).
        """
        if layer < parts.depth:

            def checked(hidden: Tensor) -> Tensor | None:
                parts.check_state(layer, hidden)
                return callback(hidden)

            self.before(parts.layers[layer], checked)
        else:
            self.after(parts.decoder, callback)

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread and not paused()

    def release(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._eager:
            self._eager = False
            _FORCE_EAGER.end()


def states_of(output: object) -> Tensor:
    """The hidden states in what a module returned."""
    first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
    assert isinstance(first, Tensor)
    return first


def normed(norm: nn.Module, states: Tensor) -> Tensor:
    """States through a norm that may live on another device; the result is where the norm is."""
    weight = next(norm.parameters(), None)
    return norm(states if weight is None or weight.is_meta else states.to(weight.device))  # type: ignore[no-any-return]


class ForceEager:
    """While at least one user is inside, compiled code runs as written."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), 0
        self.stance: Any = None

    def begin(self) -> None:
        with self.lock:
            self.open += 1
            if self.stance is None and "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled
                self.stance = torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        with self.lock:
            self.open -= 1
            if self.open == 0 and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


_FORCE_EAGER = ForceEager()


STATE = "rope_deltas"  # (rows, 1): how far positions are ahead of, or behind, the number of tokens


@contextlib.contextmanager
def saved_positions(model: Model, *, clear: bool = False) -> Iterator[None]:
    """Give back the position state as it was; `clear` starts without any."""
    kept = [(module, getattr(module, STATE)) for module in model.modules() if hasattr(module, STATE)]
    try:
        if clear:
            for module, _ in kept:
                setattr(module, STATE, None)
        yield
    finally:
        for module, deltas in kept:
            setattr(module, STATE, deltas)


# States of images that a KV cache already holds: a later call that reuses the cache never sees them in its prefill.
_OF_CACHE: weakref.WeakKeyDictionary[Cache, list[VisionStates]] = weakref.WeakKeyDictionary()


def remember(cache: Cache, items: list[VisionStates]) -> None:
    """Tie the vision states of a batch to the KV cache that holds its prompt, for later calls that reuse the cache."""
    _OF_CACHE[cache] = items


def remembered(cache: Cache) -> list[VisionStates] | None:
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
    last position is kept too: it shows how the model turns states into logits.
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
        cache: Cache | None = None,
        ignore: Callable[[], bool] = lambda: False,
    ) -> None:
        self.parts, self.layers, self.copies, self._ignore = parts, layers, copies, ignore
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

    def after_forward(self, model: Model, callback: Callable[[Any], None]) -> None:
        """`callback` gets what the whole model returns, until the capture is released."""
        self._hooks.output(cast("nn.Module", model), callback)

    def release(self) -> None:
        """Remove every hook; the states stay."""
        self._hooks.release()

    @property
    def complete(self) -> bool:
        return self.last is not None

    def _keep_last(self, hidden: Tensor) -> None:
        """The final states, and the last position's of every item; the capture is complete with them."""
        if self.complete or self._ignore():
            return
        if self.parts.depth in self.layers:
            self._keep(self.parts.depth, hidden)
        self.last = hidden[:: self.copies, -1].clone()
        if self.cache is not None:
            remember(self.cache, self.items)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        """Store the vision tokens' part of one layer's (rows, q, d) states; q < T where a cache holds the prompt's start."""
        if self.complete or self._ignore():
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
            states = hidden[self.index(hidden.device)]  # (items, N, d), all of them by one kernel
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

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
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


def no_image(model: Model) -> RevisitError:
    return RevisitError(
        f"There is no image in the prompt: none of its tokens is a vision token of {describe(model)}; pass an image (with its "
        "placeholder in the text, which the processor's chat template writes), or use method='greedy'."
    )
