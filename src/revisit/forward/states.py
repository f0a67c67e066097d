"""Hidden states of a running model: forward hooks, the states of the prompt's vision tokens, and teacher forcing.

Hooks act in one thread and are removed when the call ends. Those that capture vision tokens keep only the chosen layers, and
are removed after the prefill, so that later steps run the model without hooks.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from revisit.errors import RevisitError
from revisit.models.head import Head, head_device
from revisit.models.parts import ModelParts, describe
from revisit.models.types import Arguments, Model

# Called with hidden states (rows, q, d); its result, unless None, replaces them.
StateHook = Callable[[Tensor], "Tensor | None"]

_thread_state = threading.local()  # .paused: whether hooks are paused; .call: the call of generate that runs


@contextlib.contextmanager
def hooks_paused() -> Iterator[None]:
    """Pause the hooks of this thread within the context."""
    before, _thread_state.paused = paused(), True
    try:
        yield
    finally:
        _thread_state.paused = before


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Keep hooks of an outer call from acting within the context: a call of generate, or code of the user's within one."""
    before, _thread_state.call = current_call(), object()
    try:
        yield
    finally:
        _thread_state.call = before


@contextlib.contextmanager
def outside_calls(model: Model) -> Iterator[None]:
    """Run the model as if no call of generate ran in this thread; one that does continues afterwards as before."""
    before, _thread_state.call = current_call(), None
    try:
        with saved_positions(model):
            yield
    finally:
        _thread_state.call = before


def current_call() -> object | None:
    """Return what stands for the call of generate that runs in this thread; None outside any."""
    return getattr(_thread_state, "call", None)


def paused() -> bool:
    """Return whether hooks are paused in this thread."""
    return bool(getattr(_thread_state, "paused", False))


@dataclass
class Pass:
    """One of the forward passes that run at each step of a call: the main one, or one that is contrasted with it.

    Several passes may share a forward of the model, as rows of one batch.
    """

    live: slice | None  # its rows in the running forward; None if the forward does not contain it
    shift: int = 0  # columns of padding before its prompt in the KV cache

    def of(self, values: Tensor) -> Tensor:
        """Return the rows of this pass.  (all rows, ...) -> (rows, ...)"""
        return values if self.live is None or len(values) == self.live.stop - self.live.start else values[self.live]

    def put(self, values: Tensor, own: Tensor) -> Tensor:
        """Return values with the rows of this pass replaced.  (all rows, ...), (rows, ...) -> (all rows, ...)"""
        if self.live is None or len(values) <= self.live.stop - self.live.start:
            return own
        return torch.cat([values[: self.live.start], own, values[self.live.stop :]])


ALL_ROWS = Pass(slice(0, sys.maxsize))  # of every forward


