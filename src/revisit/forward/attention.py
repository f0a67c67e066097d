"""Hooks that read or change the attention of a model's decoder, with the eager and the sdpa kernel.

transformers selects its attention function by a name in the decoder's configuration. While a hook is installed, that name
is ours: our function calls the hooks, and then the kernel that was selected before. Positions are already applied to the
queries, and keys come from the cache, so the code is the same for every model family.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from revisit.errors import RevisitError
from revisit.forward.states import ALL_ROWS, FORCE_EAGER, Pass, current_call, paused
from revisit.models.head import multiply
from revisit.models.parts import ModelParts, describe

KERNELS = ("eager", "sdpa")
PREFIX = "revisit_"
# Arguments by which a kernel's softmax gets other terms than q·k and the mask.
EXTRA_TERMS = ("position_bias", "sinks", "s_aux")

_lock = threading.Lock()
_users: dict[int, int] = {}  # id of a configuration -> number of hooks installed in it
_thread_state = threading.local()  # .hooks: the hooks of this thread


@dataclass
class Call:
    """The arguments of one layer's attention for one pass, before the kernel runs. Its columns begin with the prompt's."""

    layer: int
    query: Tensor  # (rows, heads, q, d)
    key: Tensor  # (rows, key heads, columns, d)
    value: Tensor
    # (rows or 1, 1, q, columns): True or 0 where visible. None: one query attends to all columns, several attend causally.
    mask: Tensor | None
    scaling: float
    softcap: float | None
    extra_term: str = ""  # the kernel's argument that its softmax adds to the scores
    hidden: Tensor | None = None  # (rows, columns) columns to hide from every query; set by `hide`

    def scores(self, first: int = -1) -> Tensor:
        """Return the scores of queries from `first` on, before the softmax, -inf where masked.  -> (rows, heads, q, columns), float32"""
        if self.extra_term:
            raise RevisitError(
                f"Attention scores cannot be read in decoder layer {self.layer}, whose attention adds {self.extra_term!r} to them: use a "
                "method that does not use attention."
            )
        query = self.query[:, :, first:]
        rows, heads, q, width = query.shape
        grouped = query.reshape(rows * self.key.shape[1], -1, width)  # (rows · key heads, group · q, d)
        scores = multiply(grouped, self.key.flatten(0, 1)).mul_(self.scaling)  # (rows · key heads, group · q, columns)
        scores = scores.view(rows, heads, q, -1)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.mask is None and q == 1 and self.query.shape[2] in (1, scores.shape[-1]):
            return scores  # the last query attends to every column
        seen = self.visible() if self.mask is None else self.mask
        seen = seen[..., -q:, : scores.shape[-1]]  # (rows or 1, 1, q, columns)
        return scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()

    def last_attention(self) -> Tensor:
        """Return the attention of the last query in every head.  -> (rows, heads, columns), float32"""
        return self.scores()[:, :, 0].softmax(-1)

    def attend(self, scores: Tensor, where: Tensor | None = None) -> Callable[[Tensor], None]:
        """Return a function that changes the kernel's output: the last queries attend by these scores.

        Args:
            scores: Before the softmax.  (rows, heads, q, columns)
            where: The queries to change; None for all.  (rows, q) bool
        """
        q = scores.shape[2]
        weights = scores.softmax(-1).unflatten(1, (self.value.shape[1], -1))  # (rows, key heads, group, q, columns)
        grouped = weights.flatten(2, 3) @ self.value.to(scores.dtype)  # (rows, key heads, group · q, d)
        attended = grouped.unflatten(2, (-1, q)).flatten(1, 2).transpose(1, 2)  # (rows, q, heads, d)

        def change(output: Tensor) -> None:
            new = attended.to(output.dtype)
            output[:, -q:] = new if where is None else new.where(where[..., None, None], output[:, -q:])

        return change

    def columns(self, prompt: Tensor) -> Tensor:
        """Turn a mask over prompt positions (rows, T) into one over key columns."""
        total = self.key.shape[2]
        if total < prompt.shape[1]:
            raise RevisitError(
                f"Decoder layer {self.layer} no longer attends to the whole prompt (a sliding window), so the image's columns in its "
                "attention are unknown: use a shorter prompt, or a method that does not use attention."
            )
        return nn.functional.pad(prompt.to(self.key.device), (0, total - prompt.shape[1]))

    def visible(self) -> Tensor:
        """Return the columns that each query may attend to.  -> (rows or 1, 1, q, columns) bool"""
        return visible(self.mask, self.query, self.key)

    def hide(self, columns: Tensor) -> None:
        """Hide columns (rows, columns) from every query, except from one that sees nothing else: it keeps its newest column."""
        self.hidden = columns


def visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return the columns that each query may attend to.  -> (rows or 1, 1, q, columns) bool"""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    q, columns = query.shape[2], key.shape[2]
    seen = torch.ones(q, columns, dtype=torch.bool, device=query.device)
    return seen[None, None] if q == 1 else seen.tril()[None, None]


def without_columns(seen: Tensor, hidden: Tensor) -> Tensor:
    """Hide columns (rows, n) from all queries; one that would see nothing keeps its newest column.  (rows, 1, q, n) bool"""
    left = seen & ~hidden[:, None, None, :]
    if seen.shape[2] == 1:
        return left  # a single query is a text token, which attends to itself
    newest = newest_column(seen)  # (rows, 1, q, 1)
    kept = left.gather(-1, newest) | (~left.any(-1, keepdim=True) & seen.gather(-1, newest))
    return left.scatter(-1, newest, kept)


