"""The base class of decoding methods, and the registry that finds them by name.

This module does not import torch, so that listing the names of methods stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from revisit.errors import RevisitError
from revisit.models.names import Categories, read_names
from revisit.registry import Registry, Settings, Share, WholeNumber

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.utils import GenerateOutput
    from typing_extensions import Self

    from revisit.decoding.loop import Loop
    from revisit.decoding.trace import Trace
    from revisit.forward.passes import Passes
    from revisit.forward.prompt import Prompt
    from revisit.forward.states import VisionStates
    from revisit.models.types import Model, Processor
    from revisit.step.interface import StepOutput


class StepResult(NamedTuple):
    """What a step returns if scores alone are not enough.

    Attributes:
        scores: (rows, V) the scores to decode by.
        other: (rows, V) logits that the method contrasted with, for the record.
        acted: (rows,) the rows in which it acted; the others keep their logits. None for all.
        layers: The layers that it reads.
        layer: (rows,) index into `layers` of the layer that each row used.
        comparable: Whether beams may be compared by the scores as they are; otherwise they are normalized.
        detail: The output of ReVisiT's step, and the vision states of each item.
    """

    scores: Tensor
    other: Tensor | None = None
    acted: Tensor | None = None
    layers: tuple[int, ...] = ()
    layer: Tensor | None = None
    comparable: bool = False
    detail: tuple[StepOutput, Sequence[VisionStates]] | None = None


# (input_ids (rows, length), logits (rows, V)) -> scores (rows, V), alone or in a result
Step = Callable[["Tensor", "Tensor"], "Tensor | StepResult"]


def _distinct(layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(layers))


def _categories(value: object) -> object:
    """Read the file of a list of names, which a command line gives as a path."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (str, Path)):
        return read_names(Path(value[0]))
    return read_names(value) if isinstance(value, Path) else value


LayerNumbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_distinct)]


class Method(Settings):
    """The base class of all decoding methods, including your own.

    Pass one as `revisit.generate(model, ..., method=method)` or `model.generate(..., custom_generate=method)`.

    To write one, derive from this class. Annotated fields with defaults are its settings, validated by pydantic. `begin` prepares
    a call of `generate` and returns the function that turns the logits of each step into scores:

        >>> class Sharpen(revisit.Method):
        ...     power: float = 1.5
        ...     name = "sharpen"
        ...
        ...     def begin(self, prompt, passes):
        ...         return lambda input_ids, logits: logits * self.power

    Args:
        phase: Act at all steps ("both"), or only at those that write the "answer" or the "thought" of a model that thinks. Other
            steps leave the logits unchanged, and are counted in `RowTrace.outside`.
        floor: Names that the image supports less than this are never written in the answer, and a category that it has just named
            is not named again, except after a word such as "the"; 0 is off.
        floor_layer: The hidden state of the vision tokens that `floor` reads; by default the one that `check` reads.
        names: The names that `floor` withholds: by default CHAIR's objects, otherwise a file with one name per line, followed by its
            synonyms after commas.

    Attributes:
        name: The method's name on a command line.
        summary: What it does, in one line.
        cost: The forwards, rows and prefills that it needs.
        source: The paper.
        speculative: Whether a step depends only on its arguments and the prompt, so that it can be taken for drafted tokens.
            Speculative decoding and chunked prefill raise an error for other methods.
        changes_forward: Whether it changes the model's forward pass, so that it cannot be limited to a phase.
        needs_cache: Whether it changes the newest token in a way that only the KV cache keeps for later tokens.
        released: Settings of the authors' released code that differ from the defaults, for `official()`.
    """

    phase: Literal["both", "answer", "thought"] = "both"
    floor: Share = 0.0
    floor_layer: WholeNumber | None = None
    names: Annotated[Categories, BeforeValidator(_categories)] = ()

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    source: ClassVar[str] = ""
    speculative: ClassVar[bool] = False
    changes_forward: ClassVar[bool] = False
    needs_cache: ClassVar[bool] = False
    released: ClassVar[Mapping[str, object]] = {}

    def __init__(self, /, *args: object, **settings: Any) -> None:
        """Validate the settings, which are given by name."""
        if "logits_processor" in settings:  # transformers has called the class as custom_generate
            instance = f"{type(self).__name__}{'.recommended(model)' if hasattr(self, 'recommended') else '()'}"
            raise RevisitError(f"custom_generate takes a method, not its class: write custom_generate={instance}.")
        if not isinstance(getattr(type(self), "name", None), str):
            raise RevisitError(f"{type(self).__name__} needs a name: write name = 'mine' in the class.")
        if args:
            raise RevisitError(f"{type(self).__name__} takes its settings by name, not by position: {args[0]!r:.80}.")
        super().__init__(**settings)

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        """Prepare one call of `generate`.

        Args:
            prompt: Everything that is known before the first token: ids, vision positions, pixels, the model's parts.
            passes: Functions that read or change the running model, and further passes to contrast with.

        Returns:
            A function that takes (input_ids, raw logits) at every step, before any other logits processor, and returns the
            scores to decode by, of the logits' shape, alone or in a `StepResult`.
        """
        raise RevisitError(
            f"The method {self.name!r} cannot decode: its class {type(self).__name__} has no begin(prompt, passes)."
        )

    def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> GenerateOutput | Tensor:
        """Decode one call of `generate`. Override it only for a loop of your own, for example one that steps back.

        Args:
            prompt: As for `begin`.
            passes: As for `begin`.
            loop: `loop()` runs transformers' own loop with the step of `begin`; its other methods are the parts of a loop.

        Returns:
            The prompt and the answer of every row, (rows, length), or what transformers' loop returned.
        """
        return loop()

    @property
    def links(self) -> tuple[Method, ...]:
        """The methods of a chain, whose steps are applied in this order; empty for a single method."""
        return ()

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """Return the method with the settings of the authors' released code: its defaults and `released`, unless overridden."""
        return cls(**{**cls.released, **overrides})

    @property
    def own_beams(self) -> int:
        """Number of beams for calls that set none; 1 for methods that do not need beams."""
        return 1

    def for_model(self, model: Model | str) -> Self:
        """Return the method with all settings that depend on the model resolved."""
        return self

    def __call__(
        self,
        model: Model,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        generation_config: GenerationConfig,
        trace: Trace | None = None,
        vision_mask: Tensor | None = None,
        processor: Processor | None = None,
        stop_strings: str | list[str] | None = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Decode as transformers' `custom_generate`.

        transformers calls this with what it has prepared. It passes on `trace`, `vision_mask`, `processor`, `stop_strings`
        and `inputs_tensor` because they are parameters here.
        """
        from revisit.decoding.loop import decode_call  # imports torch

        return decode_call(
            self.for_model(model),
            model,
            input_ids,
            logits_processor or [],
            stopping_criteria or [],
            generation_config,
            model_kwargs,
            trace,
            vision_mask,
            processor,
            stop_strings,
            inputs_tensor,
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting, in JSON-ready form; those of all methods only if they are not the defaults."""
        common = {name: field.default for name, field in Method.model_fields.items()}
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in self if name not in common}
        changed = {name: value for name in common if (value := getattr(self, name)) != common[name]}
        return own | changed | ({"names": [list(names) for names in self.names]} if self.names else {})


