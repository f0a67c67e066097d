"""What every decoding method is, and the methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from revisit.errors import RevisitError
from revisit.registry import Registry, Settings

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.utils import GenerateOutput
    from typing_extensions import Self

    from revisit.decoding.loop import Loop
    from revisit.decoding.run import Run
    from revisit.decoding.trace import Trace
    from revisit.models.types import Model, Processor

    # A method, its class, its name with settings ("revisit:alpha=1e-3"), or a mapping with its name.
    MethodLike: TypeAlias = "Method | type[Method] | str | Mapping[str, Any]"


# (input_ids (rows, length), logits (rows, V)) -> scores (rows, V)
Refine = Callable[["Tensor", "Tensor"], "Tensor"]


def _distinct(layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(layers))


LayerNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_distinct)
]  # each once


class _ShortSignature:
    """What `help` shows of a method's class: its settings and their defaults. Instances keep the signature of their call."""

    def __get__(self, instance: Method | None, owner: type[Method]) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        fields = owner.model_fields.items()
        values = ((name, inspect.Parameter.empty if field.is_required() else field.default) for name, field in fields)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature([inspect.Parameter(name, kind, default=value) for name, value in values])


class Method(Settings):
    """A decoding method; the base class of all of them, and of your own.

    Pass one as `revisit.generate(model, ..., method=method)` or `model.generate(..., custom_generate=method)`.

    To write one, derive from this class. Annotated fields with defaults are its settings, validated by pydantic. `begin` prepares
    a call of `generate` and returns the function that turns the logits of each step into scores:

        >>> class Sharpen(revisit.Method):
        ...     power: float = 1.5
        ...     name = "sharpen"
        ...
        ...     def begin(self, run):
        ...         return lambda input_ids, logits: logits * self.power

    Attributes:
        name: What the method is called on a command line.
        summary: What it does, in one line.
        cost: The forwards, rows and prefills that it needs.
        source: The paper.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    source: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.__signature__ = _ShortSignature()  # type: ignore[assignment]

    def __init__(self, *args: object, **settings: Any) -> None:
        """Validate the settings, which are given by name."""
        if "logits_processor" in settings:  # transformers calls what it is given as custom_generate
            instance = f"{type(self).__name__}{'.recommended(model)' if hasattr(self, 'recommended') else '()'}"
            raise RevisitError(f"custom_generate takes a method, not its class: write custom_generate={instance}.")
        if args:
            raise RevisitError(f"{type(self).__name__} takes its settings by name, not {args[0]!r} alone.")
        if not isinstance(getattr(type(self), "name", None), str):
            raise RevisitError(f"{type(self).__name__} needs a name: write name = 'mine' in the class.")
        super().__init__(**settings)

    def begin(self, run: Run) -> Refine:
        """Prepare one call of `generate`.

        Args:
            run: The call: the prompt, the model's parts, and what can be tapped while it runs.

        Returns:
            A function that takes (input_ids, raw logits) at every step, before any other logits processor, and returns the
            scores to decode by, of the logits' shape.
        """
        raise RevisitError(
            f"The method {self.name!r} cannot decode: its class {type(self).__name__} has no begin(run)."
        )

    def decode(self, run: Run, loop: Loop) -> GenerateOutput | Tensor:
        """Decode one call of `generate`. Override it only for a decoding loop of your own, for example to step back.

        Args:
            run: The call, with `run.forward`, `run.crop` and `run.reorder` to drive the model.
            loop: `loop(refine)` runs transformers' own loop; `loop.scores` and `loop.ended` are its processors and stopping
                criteria.

        Returns:
            The prompt and the answer of every row, (rows, length), or what transformers' loop returned.
        """
        return loop(self.begin(run))

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """The settings of the authors' released code; the defaults, unless a method says otherwise."""
        return cls(**overrides)

    @property
    def own_beams(self) -> int:
        """Beams that the method searches with where the call asks for none; 1 if it can do without."""
        return 1

    def for_model(self, model: Model | str) -> Self:
        """This method as it decodes a model: itself, unless it leaves settings to the model."""
        return self

    def __call__(
        self,
        model: Model,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        trace: Trace | None = None,
        vision_mask: Tensor | None = None,
        processor: Processor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """The `custom_generate` entry point, called by transformers, which looks for its arguments by name."""
        from revisit.decoding.loop import decode  # needs torch, which settings do not

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
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self}


