"""Several methods in sequence, each applied to the scores of the one before.

The first gets the model's own logits. Contrasted passes and projected states are always the model's own; only scores are passed
on, and all passes share one batch. `Chain([VCD(), ReVisiT()])` thus refines VCD's distribution, over the tokens that VCD keeps.
The loop (`decoding/loop.py`) applies the methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from revisit.decoding.method import METHODS, Method, MethodLike, as_method
from revisit.errors import RevisitError
from revisit.models.types import Model
from revisit.registry import parse_links

MOST = 8  # methods in a chain


class Chain(Method):
    """Apply several methods in sequence.

    Args:
        methods: The methods in order, or their names, as in "vcd,revisit". A name or a class takes the settings recommended
            for the model.
    """

    methods: tuple[Any, ...] = ("vcd", "revisit")

    name = "chain"
    summary = "several methods in sequence, as in methods=vcd,revisit"
    cost = "the sum of its methods; one more row per sequence for each contrast"
    source = "—"

    def __init__(
        self, methods: str | Sequence[MethodLike] = ("vcd", "revisit"), *args: object, **settings: Any
    ) -> None:
        entries = _entries(methods)
        if len(entries) > MOST:
            raise RevisitError(f"Chain: {len(entries):,} methods; at most {MOST} are allowed.")
        links = tuple(as_method(entry) for entry in entries)
        if any(isinstance(link, Chain) for link in links):
            raise RevisitError("Chain: a chain cannot contain another; list its methods instead.")
        super().__init__(*args, methods=links, **settings)
        self.__dict__["_entries"] = entries  # names and classes among them depend on the model

    def for_model(self, model: Model | str) -> Chain:
        """Return the chain with the model's recommended settings for methods that were passed by name or class."""
        entries: tuple[MethodLike, ...] = self.__dict__["_entries"]
        if all(isinstance(entry, Method) for entry in entries):
            return self
        return self.replace(methods=tuple(as_method(entry, model) for entry in entries))

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """Return the chain with the published settings of each named method; ReVisiT takes those recommended for the model."""
        entries = _entries(overrides.pop("methods", ("vcd", "revisit")))
        return cls(methods=tuple(_official(entry) for entry in entries), **overrides)

    @property
    def speculative(self) -> bool:  # type: ignore[override]
        return all(method.speculative for method in self.methods)

    @property
    def changes_forward(self) -> bool:  # type: ignore[override]
        return any(method.changes_forward for method in self.methods)

    @property
    def needs_cache(self) -> bool:  # type: ignore[override]
        return any(method.needs_cache for method in self.methods)

    def settings(self) -> dict[str, Any]:
        """Return every method in order: its name, with its settings unless they are its defaults for every model."""
        links = [m.name if _plainly_named(m) else {"name": m.name, **m.settings()} for m in self.methods]
        return {**super().settings(), "methods": links}

    @property
    def links(self) -> tuple[Method, ...]:
        return self.methods


def _entries(methods: object) -> tuple[MethodLike, ...]:
    """Return the methods of a chain as instances, classes or mappings, without creating them."""
    if isinstance(methods, str):
        methods = [{"name": name, **settings} for name, settings in METHODS.parse_list(parse_links(methods))]
    if not isinstance(methods, (list, tuple)) or not methods:
        raise RevisitError("Chain: methods must be a list of methods or of their names, such as [VCD(), ReVisiT()].")
    return tuple(methods)


def _official(entry: MethodLike) -> MethodLike:
    """Return a named method with its published settings, unless it has recommended settings for each model."""
    if not isinstance(entry, (str, Mapping)):
        return entry
    name, settings = METHODS.parse(entry)
    cls = METHODS.find(name)
    return entry if hasattr(cls, "recommended") else cls.official(**settings)


def _plainly_named(method: Method) -> bool:
    return not hasattr(method, "recommended") and method == type(method)()
