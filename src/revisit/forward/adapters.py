"""Adapters that are chosen row by row: `adapter_names` of peft, which hands them to its layers by hooks."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor, nn

from revisit.models.types import Arguments

NAMES = "adapter_names"


def adapter_names(module: nn.Module) -> list[str] | None:
    """Return the adapters of the running call's rows, as this layer gets them; None if one adapter serves all rows."""
    hooks = module._forward_pre_hooks.values()
    return next((names for hook in hooks if (names := getattr(hook, "keywords", {}).get(NAMES))), None)


def row_adapters(model: nn.Module) -> list[str] | None:
    """Return the adapters of the running call's rows; None if one adapter serves all rows."""
    return next((names for module in model.modules() if (names := adapter_names(module))), None)


def follow_rows(decoder: nn.Module, rows: int, stack: ExitStack) -> None:
    """Let each row of every forward pass use the adapter of its item.

    `rows` is the number of rows of the call. Contrasted passes repeat all of them, and a description has one row per item.
    """
    for module in decoder.modules():
        if names := adapter_names(module):
            own = [name for name in names for _ in range(rows // len(names))]  # beams and return sequences

            def extend(
                _module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments, own: list[str] = own
            ) -> tuple[tuple[object, ...], Arguments] | None:
                if args[0].ndim != 3 or NAMES not in kwargs:
                    return None
                repeats, fewer = divmod(len(args[0]), len(own))
                chosen = own[:: len(own) // len(args[0])] if fewer else own * repeats
                return args, {**kwargs, NAMES: chosen}

            stack.callback(module.register_forward_pre_hook(extend, with_kwargs=True).remove)
