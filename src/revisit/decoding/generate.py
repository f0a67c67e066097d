"""`revisit.generate`: transformers' `generate()` with a decoding method."""

from __future__ import annotations

from collections.abc import Mapping
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig

from revisit.decoding.arguments import passing
from revisit.decoding.loop import wrong_arguments
from revisit.decoding.method import Method, MethodLike, as_method
from revisit.decoding.settings import CallOptions
from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.families import IMAGE_INPUTS
from revisit.models.parts import describe, unsupported

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput

    from revisit.decoding.trace import Trace
    from revisit.models.types import Model, Processor


def generate(
    model: Model,
    *args: Tensor,
    method: MethodLike = "revisit",
    trace: Trace | None = None,
    processor: Processor | None = None,
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """Generate text with a decoding method: `model.generate(...)` with one more argument, `method`.

    `model.generate(..., custom_generate=method)` does the same with a `Method`, not with its name or class.

    Examples:
        >>> model, processor = revisit.load("llava-hf/llava-1.5-7b-hf")
        >>> inputs = revisit.prepare(processor, ["Describe the image."], [[image]], device=model.device)
        >>> output = revisit.generate(model, **inputs, max_new_tokens=64)
        >>> revisit.generated_text(processor, output, inputs)
        ['A cat on a sofa.']

    Args:
        model: A vision-language model, from `revisit.load` or from transformers.
        *args: As for `model.generate`; usually empty.
        method: A method (`revisit.VCD(alpha=0.5)`), its class, or its name with settings (`"revisit:alpha=1e-3"`). A class or
            a name takes the settings recommended for the model. `"greedy"` is plain decoding. `revisit.methods.names()` lists
            all methods.
        trace: A `revisit.Trace` to fill with what the method does.
        processor: The model's processor, for methods and options that need one. By default it is the one from `revisit.load`,
            or is loaded from the model's own name or path.
        **kwargs: Everything else that `model.generate` takes: the processor's outputs, `max_new_tokens`, `do_sample`,
            `num_beams`, a streamer, ... Prompts given as `inputs_embeds` also need `vision_mask`, a (batch, length) mask of
            their vision positions.

    Returns:
        What `model.generate` returns: token ids (batch, length), prompt included, or transformers' output object with
        `return_dict_in_generate=True`.

    Raises:
        RevisitError: If an argument is wrong, or the method does not support the model.
    """
    if not hasattr(model, "generate"):
        raise RevisitError(
            f"The first argument must be a model with generate(), such as revisit.load returns, not a {type(model).__name__}."
        )
    if args and isinstance(args[0], Mapping):
        raise RevisitError("Pass the inputs as keyword arguments, with two stars: generate(model, **inputs, ...).")
    if "custom_generate" in kwargs:
        raise RevisitError("revisit.generate sets custom_generate itself: pass the method with method= instead.")
    chosen = as_method(method, model)
    if chosen.name != "greedy" and families.of(getattr(model.config, "model_type", "")).unsupported:
        raise RevisitError(unsupported(model.config, describe(model)))  # its generate() ignores custom_generate
    # Before transformers copies the prompt for each beam.
    CallOptions.read({"num_beams": beam_count(model, kwargs)}, "generate")
    kwargs |= {"trace": trace, "processor": processor}
    absent = ("trace", "processor", *IMAGE_INPUTS)  # transformers does not expect None for these
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in absent}
    for name in kwargs.keys() & (type(chosen).model_fields.keys() - vars(GenerationConfig()).keys()):
        text = f"{chosen.name}:{name}={kwargs[name]}"
        raise RevisitError(f"{name} is a setting of the method, not an argument of generate: pass method={text!r}.")
    try:
        with passing(kwargs):
            output: GenerateOutput | Tensor = model.generate(*args, custom_generate=chosen, **kwargs)  # type: ignore[operator]
    except (ValueError, TypeError, ImportError) as error:
        if Method.__call__.__code__ in (frame.f_code for frame, _ in walk_tb(error.__traceback__)):
            raise
        raise wrong_arguments(error) from error
    return output


def beam_count(model: Model, kwargs: Mapping[str, Any]) -> int:
    """Return the number of beams in the arguments of `generate`."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1
