"""The one place where a decoding method meets transformers' own `generate()`.

`generate()` prepares everything (cache, expansion for beams, processors, stopping) and calls the method as its
`custom_generate`. The method runs transformers' own sampling or beam loop, with one logits processor before all others,
unless it has a loop of its own (`Method.decode`). Nothing of transformers is patched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from traceback import walk_tb
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from revisit.decoding.method import Method, as_method, checked, refuse_settings
from revisit.decoding.run import Run
from revisit.decoding.settings import Drawing
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError, did_you_mean
from revisit.models import families
from revisit.models.checkpoint import brief
from revisit.models.families import IMAGE_INPUTS
from revisit.models.parts import describe, refusal, text_config
from revisit.models.types import Model, Processor, Tokenizer

if TYPE_CHECKING:
    from transformers import StoppingCriteria
    from transformers.generation.utils import GenerateOutput

    from revisit.decoding.method import MethodLike, Refine

SUPPORTED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# transformers' processors that may answer differently when asked twice in a step; all its others depend on their arguments alone.
NOT_REPEATABLE = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


@overload
def generate(
    model: Model,
    *args: Tensor,
    method: MethodLike = "revisit",
    trace: Trace | Literal[False] | None = None,
    processor: Processor | None = None,
    **kwargs: Any,
) -> GenerateOutput | Tensor: ...


@overload
def generate(
    model: Model,
    *args: Tensor,
    method: MethodLike = "revisit",
    trace: Literal[True],
    processor: Processor | None = None,
    **kwargs: Any,
) -> tuple[GenerateOutput | Tensor, Trace]: ...


def generate(
    model: Model,
    *args: Tensor,
    method: MethodLike = "revisit",
    trace: Trace | bool | None = None,
    processor: Processor | None = None,
    **kwargs: Any,
) -> GenerateOutput | Tensor | tuple[GenerateOutput | Tensor, Trace]:
    """Generate text with a decoding method: `model.generate(...)` with one more argument, `method`.

    Example:
        >>> model, processor = revisit.load("llava-hf/llava-1.5-7b-hf")
        >>> inputs = revisit.prepare(processor, ["Describe the image."], [[image]], model.device)
        >>> output = revisit.generate(model, **inputs, max_new_tokens=64)
        >>> revisit.answers(processor, output, inputs)
        ['A cat on a sofa.']

    Args:
        model: A vision-language model, from `revisit.load` or from transformers.
        *args: As for `model.generate`; usually empty.
        method: A method (`revisit.VCD(alpha=0.5)`), its class, or its name with settings (`"revisit:alpha=1e-3"`). A class or
            a name takes the settings recommended for the model. `"greedy"` decodes plainly. `revisit.methods.names()` lists all.
        trace: A `revisit.Trace` is filled with what the method did. True records every step and changes the result to a
            pair (what generate returns, the trace).
        processor: The model's processor. Needed only by some methods, and only if the model does not come from `revisit.load`
            and its processor cannot be loaded from where the model came from.
        **kwargs: Everything else that `model.generate` takes: the processor's outputs, `max_new_tokens`, `do_sample`,
            `num_beams`, a streamer, ... Prompts given as `inputs_embeds` also need `vision_mask`, a (batch, length) mask of
            their vision positions.

    Returns:
        What `model.generate` returns: token ids (batch, length), prompt included, or transformers' output object with
        `return_dict_in_generate=True`.

    Raises:
        RevisitError: If an argument is wrong, or the model cannot be decoded by this method.
    """
    if not hasattr(model, "generate"):
        raise RevisitError(
            f"The first argument must be a model with generate(), such as the one revisit.load returns, not {_kind(model)}."
        )
    if args and isinstance(args[0], Mapping):
        raise RevisitError("Pass the inputs as keyword arguments, with two stars: generate(model, **inputs, ...).")
    if not isinstance(trace, (Trace, bool, NoneType)):
        raise RevisitError(f"trace must be a revisit.Trace, or True to create one, not {_kind(trace)}.")
    if "custom_generate" in kwargs:
        raise RevisitError("revisit.generate sets custom_generate itself: pass the method as method=….")
    chosen = as_method(method, model)
    if chosen.name != "greedy" and families.of(getattr(model.config, "model_type", "")).refused:
        raise RevisitError(refusal(model.config, describe(model)))  # its own generate() would not ask the method
    refuse_settings(chosen, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in IMAGE_INPUTS}
    if getattr(model, "dtype", None) == torch.float32:  # some processors return half precision for every model
        kwargs |= {key: kwargs[key].float() for key in families.PIXELS if isinstance(kwargs.get(key), Tensor)}
    _check_drawing(model, kwargs)
    if kwargs.get("stop_strings") is not None:
        kwargs = _stopping_at_strings(kwargs)
    if chosen.own_beams > 1 and beams_asked(model, kwargs) == 1:
        kwargs = {**kwargs, "num_beams": chosen.own_beams}
    made = Trace(record=True) if trace is True else trace
    extra: dict[str, Any] = {"trace": made} if isinstance(made, Trace) else {}
    if processor is not None:
        extra["processor"] = processor
    try:
        output: GenerateOutput | Tensor = model.generate(*args, custom_generate=chosen, **extra, **kwargs)
    except (ValueError, TypeError, ImportError, IndexError) as error:
        if isinstance(error, RevisitError):
            raise
        places = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
        its_rule = places[-1].co_filename == logits_process.__file__  # such as a bias for tokens that there are not
        if "image tokens" in str(error).lower():
            raise RevisitError(
                f"The prompt's image tokens do not fit the image ({str(error)[:200]}): use this model's processor and pass "
                "everything it returned."
            ) from error
        if "model_kwargs" in str(error) and (name := re.search(r"\['(\w+)'", str(error))):
            hint = did_you_mean(name[1], [*vars(GenerationConfig()), "generation_config", "logits_processor"])
            raise RevisitError(f"Neither generate nor the model has an argument {name[1]!r}.{hint}") from error
        if not its_rule and (decode.__code__ in places or isinstance(error, IndexError)):
            raise
        raise RevisitError(
            f"transformers cannot generate with these arguments, or with the model's generation_config.json: {brief(error)}"
        ) from error
    return (output, made) if trace is True and made else output


def _check_drawing(model: Model, kwargs: Mapping[str, Any]) -> None:
    """Raises RevisitError for too many beams, a length that is not a whole number, or sampling settings out of range."""
    length = kwargs.get("max_new_tokens")
    if length is not None and (isinstance(length, bool) or not hasattr(length, "__index__")):
        raise RevisitError(f"max_new_tokens must be a whole number, not {length!r}.")
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    given = {name: kwargs.get(name, getattr(config, name, None)) for name in ("num_beams", "temperature", "top_p")}
    if not kwargs.get("do_sample", getattr(config, "do_sample", None)):
        given = {"num_beams": given["num_beams"]}
    if asked := {name: value for name, value in given.items() if value is not None}:
        Drawing.read(asked, "generate")


def beams_asked(model: Model, kwargs: Mapping[str, Any]) -> int:
    """How many beams the arguments of `generate` ask for."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _stopping_at_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of generate() with `stop_strings` as a criterion: transformers loses the tokenizer on the way to a method."""
    strings, tokenizer = kwargs["stop_strings"], kwargs.get("tokenizer")
    if tokenizer is None:
        raise RevisitError("stop_strings needs the model's tokenizer: pass tokenizer=processor.tokenizer.")
    criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    rest = {name: value for name, value in kwargs.items() if name not in ("stop_strings", "tokenizer")}
    return {**rest, "stopping_criteria": StoppingCriteriaList(criteria)}


