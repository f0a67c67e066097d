"""One call of a decoding method by transformers' `generate()`.

`generate()` prepares everything (cache, expansion for beams, processors, stopping criteria) and calls the method as its
`custom_generate`. The method runs transformers' own sampling or beam loop, with one logits processor before all others,
or a loop of its own (`Method.decode`). Nothing in transformers is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
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

from revisit.decoding.run import Run
from revisit.decoding.settings import Drawing
from revisit.decoding.speculation import Speculation
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError, brief
from revisit.models import families
from revisit.models.families import PIXELS
from revisit.models.parts import context_length, describe, text_config
from revisit.models.thoughts import thoughts_of
from revisit.models.types import Model, Processor

if TYPE_CHECKING:
    from transformers import StoppingCriteria
    from transformers.generation.utils import GenerateOutput

    from revisit.decoding.method import Method, StepFunction

SUPPORTED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
CHUNKS_SINCE = "5.23"  # of transformers: earlier versions lose the image between the chunks of a prefill
# The processors of transformers whose result may differ between two calls in one step.
NOT_REPEATABLE = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


@contextmanager
def open_call(
    method: Method,
    model: Model,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    config: GenerationConfig | None,
    model_kwargs: dict[str, Any],
    *,
    trace: Trace | None,
    vision_mask: Tensor | None,
    processor: Processor | None,
    stop_strings: str | list[str] | None,
) -> Iterator[Loop]:
    """Check and complete what transformers prepared for one call, and remove all hooks when it ends.

    Raises:
        RevisitError: If the options of the call are wrong, or cannot be combined with a decoding method.
    """
    caller = _arguments_of_generate()
    assert config is not None  # _arguments_of_generate has found transformers' generate
    if not isinstance(trace, Trace | None):
        raise RevisitError(f"trace must be a revisit.Trace, not a {type(trace).__name__}.")
    inputs = _in_float32(model, dict(caller.get("kwargs") or {}))
    model_kwargs = _in_float32(model, model_kwargs)
    mode = config.get_generation_mode(caller.get("assistant_model"))
    _check_options(mode, config, caller)
    _check_forwards(method, model, mode, config, caller.get("assistant_model"))
    if method.own_beams > 1 and config.num_beams == 1:
        input_ids, model_kwargs = _with_beams(method, model, input_ids, model_kwargs, config, caller)
        mode = config.get_generation_mode()
    _check_context(model, input_ids, model_kwargs)
    trace = trace if trace is not None else Trace()
    with ExitStack() as stack, _errors_in_one_sentence(model, config):
        run = Run(method, model, input_ids, model_kwargs, inputs, config, trace, stack, vision_mask, processor)
        phase_of(run, method)  # also for a method with a loop of its own
        criteria = list(stopping_criteria or [])
        if stop_strings is not None:
            criteria.append(StopStringCriteria(run.processor.tokenizer, stop_strings))  # type: ignore[arg-type]
        yield Loop(run, mode, LogitsProcessorList(logits_processor or []), criteria, caller)


class MethodProcessor(LogitsProcessor):
    """Run the method as the first logits processor: it gets the raw logits, and the others get its result."""

    def __init__(self, run: Run, step: StepFunction) -> None:
        self.run, self.step = run, step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.run.raw = scores
        if isinstance(self.run.loop_model, Speculation):
            self.run.recorder.mark()  # the counters are undone if the token before is rejected
        return self.step(input_ids, scores)


class TrackedCriteria(StoppingCriteriaList):
    """Evaluate the call's stopping criteria, and note the rows that they end."""

    def __init__(self, run: Run, criteria: Sequence[StoppingCriteria]) -> None:
        super().__init__(criteria)
        self.run = run

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        ended: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]
        self.run.recorder.ended.add(ended)
        return ended


class FallbackProcessor(LogitsProcessor):
    """Fall back to plain decoding for rows with no token left: apply the other processors to the raw logits.

    On a GPU, repeatable processors are applied twice at every step: reading whether it is necessary would make the host
    wait.
    """

    def __init__(self, run: Run, others: LogitsProcessorList) -> None:
        self.run, self.others = run, others
        own = logits_process.__name__
        self.repeatable = all(type(o).__module__ == own and not isinstance(o, NOT_REPEATABLE) for o in others)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        empty = ~(scores.amax(-1) > -torch.inf)  # (rows,), also where warpers returned NaN for an empty set
        always = self.repeatable and not scores.is_cpu
        if not always and not bool(empty.any()):
            return scores
        assert self.run.raw is not None
        plain: Tensor = self.others(input_ids, self.run.raw)  # type: ignore[arg-type]
        return torch.where(empty[:, None], plain, scores)


