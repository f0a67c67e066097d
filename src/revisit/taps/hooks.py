"""Forward hooks on the modules of a running model: one thread's, and gone when the call ends."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from revisit.models.parts import ModelParts

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
        self._handles: list[Any] = []
        self._eager = force_eager
        if force_eager:
            _FORCE_EAGER.begin()
        stack.callback(self.release)

    def before(self, module: nn.Module, see: StateHook) -> None:
        """`see` is given what the module is about to read."""

        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._mine():
                return None
            changed = see(args[0] if args else kwargs["hidden_states"])
            if changed is None:
                return None
            return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, see: StateHook) -> None:
        """`see` is given the states that the module returned; only a module that returns nothing else can have them replaced."""

        def hook(_module: Any, _args: Any, output: Any) -> Any:
            return see(states_of(output)) if self._mine() else None

        self._handles.append(module.register_forward_hook(hook))

    def output(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        """`see` is given everything that the module returned."""

        def hook(_module: Any, _args: Any, output: Any) -> None:
            if self._mine():
                see(output)

        self._handles.append(module.register_forward_hook(hook))

    def state(self, parts: ModelParts, layer: int, see: StateHook) -> None:
        """`see` is given hidden state number `layer`: what decoder layer `layer` reads, or the normed final state.

        That is the layer below's output, with whatever the model adds in between (DeepStack features).
        """
        if layer < parts.depth:
            self.before(parts.layers[layer], see)
        else:
            self.after(parts.decoder, see)

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


def states_of(output: Any) -> Any:
    """The hidden states in what a module returned."""
    if isinstance(output, tuple):
        return output[0]
    return output if isinstance(output, Tensor) else output.last_hidden_state


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