class MethodProcessor(LogitsProcessor):
    """The method as the first logits processor: it sees the raw logits, the others see its result."""

    def __init__(self, run: Run, refine: Refine) -> None:
        self.run, self.refine = run, refine

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.run.raw = scores
        return self.refine(input_ids, scores)


class TrackedCriteria(StoppingCriteriaList):
    """The loop's own stopping criteria; the rows that they end are remembered."""

    def __init__(self, run: Run, criteria: Sequence[StoppingCriteria] | None) -> None:
        super().__init__(criteria or [])
        self.run = run

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        ended: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        self.run.recorder.ended.add(ended)
        return ended


class FallbackProcessor(LogitsProcessor):
    """Where the others have ruled out all that the method left, the row is decoded plainly: the others on the raw logits.

    On a GPU the others are asked twice at every step, so that the host need not wait to know whether they must be; unless
    they may count their calls.
    """

    def __init__(self, run: Run, others: LogitsProcessorList) -> None:
        self.run, self.others = run, others
        own = logits_process.__name__
        self.repeatable = all(type(o).__module__ == own and not isinstance(o, NOT_REPEATABLE) for o in others)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        nothing = ~(scores.amax(-1) > -torch.inf)  # (rows,), also where warpers made NaN of nothing
        ask_always = self.repeatable and not scores.is_cpu
        if not ask_always and not bool(nothing.any()):
            return scores
        assert self.run.raw is not None
        plain: Tensor = self.others(input_ids, self.run.raw)  # type: ignore[arg-type]
        return torch.where(nothing[:, None], plain, scores)


