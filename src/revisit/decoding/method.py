"""What every decoding method is: a frozen, self-validating settings object that stock `generate()` accepts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, get_args

from revisit.decoding.options import fits, type_hints
from revisit.errors import RevisitError, unknown, unknown_setting

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.run import Run
    from revisit.models.types import Processor

    Refine = Callable[[Tensor, Tensor], Tensor]  # (input_ids (B, T), logits (B, V)) -> logits (B, V)


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method: its settings, checked on creation, and `begin`, which acts on one call of `generate`.

    Pass it as `model.generate(..., custom_generate=method)` or `revisit.generate(model, ..., method=method)`.
    """

    name: ClassVar[str]  # what it is called on a command line
    summary: ClassVar[str] = ""  # one line of what it does
    cost: ClassVar[str] = ""  # forwards, rows and prefills that it needs
    source: ClassVar[str] = ""  # the paper

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Raises RevisitError for a setting that the method does not have, before `__init__` would raise TypeError."""
        known = [field.name for field in dataclasses.fields(cls)]
        if "logits_processor" in settings and "logits_processor" not in known:
            made = f"{cls.__name__}.recommended(model)" if hasattr(cls, "recommended") else f"{cls.__name__}()"
            raise RevisitError(f"custom_generate takes a method, not its class: write custom_generate={made}.")
        for name in settings.keys() - set(known) - set(inspect.signature(cls.__init__).parameters):
            raise unknown_setting(cls.__name__ if known else cls.name, name, known)
        return super().__new__(cls)

    def begin(self, run: Run) -> Refine:
        """Prepare for one call: what returns is given the raw logits of every step, before any other processor."""
        raise RevisitError(
            f"The method {self.name!r} cannot decode: its class {type(self).__name__} has no begin(run)."
        )

    def begin_checked(self, run: Run) -> Refine:
        """`begin`; raises RevisitError where it, or later what it returned, does not return what it should."""
        refine: Any = self.begin(run)
        if not callable(refine):
            raise RevisitError(
                f"The method {self.name!r} cannot decode: its begin(run) must return a function of (input_ids, logits), not "
                f"{type(refine).__name__}."
            )

        def checked(input_ids: Tensor, logits: Tensor) -> Tensor:
            scores = refine(input_ids, logits)
            if getattr(scores, "shape", None) != logits.shape:  # known without waiting for the device
                got = getattr(scores, "shape", None)
                raise RevisitError(
                    f"The method {self.name!r} must return logits of the shape that it was given, {tuple(logits.shape)}, not "
                    f"{type(scores).__name__ if got is None else tuple(got)}."
                )
            return scores  # type: ignore[no-any-return]

        return checked

    def for_model(self, model: Any) -> Self:
        """This method as it decodes a model: itself, unless settings of it were left to the model."""
        return self

    @property
    def needs_processor(self) -> bool:
        """Whether the method must be bound to the model's processor before it decodes."""
        return False

    def bind(self, processor: Processor) -> Self:
        """This method with what it needs of the model's processor, such as words as token ids."""
        return self

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        trace: Any = None,
        vision_mask: Any = None,
        processor: Processor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The `custom_generate` entry point; called by transformers, never by hand."""
        from revisit.decoding.loop import decode  # the layer above: a method is only ever called through it

        return decode(
            self,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            trace=trace,
            vision_mask=vision_mask,
            processor=processor,
            **model_kwargs,
        )

    def settings(self) -> dict[str, Any]:
        """Every setting, in JSON-ready form."""
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in dataclasses.fields(self)
        }

    def check_range(self, field: str, low: float, high: float, *, low_open: bool = False) -> None:
        """Raises RevisitError unless low <= value <= high (low < value with `low_open`)."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RevisitError(f"{type(self).__name__}: {field} must be a number, not {value!r}.")
        hint = type_hints(type(self))[field]
        if isinstance(value, float) and float not in (hint, *get_args(hint)):
            raise RevisitError(f"{type(self).__name__}: {field} must be a whole number, not {value!r}.")
        if not (low < value if low_open else low <= value) or not value <= high:
            bounds = f"{'above' if low_open else 'at least'} {low:g}" + (
                "" if high == float("inf") else f" and at most {high:g}"
            )
            raise RevisitError(f"{type(self).__name__}: {field} must be {bounds}, not {value!r}.")

    def check_flags(self) -> None:
        """Raises RevisitError unless every setting that is true or false is one of the two (or None, where that is allowed)."""
        for field, hint in type_hints(type(self)).items():
            if bool in (hint, *get_args(hint)) and not fits(value := getattr(self, field), hint):
                raise RevisitError(f"{type(self).__name__}: {field} must be true or false, not {value!r}.")

    def check_seed(self) -> None:
        """Raises RevisitError unless `seed` is a whole number that generators take."""
        self.check_range("seed", 0, 2**63 - 1)

    def check_choice(self, field: str) -> None:
        """Raises RevisitError unless the value is one of the field's Literal choices."""
        choices = get_args(type_hints(type(self))[field])
        value = getattr(self, field)
        if not isinstance(value, str) or value not in choices:
            raise unknown(f"{type(self).__name__} {field}", str(value), map(str, choices))


def layer_numbers(method: str, layers: Any, named: tuple[str, ...]) -> str | tuple[int, ...]:
    """A named set of layers, or layer numbers, each once; raises RevisitError otherwise."""
    if isinstance(layers, str):
        if layers not in named:
            raise unknown(f"{method} layer set", layers, named)
        return layers
    numbers = (
        (layers,) if isinstance(layers, int) else tuple(layers) if isinstance(layers, (list, tuple, range)) else ()
    )
    if not numbers or any(isinstance(i, bool) or not isinstance(i, int) for i in numbers):
        raise RevisitError(
            f"{method}: layers must be one of {', '.join(named)} or a list of layer numbers, not {layers!r}."
        )
    if min(numbers) < 0:
        raise RevisitError(f"{method}: layer {min(numbers)} does not exist; layers are numbered from 0.")
    return tuple(dict.fromkeys(numbers))


# A method, its class, its name with settings such as "revisit:alpha=1e-3", or a mapping of `name` and settings.
MethodLike: TypeAlias = Method | type[Method] | str | Mapping[str, Any]
