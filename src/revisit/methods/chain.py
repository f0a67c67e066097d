"""Several methods one after the other: each continues with the scores of the one before it.

The first sees the model's own logits. Contrasted runs and projected states are always the model's own: what is chained
is the scores. All contrasted runs of a chain share one batch. `Chain([VCD(), ReVisiT()])` thus refines, by the vision
token that agrees most, the distribution that VCD arrived at, over the tokens that VCD left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import METHODS, Method, as_method, checked
from revisit.errors import RevisitError
from revisit.registry import without_brackets

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.method import MethodLike, Refine
    from revisit.decoding.run import Recorder, Run
    from revisit.models.types import Model


class Chain(Method):
    """Settings of a chain.

    Args:
        methods: The methods in the order in which they act, or their names, as in "vcd,revisit". A name or a class takes what
            is recommended for the model that is decoded.
    """

    methods: tuple[Any, ...] = ("vcd", "revisit")

    name = "chain"
    summary = "several methods one after the other, as in methods=vcd,revisit"
    cost = "what its methods cost; one more row per sequence for each contrast"
    source = "—"

    def __init__(
        self, methods: str | Sequence[MethodLike] = ("vcd", "revisit"), *args: object, **settings: Any
    ) -> None:
        given = _entries(methods)
        links = tuple(as_method(method) for method in given)
        if any(isinstance(link, Chain) for link in links):
            raise RevisitError("Chain: a chain cannot be a link of another; list its methods instead.")
        super().__init__(*args, methods=links, **settings)
        self.__dict__["_given"] = given  # names among them are looked up again for a model

    def for_model(self, model: Model | str) -> Chain:
        """This chain with what is recommended for the model wherever a link was given by its name or class."""
        given: tuple[MethodLike, ...] = self.__dict__["_given"]
        return self.replace(methods=tuple(as_method(method, model) for method in given))

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """The published settings of each named method; ReVisiT takes what the paper recommends for the model."""
        entries = _entries(overrides.pop("methods", ("vcd", "revisit")))
        return cls(methods=tuple(_official(entry) for entry in entries), **overrides)

    def settings(self) -> dict[str, Any]:
        """Every link in order: its name, with its settings unless the name alone means them for every model."""
        return {"methods": [m.name if _plainly_named(m) else {"name": m.name, **m.settings()} for m in self.methods]}

    def begin(self, run: Run) -> Refine:
        whole = run.recorder
        links: list[tuple[Recorder, Refine]] = []
        for method in self.methods:
            if type(method).decode is not Method.decode:
                raise RevisitError(f"Chain: {method.name} has its own decoding loop; use it alone.")
            run.recorder = whole.link(method)
            links.append((run.recorder, checked(method, run, method.begin(run))))
            for mine, own in zip(whole.trace.rows, run.trace.rows, strict=True):
                mine.vision_tokens = max(mine.vision_tokens, own.vision_tokens)
            whole.trace.layers = whole.trace.layers or run.trace.layers
        run.recorder = whole

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            scores = logits
            for recorder, link in links:
                run.recorder = recorder
                scores = link(input_ids, scores)
            run.recorder = whole
            return scores

        return refine


def _entries(given: object) -> tuple[MethodLike, ...]:
    """The links of a chain as they were given: methods, classes, mappings, or texts with one name each."""
    if isinstance(given, str):
        given = [{"name": name, **settings} for name, settings in METHODS.parse_list(without_brackets(given))]
    if not isinstance(given, (list, tuple)) or not given:
        raise RevisitError("Chain: methods must be a list of methods or of their names, such as [VCD(), ReVisiT()].")
    return tuple(given)


def _official(entry: MethodLike) -> MethodLike:
    """A named method with its published settings, where it has any that differ from the model's recommendation."""
    if not isinstance(entry, (str, Mapping)):
        return entry
    name, settings = METHODS.parse(entry)
    cls = METHODS.find(name)
    return entry if hasattr(cls, "recommended") else cls.official(**settings)


def _plainly_named(method: Method) -> bool:
    return not hasattr(method, "recommended") and method == type(method)()