def checked(method: Method, run: Run, refine: Refine) -> Refine:
    """What `begin` returned, as a function whose results have the logits' shape and whose steps are counted.

    Raises RevisitError for another shape. A step that the method has noted itself is not counted twice.
    """
    if not callable(refine):
        raise RevisitError(
            f"The method {method.name!r} cannot decode: its begin(run) must return a function of (input_ids, logits), not "
            f"{type(refine).__name__}."
        )

    def step(input_ids: Tensor, logits: Tensor) -> Tensor:
        run.recorder.noted = False
        run.check_attention()
        scores = refine(input_ids, logits)
        shape = getattr(scores, "shape", None)  # known without waiting for the device
        if shape != logits.shape:
            raise RevisitError(
                f"The method {method.name!r} must return logits of the same shape, {tuple(logits.shape)}, not "
                f"{type(scores).__name__ if shape is None else tuple(shape)}."
            )
        if not run.recorder.noted:
            run.recorder.note_scores(input_ids, logits, scores)
        return scores

    return step


def _check_begin(cls: type[Method], where: str) -> None:
    if cls.begin is Method.begin and cls.decode is Method.decode:
        raise RevisitError(f"{where} cannot decode: it must have a method begin(self, run).")


METHODS = Registry("method", "revisit.methods", Method, _check_begin)


def as_method(method: MethodLike, model: Model | str | None = None, /, **settings: Any) -> Method:
    """A method from whatever names one.

    Args:
        method: A method keeps the settings it has. Its class or its name takes what is recommended for the model.
        model: A loaded model or its `model_type`; None for the method's defaults.
        **settings: Settings that come on top.
    """
    if isinstance(method, Method):
        _check_begin(type(method), type(method).__name__)
        changed = METHODS.make(method.replace, **settings) if settings else method
        return changed if model is None else changed.for_model(model)
    if isinstance(method, type) and issubclass(method, Method):
        METHODS.check(method, method.__name__)
        return _recommended(method, model, settings)
    if not isinstance(method, (str, Mapping)):
        raise RevisitError(
            "method must be a decoding method such as revisit.ReVisiT(), or its name such as 'revisit' (plain decoding is "
            f"'greedy'), not {method!r}."
        )
    name, own = METHODS.parse(method)
    return _recommended(METHODS.find(name), model, {**own, **settings})


def _recommended(cls: type[Method], model: Model | str | None, settings: Mapping[str, Any]) -> Method:
    knows = model is not None and hasattr(cls, "recommended")
    made = METHODS.make(partial(cls.recommended, model) if knows else cls, **settings)  # type: ignore[attr-defined]
    return made if model is None else made.for_model(model)


def refuse_settings(method: Method, arguments: Mapping[str, Any]) -> None:
    """Raises RevisitError for a setting of the method among the arguments of `generate`, where it would do nothing.

    A name that both have, such as DeCo's `top_p`, is the argument of `generate`.
    """
    from transformers import GenerationConfig

    own = vars(GenerationConfig())
    for field in type(method).model_fields:
        if field in arguments and field not in own:
            if field == "seed":
                raise RevisitError("generate takes no seed: call transformers.set_seed before it.")
            text = f"{method.name}:{field}={arguments[field]}"
            raise RevisitError(
                f"{field} is a setting of the method, not an argument of generate: write method={text!r}."
            )


def method_text(name: str, settings: Mapping[str, Any]) -> str:
    """The text that names a method with these settings, without those that are its defaults."""
    defaults = METHODS.get(name).settings() if name in METHODS.names() else {}
    changed = {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
    return ":".join(
        [name, *([",".join(f"{key}={value_text(value)}" for key, value in changed.items())] if changed else [])]
    )


def value_text(value: object) -> str:
    """A setting's value as it is typed; the links of a chain as methods with their settings."""
    if isinstance(value, Mapping):
        return method_text(value["name"], {key: own for key, own in value.items() if key != "name"})
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(value_text, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