def newest_column(seen: Tensor) -> Tensor:
    """Return the last visible column of each query; the last of all if none is visible.  (..., n) bool -> (..., 1)"""
    from_the_end = seen.flip(-1).view(torch.uint8).argmax(-1, keepdim=True)
    return seen.shape[-1] - 1 - from_the_end


# Called before the kernel; may hide columns, and may return a function that changes the kernel's output (rows, q, heads, d) in place.
AttentionHook = Callable[[Call], Callable[[Tensor], None] | None]


@dataclass(eq=False)
class Watch:
    """One hook: the modules, layers and pass whose attention it gets."""

    modules: dict[int, int]  # id of an attention module -> its layer
    hook: AttentionHook
    layers: Collection[int] | None  # None for all
    of: Pass
    caller: object | None = field(default_factory=current_call)  # the call of generate that it belongs to; None for any
    # The last mask, the columns hidden in it, and the result: most layers of a forward share one mask.
    masks: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def call(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **terms: Any
    ) -> Call | None:
        """Return the part of a layer's attention that the hook gets; None if it gets nothing."""
        layer = self.modules.get(id(module))
        if layer is None or (self.layers is not None and layer not in self.layers):
            return None
        if self.caller not in (None, current_call()) or self.of.live is None:
            return None
        own, shift = self.of.of, self.of.shift
        key, value = (own(x)[:, :, shift:] if shift else own(x) for x in (key, value))
        if mask is not None:
            mask = (mask if len(mask) == 1 else own(mask))[..., shift:]
        return Call(layer, own(query), key, value, mask, **terms)

    def masked(self, mask: Tensor | None, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask of the whole batch with columns hidden in the rows of this pass."""
        before, columns, after = self.masks
        if after is not None and before is mask and columns is hidden and after.device == query.device:
            return after
        seen = visible(mask, query, key).expand(len(query), -1, -1, -1)
        columns = nn.functional.pad(hidden.to(query.device), (self.of.shift, 0))
        columns = nn.functional.pad(columns, (0, seen.shape[-1] - columns.shape[-1]))
        changed = self.of.put(seen, without_columns(self.of.of(seen), columns))
        if mask is not None and mask.dtype != torch.bool:
            changed = torch.where(changed, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype)
        self.masks = mask, hidden, changed
        return changed


@contextlib.contextmanager
def watching(
    parts: ModelParts,
    attention_hook: AttentionHook,
    method_name: str,
    layers: Collection[int] | None = None,
    of: Pass = ALL_ROWS,
) -> Iterator[None]:
    """Call the hook before the attention of these layers, by default of all, in this thread and model, within the context.

    With `of`, it gets the rows and columns of this pass, in forwards that contain it.
    """
    candidates = (getattr(layer, "self_attn", None) or getattr(layer, "attention", None) for layer in parts.layers)
    attentions = [(n, m) for n, m in enumerate(candidates) if isinstance(m, nn.Module) and hasattr(m, "config")]
    modules = {id(module): number for number, module in attentions}
    configs = {id(module.config): cast("PretrainedConfig", module.config) for _, module in attentions}
    if len(modules) < len(parts.layers):
        raise RevisitError(
            f"{method_name} needs the attention of every decoder layer, and only {len(modules)} of the {len(parts.layers)} layers of "
            f"{describe(parts.model)} have one: use another method, or a model without linear attention or other recurrent layers."
        )
    hooks = _thread_state.__dict__.setdefault("hooks", [])
    watch = Watch(modules, attention_hook, layers, of)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FORCE_EAGER)
        for config in configs.values():
            _enter(config, method_name, parts)
            stack.callback(_leave, config)
        hooks.append(watch)
        stack.callback(hooks.remove, watch)
        yield


def _enter(config: PretrainedConfig, method_name: str, parts: ModelParts) -> None:
    with _lock:
        name = config._attn_implementation or "eager"
        if not name.startswith(PREFIX):
            if name not in KERNELS:
                raise RevisitError(
                    f"{method_name} needs attention weights, which the {name!r} kernel of {describe(parts.model)} does not provide: load "
                    "the model with attn_implementation='sdpa' or 'eager'."
                )
            AttentionInterface.register(PREFIX + name, _with_hooks(name))
            AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
            config._attn_implementation = PREFIX + name
        _users[id(config)] = _users.get(id(config), 0) + 1


def _leave(config: PretrainedConfig) -> None:
    with _lock:
        _users[id(config)] -= 1
        if not _users[id(config)]:
            del _users[id(config)]
            config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def _with_hooks(name: str) -> Callable[..., Any]:
    """Return the attention function that calls this thread's hooks and then the kernel of this name."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        home = sys.modules[type(module).__module__]
        registry = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        eager: Any = getattr(home, "eager_attention_forward", None)
        kernel = registry.get_interface(name, eager)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        extra_term = next((term for term in EXTRA_TERMS if kwargs.get(term) is not None), "")
        softcap = kwargs.get("softcap")
        afterwards = []
        for watch in () if paused() else getattr(_thread_state, "hooks", ()):
            terms = {"scaling": scaling, "softcap": softcap, "extra_term": extra_term}
            call = watch.call(module, query, key, value, attention_mask, **terms)
            if call is None:
                continue
            change = watch.hook(call)
            if call.hidden is not None:
                attention_mask = watch.masked(attention_mask, call.hidden, query, key)
            if change is not None:
                afterwards.append((watch, change))
        output, weights = kernel(module, query, key, value, attention_mask, **kwargs)
        for watch, change in afterwards:
            change(watch.of.of(output))  # a view
        return output, weights

    return attend