def layers_of_32(first: int, last: int, depth: int, least: int = 0) -> tuple[int, ...]:
    """Scale the layers `first` to `last` of LLaVA-7B's 32 to a decoder of `depth` layers; drop those below `least`."""
    start, end = (min(round(layer * depth / 32), depth - 1) for layer in (first, last))
    return tuple(range(min(max(start, least), end), end + 1))


def layers_of(method: Any, first: int, last: int, depth: int, least: int = 0) -> tuple[int, ...]:
    """Return the layers of a method's setting: numbers, those published for 32 layers scaled to the depth, or "released".

    The released programs use the numbers published for 32 layers at every depth; where they do not fit, they are scaled.
    """
    last_released = min(last, 31)
    if isinstance(method.layers, tuple):
        return check_layers(method, method.layers, depth)
    if method.layers == "released" and last_released < depth:
        return tuple(range(first, last_released + 1))
    return layers_of_32(first, last, depth, least)


def check_layers(method: Method, layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Return the layers in ascending order; raise RevisitError if the decoder does not have them all."""
    if max(layers) >= depth:
        raise RevisitError(
            f"{type(method).__name__}: layer {max(layers)} does not exist: this model's layers are numbered 0 to {depth - 1}."
        )
    return tuple(sorted(layers))


# A method, its class, its name with settings ("revisit:alpha=1e-3"), or a mapping with its name.
MethodLike = Method | type[Method] | str | Mapping[str, Any] | None


def _check_begin(cls: type[Method], where: str) -> None:
    if cls.begin is Method.begin and cls.decode is Method.decode and cls.links is Method.links:
        raise RevisitError(f"{where} cannot decode: it must have a method begin(self, prompt, passes).")


METHODS = Registry("method", "revisit.methods", Method, _check_begin)


def as_method(method: MethodLike, model: Model | str | None = None, /, **settings: Any) -> Method:
    """Return the method that is given as an instance, a class, a name or a mapping.

    Args:
        method: An instance keeps its settings. A class or a name takes what is recommended for the model. None, "off" and "none" are
            plain decoding.
        model: A loaded model or its `model_type`; None for the method's defaults.
        **settings: Settings that override the others.
    """
    if isinstance(method, Method):
        _check_begin(type(method), type(method).__name__)
        chosen = method.replace(**settings) if settings else method
        return chosen if model is None else chosen.for_model(model)
    if method is None or isinstance(method, (str, Mapping)):
        name, own_settings = METHODS.parse(method or "off")
        method, settings = METHODS.find(name), {**own_settings, **settings}
    elif isinstance(method, type) and issubclass(method, Method):
        METHODS.check(method, method.__name__)
    else:
        raise RevisitError(
            "method must be a decoding method such as revisit.ReVisiT(), or its name such as 'revisit' (plain decoding is "
            f"'greedy'), not {method!r}."
        )
    if model is None:
        return method(**settings)
    create: Callable[..., Method] = partial(method.recommended, model) if hasattr(method, "recommended") else method
    return create(**settings).for_model(model)