class Loop:
    """The decoding loop of one call: transformers' own, and its parts for methods with a loop of their own."""

    def __init__(
        self,
        run: Run,
        mode: GenerationMode,
        others: LogitsProcessorList,
        criteria: Sequence[StoppingCriteria],
        caller: dict[str, Any],
    ) -> None:
        self.run, self._others = run, others
        self._function = getattr(type(run.model), GENERATION_MODES_MAPPING[mode])
        self._criteria = TrackedCriteria(run, criteria)
        self._options: dict[str, Any] = {"synced_gpus": bool(caller.get("synced_gpus"))}
        if caller.get("streamer") is not None:
            self._options["streamer"] = caller["streamer"]
        self._speculates = mode == GenerationMode.ASSISTED_GENERATION
        if self._speculates:
            self._options |= {name: caller.get(name) for name in ("assistant_model", "inputs_tensor")}

    def __call__(self, step: StepFunction) -> GenerateOutput | Tensor:
        """Run transformers' loop with `step` before all other logits processors."""
        step = checked(self.run, self.run.method, step)
        if self._speculates:
            self.run.loop_model = Speculation(self.run, self._others)
        last = [FallbackProcessor(self.run, self._others)] if self._others else []
        output: GenerateOutput | Tensor = self._function(
            self.run.loop_model,
            self.run.input_ids,
            logits_processor=LogitsProcessorList([MethodProcessor(self.run, step), *self._others, *last]),
            stopping_criteria=self._criteria,
            generation_config=self.run.generation_config,
            **self._options,
            **self.run.model_kwargs,
        )
        return output

    def scores(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the call's other logits processors (temperature, minimum length, ...) to a method's scores.  (rows, V)"""
        processed: Tensor = self._others(input_ids, scores)  # type: ignore[arg-type]
        return FallbackProcessor(self.run, self._others)(input_ids, processed) if self._others else processed

    def ended(self, input_ids: Tensor) -> Tensor:
        """Return which rows end with their newest token, by any stopping criterion.  -> (rows,)"""
        ended: Tensor = self._criteria(input_ids, None)
        return ended

    def finish(self, output: GenerateOutput | Tensor) -> GenerateOutput | Tensor:
        """Complete the trace, and return the output of a method's `decode` in the requested form."""
        if isinstance(output, Tensor) and self.run.generation_config.return_dict_in_generate:
            output = GenerateDecoderOnlyOutput(sequences=output)  # type: ignore[arg-type]
        sequences = output if isinstance(output, Tensor) else output.sequences
        tokenizer = None
        if self.run.trace.record:
            with suppress(RevisitError):  # without a processor, recorded tokens have no text
                tokenizer = self.run.processor.tokenizer
        self.run.recorder.finish(sequences, tokenizer)
        return output


def checked(run: Run, method: Method, step: StepFunction) -> StepFunction:
    """Wrap what `begin` returned: check the shape of its results, and count the steps that it does not count itself."""
    if not callable(step):
        raise RevisitError(
            f"The method {method.name!r} cannot decode: its begin(run) must return a function of (input_ids, logits), not "
            f"{type(step).__name__}."
        )

    in_phase = phase_of(run, method)

    def checked_step(input_ids: Tensor, logits: Tensor) -> Tensor:
        run.recorder.noted = False
        run.check_attention()
        before = run.recorder.before_phase() if in_phase else []
        scores = step(input_ids, logits)
        shape = getattr(scores, "shape", None)  # known without waiting for the device
        if shape != logits.shape:
            raise RevisitError(
                f"The method {method.name!r} must return logits of the same shape, {tuple(logits.shape)}, not "
                f"{type(scores).__name__ if shape is None else tuple(shape)}."
            )
        if not run.recorder.noted:
            run.recorder.note_scores(input_ids, logits, scores)
        if in_phase:
            rows = in_phase(input_ids)
            run.recorder.limit(rows, input_ids, logits, before)
            scores = scores.where(rows[:, None], logits)
        return scores

    return checked_step


def phase_of(run: Run, method: Method) -> Callable[[Tensor], Tensor] | None:
    """Return a function of input_ids that returns which rows are in the method's phase, (rows,); None if all always are."""
    if method.phase == "both":
        return None
    if method.changes_forward:
        raise RevisitError(
            f"{method.name} changes the model's forward pass, so it cannot be limited to the {method.phase}: leave out phase."
        )
    thoughts = thoughts_of(run.model, run.processor)
    if thoughts is None:
        opening, closing = families.of(run.model.config.model_type).thought
        raise RevisitError(
            f"The tokenizer of {describe(run.model)} has no tokens {opening} and {closing} for thoughts: leave out phase."
        )
    return thoughts.inside if method.phase == "thought" else lambda input_ids: ~thoughts.inside(input_ids)


@contextmanager
def _errors_in_one_sentence(model: Model, config: GenerationConfig) -> Iterator[None]:
    """Raise RevisitError for errors of transformers that come from the prompt or from options of the call."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        if isinstance(error, RevisitError):
            raise
        if "image tokens" in str(error).lower():
            raise RevisitError(
                f"The prompt's image tokens do not match the image ({str(error)[:200]}): use this model's processor and pass "
                "everything it returned."
            ) from error
        if config.prefill_chunk_size is not None:
            raise RevisitError(
                f"transformers {transformers.__version__} cannot prefill {describe(model)} in chunks ({brief(error)}): remove "
                "prefill_chunk_size."
            ) from error
        *_, (last, _) = walk_tb(error.__traceback__)
        # such as a bias for tokens that do not exist, or speculative decoding of several prompts
        if last.f_code.co_filename == logits_process.__file__ or last.f_code.co_name == "_assisted_decoding":
            raise RevisitError(
                f"transformers cannot generate with these arguments, or with the model's generation_config.json: {brief(error)}"
            ) from error
        raise


def _in_float32(model: Model, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with pixels in float32 for a float32 model: some processors return half precision for every model."""
    if getattr(model, "dtype", None) != torch.float32:
        return inputs
    return inputs | {name: inputs[name].float() for name in PIXELS if isinstance(inputs.get(name), Tensor)}


def _with_beams(
    method: Method,
    model: Any,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    caller: dict[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """Repeat a prepared prompt for a method that needs beams, in a call that sets none."""
    if caller.get("prefix_allowed_tokens_fn") is not None or config.cache_implementation is not None:
        raise RevisitError(f"{type(method).__name__} needs beams here: pass num_beams={method.own_beams}.")
    config.num_beams = method.own_beams  # transformers made this configuration for this call
    expanded: tuple[Tensor, dict[str, Any]] = model._expand_inputs_for_generation(
        expand_size=config.num_beams, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
    )
    return expanded


def _check_context(model: Model, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise RevisitError for a prompt that is longer than the model's context."""
    limit = context_length(model.config)
    embeds = model_kwargs.get("inputs_embeds")
    length = max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
    if limit is not None and length > limit:
        raise RevisitError(
            f"The prompt has {length} tokens, including its image, and the context of {describe(model)} has {limit}: shorten the prompt, "
            "or send fewer or smaller images."
        )


def _arguments_of_generate() -> dict[str, Any]:
    """Return the arguments of the running call of transformers' generate().

    transformers does not pass `streamer`, `assistant_model` and `synced_gpus` to a callable `custom_generate`, and some models
    consume the pixels before it. All of them are in the frame of generate(), which is on the stack.
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


def _check_options(mode: GenerationMode, config: GenerationConfig, caller: dict[str, Any]) -> None:
    """Raise RevisitError for options that are out of range or not supported with a decoding method."""
    names = ("num_beams", "temperature", "top_p") if config.do_sample else ("num_beams",)
    Drawing.read({name: value for name in names if (value := getattr(config, name)) is not None}, "generate")
    if mode not in SUPPORTED_MODES:
        name = str(getattr(mode, "value", mode)).replace("_", " ")
        raise RevisitError(
            f"Decoding methods work with greedy search, sampling, beams and speculation, not with {name}: remove the options that "
            "enable it."
        )
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE) and caller.get("streamer") is not None:
        raise RevisitError("Beam search cannot be streamed: remove the streamer, or decode without beams.")
    drafts = (caller.get("assistant_model"), config.prompt_lookup_num_tokens, config.assistant_early_exit)
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE) and any(x is not None for x in drafts):
        raise RevisitError(
            "Beam search cannot be speculative: remove num_beams, or assistant_model, prompt_lookup_num_tokens and assistant_early_exit."
        )
    if drafts[1] is not None and not (isinstance(drafts[1], int) and drafts[1] > 0):
        raise RevisitError(f"prompt_lookup_num_tokens must be a number of tokens above 0, not {drafts[1]!r}.")


def _check_forwards(
    method: Method, model: Model, mode: GenerationMode, config: GenerationConfig, assistant: Any
) -> None:
    """Raise RevisitError for speculative decoding and chunked prefill where they would not be exact."""
    text = text_config(model.config)
    if assistant is not None and not hasattr(assistant, "generate"):
        raise RevisitError(f"assistant_model must be a loaded model, not a {type(assistant).__name__}.")
    if assistant is not None and text_config(assistant.config).vocab_size != text.vocab_size:
        raise RevisitError(
            "The assistant_model has another vocabulary than the model: use one with the same tokenizer, or prompt_lookup_num_tokens."
        )
    if mode == GenerationMode.ASSISTED_GENERATION and not method.speculative:
        raise RevisitError(
            f"{method.name} cannot decode speculatively, because its steps depend on more than the logits of one position: remove "
            "assistant_model, prompt_lookup_num_tokens or assistant_early_exit, or use another method."
        )
    early = config.assistant_early_exit
    if early is not None and not (isinstance(early, int) and 1 <= early <= text.num_hidden_layers):
        raise RevisitError(
            f"assistant_early_exit must be a number of decoder layers from 1 to {text.num_hidden_layers}, not {early!r}."
        )
    if config.prefill_chunk_size is None:
        return
    if not method.speculative:
        raise RevisitError(f"{method.name} reads the prompt in one forward: remove prefill_chunk_size.")
    if families.of(model.config.model_type).attends_ahead:
        raise RevisitError(
            f"The positions of an image attend to later ones in {describe(model)}, so that a prompt must run in one forward: remove "
            "prefill_chunk_size."
        )
    if Version(transformers.__version__) < Version(CHUNKS_SINCE):
        raise RevisitError(
            f"prefill_chunk_size needs transformers {CHUNKS_SINCE}: {transformers.__version__} loses the image between chunks."
        )