def decode(
    method: Method,
    model: Model,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    generation_config: GenerationConfig | None,
    *,
    trace: Trace | None = None,
    vision_mask: Tensor | None = None,
    processor: Processor | None = None,
    **model_kwargs: Any,
) -> GenerateOutput | Tensor:
    """Decode one call by a method, as transformers' `custom_generate`.

    Args:
        method: The method.
        model: The model.
        input_ids: (rows, T) the prompt, as transformers prepared it, like everything that follows.
        logits_processor: Processors that act after the method.
        stopping_criteria: What ends a row.
        generation_config: The settings of the call.
        trace: Filled with what the method does.
        vision_mask: (batch, T) the vision positions of prompts given as embeddings.
        processor: The model's processor.
        **model_kwargs: What the model takes.
    """
    caller = _arguments_of_generate()
    assert generation_config is not None  # _arguments_of_generate has found transformers' generate
    mode = generation_config.get_generation_mode(caller.get("assistant_model"))
    _refuse(mode, generation_config, caller)
    _check_context(model, input_ids, model_kwargs)
    with ExitStack() as stack:
        trace = trace if trace is not None else Trace()
        inputs = dict(caller.get("kwargs") or {})
        run = Run(
            method, model, input_ids, model_kwargs, inputs, generation_config, trace, stack, vision_mask, processor
        )
        loop = Loop(run, mode, LogitsProcessorList(logits_processor or []), stopping_criteria, caller)
        output = run.method.decode(run, loop)
        if isinstance(output, Tensor) and generation_config.return_dict_in_generate:
            output = GenerateDecoderOnlyOutput(sequences=output)  # type: ignore[arg-type]
        sequences = output if isinstance(output, Tensor) else output.sequences
        run.recorder.finish(sequences, _tokenizer(run) if trace.record else None)
        return output


class Loop:
    """The decoding loop of one call: transformers' own, and its pieces for a method that decodes by a loop of its own."""

    def __init__(
        self,
        run: Run,
        mode: GenerationMode,
        others: LogitsProcessorList,
        criteria: Sequence[StoppingCriteria] | None,
        caller: dict[str, Any],
    ) -> None:
        self.run, self._others = run, others
        self._function = getattr(type(run.model), GENERATION_MODES_MAPPING[mode])
        self._criteria = TrackedCriteria(run, criteria)
        self._options = {"synced_gpus": bool(caller.get("synced_gpus"))}
        if caller.get("streamer") is not None:
            self._options["streamer"] = caller["streamer"]

    def __call__(self, refine: Refine) -> GenerateOutput | Tensor:
        """Run transformers' loop with `refine` before all other logits processors."""
        last = [FallbackProcessor(self.run, self._others)] if self._others else []
        output: GenerateOutput | Tensor = self._function(
            self.run.loop_model,
            self.run.input_ids,
            logits_processor=LogitsProcessorList(
                [MethodProcessor(self.run, checked(self.run.method, self.run, refine)), *self._others, *last]
            ),
            stopping_criteria=self._criteria,
            generation_config=self.run.generation_config,
            **self._options,
            **self.run.model_kwargs,
        )
        return output

    def scores(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """What the caller's other logits processors (temperature, minimum length, ...) leave of a method's scores.  (rows, V)"""
        processed: Tensor = self._others(input_ids, scores)  # type: ignore[arg-type]
        return FallbackProcessor(self.run, self._others)(input_ids, processed) if self._others else processed

    def ended(self, input_ids: Tensor) -> Tensor:
        """Which rows end with their newest token: by an end token, their length or another stopping criterion.  -> (rows,)"""
        ended: Tensor = self._criteria(input_ids, None)
        return ended


def _tokenizer(run: Run) -> Tokenizer | None:
    """The model's tokenizer, for the text of recorded tokens; None if there is none."""
    try:
        return run.processor.tokenizer
    except RevisitError:
        return None


def _check_context(model: Model, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raises RevisitError for a prompt that is longer than the model's context."""
    config = text_config(model.config)
    limit = getattr(config, "max_position_embeddings", None)
    embeds = model_kwargs.get("inputs_embeds")
    length = max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
    rope = getattr(config, "rope_parameters", None) or {}
    stretched = isinstance(rope, dict) and "factor" in str(rope)  # then the limit is not stated
    if isinstance(limit, int) and limit > 0 and length > limit and not stretched:
        raise RevisitError(
            f"The prompt has {length} tokens, including its image, and the context of {describe(model)} has {limit}: shorten the prompt, "
            "or send fewer or smaller images."
        )


def _arguments_of_generate() -> dict[str, Any]:
    """The arguments that generate() was called with.

    transformers drops `streamer`, `assistant_model` and `synced_gpus` on the way to a callable `custom_generate`, and
    consumes the pixels before it. They are still in the frame of generate(), which is a caller of ours.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and Path(frame.f_code.co_filename).match(
            "transformers/generation/utils.py"
        ):
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    raise RevisitError(
        "Do not call a decoding method directly: use model.generate(..., custom_generate=method) or revisit.generate(model, ..., "
        "method=method)."
    )


def _refuse(mode: GenerationMode, generation_config: GenerationConfig, caller: dict[str, Any]) -> None:
    """Raises RevisitError for what cannot be done exactly."""
    if mode not in SUPPORTED_MODES:
        name = str(getattr(mode, "value", mode)).replace("_", " ")
        raise RevisitError(
            f"Decoding methods work with greedy search, sampling and beams, not with {name}: remove the options that enable it."
        )
    if getattr(generation_config, "prefill_chunk_size", None) is not None:
        raise RevisitError(
            "prefill_chunk_size is not supported: with it, transformers loses the image between chunks; remove it."
        )
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE) and caller.get("streamer") is not None:
        raise RevisitError("Beam search cannot be streamed: remove the streamer, or decode without beams.")
