"""Check at start-up that vLLM has the methods and attributes that the plug-in uses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from revisit.errors import RevisitError

TESTED = "0.31 and 0.32"  # `make test-vllm` and `make test-vllm-previous`


def vllm_class(path: str, *attributes: str) -> Any:
    """Return a class of vLLM, such as "v1.request.Request"; raise unless its instances have these attributes."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(f"vllm.{module}"), name)
    except (ImportError, AttributeError):
        raise _differs(f"needs vllm.{path}", "has none") from None
    known = {name for base in found.__mro__ for name in _attributes(base)}
    for attribute in attributes:
        if attribute not in known:
            raise _differs(f"reads {name}.{attribute}", "has none")
    return found


def extend(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a class's method by `make(method)`, once.

    The parameters that it names must be the first ones of vLLM's; it passes on the others.
    """
    method = getattr(owner, name, None)
    if hasattr(method, "revisit"):
        return
    place = f"{owner.__name__}.{name}"
    if method is None:
        raise _differs(f"extends {place}", "has none")
    extended = make(method)
    parameters = inspect.signature(extended).parameters.values()
    ours = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    theirs = list(inspect.signature(method).parameters)
    if theirs[: len(ours)] != ours:
        raise _differs(f"extends {place}({', '.join(ours)}, …)", f"has {name}({', '.join(theirs)})")
    extended = functools.wraps(method)(extended)
    extended.revisit = True  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def _attributes(owner: type) -> set[str]:
    """Collect the names that a class declares and that its methods use, where instances get most attributes."""
    used = (getattr(value, "__code__", None) for value in vars(owner).values())
    return {
        *vars(owner),
        *vars(owner).get("__annotations__", ()),
        *(name for code in used if code for name in code.co_names),
    }


def _differs(need: str, found: str) -> RevisitError:
    from vllm.version import __version__

    return RevisitError(
        f"ReVisiT's vLLM plug-in {need} and vLLM {__version__} {found}: install vLLM {TESTED.replace('and', 'or')}, with which the "
        "plug-in is tested, or leave the plug-in out (REVISIT_VLLM=0)."
    )