class Hooks:
    """Forward hooks that act in the thread and the call that created them, until they are released or the stack closes.

    With `of`, they act in forwards that contain this pass, and get its rows only. Compiled code, which would bypass them, is disabled
    until then.
    """

    def __init__(self, stack: ExitStack, *, of: Pass = ALL_ROWS) -> None:
        self._of = of
        self._thread, self._in = threading.get_ident(), current_call()
        self._own = stack.enter_context(ExitStack())
        self._own.enter_context(FORCE_EAGER)

    def before(self, module: nn.Module, callback: StateHook, *, first: bool = False) -> None:
        """Call `callback` with the module's input, which its result replaces; `first` runs it before hooks that are there already."""

        def hook(
            _module: nn.Module, args: tuple[Any, ...], kwargs: Arguments
        ) -> tuple[tuple[object, ...], Arguments] | None:
            changed = self._call(callback, args[0] if args else kwargs["hidden_states"])
            if changed is None:
                return None
            return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

        self._own.callback(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first).remove)

    def after(self, module: nn.Module, callback: StateHook) -> None:
        """Call `callback` with the states that the module returned, which its result replaces.

        Some networks return the tokens of all rows in one dimension, and further outputs (the experts of Llama 4).
        """

        def hook(_module: nn.Module, args: tuple[Any, ...], output: object) -> object:
            states: Any = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            flat = states.ndim == 2 and bool(args) and args[0].ndim == 3
            changed = self._call(callback, states.view(args[0].shape) if flat else states)
            if changed is None:
                return None
            if hasattr(output, "last_hidden_state"):
                output.last_hidden_state = changed
                return output
            changed = changed.flatten(0, 1) if flat else changed
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        self._own.callback(module.register_forward_hook(hook).remove)

    def output(self, module: nn.Module, callback: Callable[[Any], None]) -> None:
        """Call `callback` with everything that the module returned."""

        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if self._applies():
                callback(output)

        self._own.callback(module.register_forward_hook(hook).remove)

    def state(self, parts: ModelParts, layer: int, callback: StateHook) -> None:
        """Call `callback` with hidden state number `layer`: the input of decoder layer `layer`, or the normed final state.

        It is the output of the previous layer plus anything the model adds in between (DeepStack features).
        """
        if layer < parts.depth:

            def checked(hidden: Tensor) -> Tensor | None:
                parts.check_state(layer, hidden)
                return callback(hidden)

            self.before(parts.layers[layer], checked)
        else:
            self.after(parts.decoder, callback)

    def every_position(self, decoder: nn.Module, callback: Callable[[int], None] = lambda _: None) -> None:
        """Make every decoder layer run for every position, and call `callback` with the number of positions before each forward.

        Otherwise Gemma 4 runs the layers that reuse keys and values for the last position only (transformers 5.23).
        """

        def hook(
            _module: nn.Module, args: tuple[object, ...], kwargs: Arguments
        ) -> tuple[tuple[object, ...], Arguments] | None:
            if not self._applies():
                return None
            embeds = kwargs.get("inputs_embeds")
            tokens: Any = kwargs.get("input_ids", *args[:1]) if embeds is None else embeds
            callback(tokens.shape[1])
            return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}

        self._own.callback(decoder.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _call(self, callback: StateHook, states: Tensor) -> Tensor | None:
        changed = callback(self._of.of(states)) if self._applies() else None
        return None if changed is None else self._of.put(states, changed)

    def _applies(self) -> bool:
        own = threading.get_ident() == self._thread and self._in in (None, current_call())
        return own and self._of.live is not None and not paused()

    def release(self) -> None:
        """Remove every hook."""
        self._own.close()


def normed(norm: nn.Module, states: Tensor) -> Tensor:
    """Apply a norm that may be on another device; the result is on the norm's device."""
    weight = next(norm.parameters(), None)
    return norm(states if weight is None or weight.is_meta else states.to(weight.device))  # type: ignore[no-any-return]


class ForceEager:
    """A context in which compiled code is disabled, in all threads and until the last one leaves it."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), 0
        self.stance: Any = None

    def __enter__(self) -> None:
        with self.lock:
            self.open += 1
            if self.stance is None and "torch._dynamo" in sys.modules:  # otherwise nothing was compiled
                self.stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.open -= 1
            if self.open == 0 and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


FORCE_EAGER = ForceEager()


POSITION_STATE = "rope_deltas"  # (rows, 1): difference between positions and the number of tokens


@contextlib.contextmanager
def saved_positions(model: Model, *, clear: bool = False) -> Iterator[None]:
    """Restore the model's position state after the context; `clear` starts without any."""
    kept = [(module, getattr(module, POSITION_STATE)) for module in model.modules() if hasattr(module, POSITION_STATE)]
    try:
        if clear:
            for module, _ in kept:
                setattr(module, POSITION_STATE, None)
        yield
    finally:
        for module, deltas in kept:
            setattr(module, POSITION_STATE, deltas)


# Vision states of the prompts in KV caches: a later call that reuses a cache does not compute them in its prefill.
_STATES_OF_CACHE: weakref.WeakKeyDictionary[Cache, dict[tuple[int, ...], list[VisionStates]]] = (
    weakref.WeakKeyDictionary()
)


def run_lengths(positions: Tensor) -> list[int]:
    """Return the lengths of the unbroken runs of ascending positions, in order.  (n,)"""
    if not len(positions):
        return []
    breaks = (positions.diff() != 1).nonzero().squeeze(-1) + 1
    return [end - start for start, end in itertools.pairwise([0, *breaks.tolist(), len(positions)])]


@dataclass
class VisionStates:
    """The hidden states of one item's vision tokens: state j·stride + i is vision token i at the j-th chosen layer."""

    positions: Tensor  # (N,) absolute positions in the padded prompt, on the CPU
    layers: tuple[int, ...]
    stride: int  # the most vision tokens of an item in the batch
    by_layer: dict[int, Tensor] = field(default_factory=dict)  # layer -> (N, d), views of the capture's store

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def layer_and_token(self, state: int) -> tuple[int, int]:
        """Return (layer, vision token) of a state."""
        j, i = divmod(state, self.stride)
        return self.layers[j], i

    def by_layer_and_token(self, values: Tensor) -> Tensor:
        """Arrange the values of all states.  -> (|J|, N)"""
        missing = len(self.layers) * self.stride - len(values)
        return nn.functional.pad(values, (0, missing)).view(len(self.layers), -1)[:, : self.tokens]


class Capture:
    """The vision tokens' states at the chosen layers, captured in the prefill of a generate call.

    The prefill is the first forward, or several that each run a chunk of the prompt. Rows of the batch that belong to one
    item (beams, return sequences) share one set of states. The last position's state is captured too, to find how the model turns
    states into logits.
    """

    def __init__(
        self,
        parts: ModelParts,
        mask: Tensor,
        layers: tuple[int, ...],
        rows_per_item: int,
        stack: ExitStack,
        *,
        of: Pass = ALL_ROWS,
        final_norm: bool = False,
        cache: Cache | None = None,
    ) -> None:
        self.parts, self.layers, self.rows_per_item = parts, layers, rows_per_item
        self.length = mask.shape[1]
        positions = [row.nonzero().squeeze(-1) for row in mask[::rows_per_item].cpu()]
        self.items = [VisionStates(each, layers, max(map(len, positions))) for each in positions]
        self.last: Tensor | None = None  # (items, d) normed state of the last prompt position
        self._head: Head | None = None
        self.norm = parts.final_norm if final_norm else None
        self.cache = cache
        self.cached = 0 if cache is None else int(cache.get_seq_length())  # positions that the first forward skips
        self._start, self._width = self.cached, 0  # first position and number of positions of the running forward
        # By layers, the items of the cache's last prompt.
        self.earlier = dict(_STATES_OF_CACHE.get(cache, {})) if cache is not None else {}
        if cache is not None and not self.cached:
            _STATES_OF_CACHE.pop(cache, None)
        self.store: Tensor | None = None  # (items, |J|, N, d), padded to the largest item
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._hooks = Hooks(stack, of=of)
        self._hooks.every_position(parts.decoder, self._begin_forward)
        for layer in layers:
            if layer < parts.depth:
                self._hooks.state(parts, layer, partial(self._keep, layer))
        self._hooks.state(parts, parts.depth, self._keep_last)

    def release(self) -> None:
        """Remove every hook and keep the states."""
        self._hooks.release()

    def head(self, raw: Tensor) -> Head:
        """Return the head that projects the states.

        At the first step, it completes the capture: `raw` (rows, V) must be the model's own logits after the prompt.
        """
        if self._head is None:
            self.release()
            self.check_reached()
            assert self.last is not None
            self._head = self.parts.calibrate(self.last[0], raw[0])
        return self._head

    @property
    def complete(self) -> bool:
        return self.last is not None

    def check_reached(self) -> None:
        """Raise RevisitError if the forward pass did not reach every hook."""
        missed = [layer for layer in self.layers if layer not in self.items[0].by_layer]
        if self.complete and not missed:
            return
        where = f"decoder layer {missed[0]}" if self.complete else "its decoder"
        raise RevisitError(
            f"The prefill of {describe(self.parts.model)} did not call {where} as a module, so the hooks that read its vision states "
            "were not reached; this way of running the model is not supported."
        )

    def _begin_forward(self, width: int) -> None:
        if not self.complete:
            self._width = width

    def _keep_last(self, hidden: Tensor) -> None:
        """Keep the final states; the last position of the prompt completes the capture."""
        if self.complete:
            return
        if self.parts.depth in self.layers:
            self._keep(self.parts.depth, hidden)
        self._start += self._width
        if self._start < self.length:
            return  # another chunk follows
        self.last = hidden[:: self.rows_per_item, -1].clone()
        if self.cache is not None:
            _STATES_OF_CACHE.setdefault(self.cache, {})[self.layers] = self.items

    def _keep(self, layer: int, hidden: Tensor) -> None:
        """Store the vision tokens' part of one layer's (rows, q, d) states."""
        if self.complete or not self._width:
            return
        count = len(self.items) * self.rows_per_item
        if hidden.shape[:2] != (count, self._width):
            raise RevisitError(
                f"{describe(self.parts.model)} ran for {hidden.shape[0]} × {hidden.shape[1]} positions at hidden state {layer}, not for "
                f"all {count} × {self._width}, so the states of the vision tokens were not computed: use another version of "
                "transformers, or method='greedy'."
            )
        start = self._start
        if self.store is None:
            longest = max(item.tokens for item in self.items)
            shape = (len(self.items), len(self.layers), longest, hidden.shape[-1])
            self.store = torch.zeros(shape, dtype=hidden.dtype, device=head_device(self.parts.head))
        norm, column = self.norm if layer < self.parts.depth else None, self.layers.index(layer)
        for number, item in enumerate(self.items):
            item.by_layer[layer] = self.store[number, column, : item.tokens]
            before = int((item.positions < start).sum())
            if before and start == self.cached:
                item.by_layer[layer][:before] = self._from_cache(number, layer, before)
        rows, positions = self.index(hidden.device)
        states = hidden[rows, (positions - start).clamp(0, self._width - 1)]  # (items, N, d), by one kernel
        states = (states if norm is None else normed(norm, states)).to(self.store)
        inside = ((positions >= start) & (positions < start + self._width)).to(self.store.device)
        self.store[:, column] = states.where(inside[..., None], self.store[:, column])

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row and the positions of every item's vision tokens, padded with position 0.  -> (items, 1), (items, N)"""
        if device not in self._indices:
            rows = torch.arange(len(self.items))[:, None] * self.rows_per_item
            columns = torch.nn.utils.rnn.pad_sequence([item.positions for item in self.items], batch_first=True)
            self._indices[device] = rows.to(device), columns.to(device)
        return self._indices[device]

    def inside(self) -> Tensor:
        """Return the mask of the items' vision tokens, False for padding.  -> (items, N)"""
        assert self.store is not None
        counts = torch.tensor([item.tokens for item in self.items], device=self.store.device)
        return torch.arange(self.store.shape[2], device=self.store.device) < counts[:, None]

    def padded(self) -> tuple[Tensor, list[int]]:
        """Return the states of all items, with NaN between them, and the length up to the last one of each.  -> (items, |J| · N, d)"""
        assert self.store is not None
        longest = self.store.shape[2]
        if any(item.tokens < longest for item in self.items):
            self.store.masked_fill_(~self.inside()[:, None, :, None], torch.nan)
        lengths = [item.tokens and (len(self.layers) - 1) * longest + item.tokens for item in self.items]
        return self.store.flatten(1, 2), lengths

    def _from_cache(self, number: int, layer: int, count: int) -> Tensor:
        """Return states of the first `count` vision tokens, which this prefill skipped because the cache holds them."""
        for items in self.earlier.values():
            old = items[number] if number < len(items) else None
            if old is None or layer not in old.by_layer:
                continue
            if torch.equal(old.positions[:count], self.items[number].positions[:count]):
                return old.by_layer[layer][:count]
        raise RevisitError(
            "The KV cache passed as past_key_values already holds the image, and the hidden states of its vision tokens at layer "
            f"{layer} were not kept with it: start from an empty cache, or reuse a cache that the same method filled with the "
            "same layers on the same prompt."
        )


@torch.no_grad()
def known_head(parts: ModelParts) -> Head:
    """Return a model's head before the prompt has run: as calibrated in an earlier call, or else from a prompt of one token."""
    if (head := parts.calibrated()) is not None:
        return head
    model: Any = parts.model
    states: list[Tensor] = []
    token = torch.zeros(1, 1, dtype=torch.long, device=head_device(parts.head))
    with ExitStack() as stack, saved_positions(model, clear=True):
        Hooks(stack).state(parts, parts.depth, states.append)
        logits = model(input_ids=token, use_cache=False).logits
    return parts.calibrate(states[0][0, -1], logits[0, -1])


def last_logits(model: Model) -> dict[str, int]:
    """Return the argument that limits a forward's logits to the last position, if the model has one.

    Without it, the model projects every position onto the whole vocabulary.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def forced_inputs(inputs: Arguments, texts: Sequence[Sequence[int]]) -> Arguments:
    """Append the tokens of a text to each prompt; shorter texts are padded on the right and masked.

    Other per-position inputs are padded with zeros.
    """
    ids = inputs["input_ids"]
    longest = max(map(len, texts))
    new = ids[:, -1:].repeat(1, longest)  # padding repeats the prompt's last token
    attended = torch.zeros_like(new)
    for row, tokens in enumerate(texts):
        new[row, : len(tokens)] = torch.tensor(list(tokens), device=ids.device, dtype=ids.dtype)
        attended[row, : len(tokens)] = 1
    longer = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            tail = {"input_ids": new, "attention_mask": attended}.get(name, torch.zeros_like(new))
            longer[name] = torch.cat([value, tail.to(value.dtype)], dim=1)
    return longer
