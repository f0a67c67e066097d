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
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StopStringCriteria,
)
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from revisit.decoding.options import check_options
from revisit.decoding.processors import OtherProcessors
from revisit.decoding.recorder import EndedRows, Recorder
from revisit.decoding.run import Run
from revisit.decoding.speculation import Speculation
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError, brief
from revisit.models import families
from revisit.models.families import PIXELS
from revisit.models.parts import check_context, describe
from revisit.models.thoughts import thoughts_of
from revisit.models.types import Model, Processor

if TYPE_CHECKING:
    from transformers import StoppingCriteria
    from transformers.generation.utils import GenerateOutput

    from revisit.decoding.method import Method, StepFunction


def decode_call(
    method: Method,
    model: Model,
    input_ids: Tensor,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    model_kwargs: dict[str, Any],
    trace: Trace | None,
    vision_mask: Tensor | None,
    processor: Processor | None,
    stop_strings: str | list[str] | None,
) -> GenerateOutput | Tensor:
    """Decode one call that transformers has prepared, and remove all hooks when it ends.

    Raises:
        RevisitError: If the options of the call are wrong, or cannot be combined with the method.
    """
    arguments = _arguments_of_generate()
    config: GenerationConfig = arguments["generation_config"]  # transformers made it for this call
    if not isinstance(trace, Trace | None):
        raise RevisitError(f"trace must be a revisit.Trace, not a {type(trace).__name__}.")
    mode = check_options(method, model, config, arguments)
    model_kwargs, inputs = (_in_float32(model, given) for given in (model_kwargs, arguments.get("kwargs") or {}))
    if method.own_beams > 1 and config.num_beams == 1:
        if arguments.get("prefix_allowed_tokens_fn") is not None or config.cache_implementation is not None:
            needed = f"{type(method).__name__} needs beams (num_beams={method.own_beams})"
            if config.cache_implementation is not None:
                raise RevisitError(f"{needed}, which cannot be added to this KV cache: leave out cache_implementation.")
            raise RevisitError(f"{needed} here: pass num_beams.")
        config.num_beams, mode = method.own_beams, GenerationMode.BEAM_SEARCH
        input_ids, model_kwargs = model._expand_inputs_for_generation(  # type: ignore[operator]
            expand_size=config.num_beams, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
    embeds = model_kwargs.get("inputs_embeds")
    check_context(model, max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1]))
    with ExitStack() as stack, _translate_errors(model, config):
        ended = EndedRows(criteria, input_ids.shape[1], config.num_beams > 1)
        recorder = Recorder(Trace() if trace is None else trace, method, len(input_ids), ended, stack)
        run = Run(method, model, input_ids, model_kwargs, inputs, config, recorder, stack, vision_mask, processor)
        find_phase(run, method)  # also checks methods with a loop of their own
        if stop_strings is not None:
            ended.append(StopStringCriteria(run.processor.tokenizer, stop_strings))  # type: ignore[arg-type]
        loop = Loop(run, mode, LogitsProcessorList(processors), arguments)
        return loop.finish(method.decode(run, loop))


class Loop:
    """The decoding loop of one call: transformers' own, and its parts for methods with a loop of their own."""

    def __init__(
        self,
        run: Run,
        mode: GenerationMode,
        others: LogitsProcessorList,
        arguments: dict[str, Any],
    ) -> None:
        self.run = run
        self._function = getattr(type(run.model), GENERATION_MODES_MAPPING[mode])
        self._options: dict[str, Any] = {"synced_gpus": bool(arguments.get("synced_gpus"))}
        self._streamer = arguments.get("streamer")
        self._speculates = mode == GenerationMode.ASSISTED_GENERATION
        self.scores = OtherProcessors(run, others, checks_drafts=self._speculates)
        if self._speculates:
            self._options |= {name: arguments.get(name) for name in ("assistant_model", "inputs_tensor")}

    def __call__(self, step: StepFunction) -> GenerateOutput | Tensor:
        """Run transformers' loop with `step` before all other logits processors."""
        run, step = self.run, checked(self.run, self.run.method, step)
        if self._speculates:
            run.loop_model = Speculation(run, self.scores.repeatable)

        def first(input_ids: Tensor, logits: Tensor) -> Tensor:
            run.raw = logits
            if self._speculates:
                run.recorder.mark()  # the counters are rolled back if the previous token is rejected
            return step(input_ids, logits)

        output: GenerateOutput | Tensor = self._function(
            run.loop_model,
            run.input_ids,
            logits_processor=LogitsProcessorList([first, self.scores]),
            stopping_criteria=run.recorder.ended,
            generation_config=run.generation_config,
            **self._options,
            **({} if self._streamer is None else {"streamer": self._streamer}),
            **run.model_kwargs,
        )
        self._streamer = None
        return output

    def ended(self, input_ids: Tensor) -> Tensor:
        """Return which rows end with their newest token, by any stopping criterion.  -> (rows,)"""
        return self.run.recorder.ended(input_ids, None)

    def finish(self, output: GenerateOutput | Tensor) -> GenerateOutput | Tensor:
        """Complete the trace, and return the output of a method's `decode` in the requested form."""
        if isinstance(output, Tensor) and self.run.generation_config.return_dict_in_generate:
            output = GenerateDecoderOnlyOutput(sequences=output)  # type: ignore[arg-type]
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        if sequences is None:
            raise RevisitError(
                f"The method {self.run.method.name!r} must return token ids from its decode(run, loop), not {type(output).__name__}."
            )
        if self._streamer is not None:  # the method has a loop of its own
            for token in sequences[0, self.run.input_ids.shape[1] :].cpu():
                self._streamer.put(token[None])
            self._streamer.end()
        tokenizer = None
        if self.run.trace.record:
            with suppress(RevisitError):  # without a processor, recorded tokens have no text
                tokenizer = self.run.processor.tokenizer
        self.run.recorder.finish(sequences, tokenizer)
        return output


def checked(run: Run, method: Method, step: StepFunction) -> StepFunction:
    """Wrap the step of a method: check its results, count it if it does not count itself, and apply the method's phase."""
    if not callable(step):
        raise RevisitError(
            f"The method {method.name!r} cannot decode: its begin(run) must return a function of (input_ids, logits), not "
            f"{type(step).__name__}."
        )
    in_phase = find_phase(run, method)

    def checked_step(input_ids: Tensor, logits: Tensor) -> Tensor:
        run.recorder.counted = False
        run.check_attention()
        scores = step(input_ids, logits)
        shape = scores.shape if isinstance(scores, Tensor) else None  # known without waiting for the device
        if shape != logits.shape:
            raise RevisitError(
                f"The method {method.name!r} must return logits of the same shape, {tuple(logits.shape)}, not "
                f"{type(scores).__name__ if shape is None else tuple(shape)}."
            )
        if not run.recorder.counted:
            run.recorder.note_scores(input_ids, logits, scores)
        if in_phase:
            rows = in_phase(input_ids)
            run.recorder.note_phase(rows, input_ids, logits)
            scores = scores.where(rows[:, None], logits)
        return scores

    return checked_step


def find_phase(run: Run, method: Method) -> Callable[[Tensor], Tensor] | None:
    """Return a function from input_ids to the mask of rows in the method's phase, (rows,); None if all rows always are."""
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
def _translate_errors(model: Model, config: GenerationConfig) -> Iterator[None]:
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
        # For example a bias for tokens that do not exist, or speculative decoding of several prompts.
        if last.f_code.co_filename == logits_process.__file__ or last.f_code.co_name == "_assisted_decoding":
            raise wrong_arguments(error) from error
        raise


def wrong_arguments(error: Exception) -> RevisitError:
    """Return the error for arguments that transformers does not accept."""
    return RevisitError(
        f"transformers cannot generate with these arguments, or with the model's generation_config.json: {brief(error)}"
    )


def _in_float32(model: Model, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with pixels in float32 for a float32 model: some processors return half precision for every model."""
    if getattr(model, "dtype", None) != torch.float32:
        return dict(inputs)
    return inputs | {name: inputs[name].float() for name in PIXELS if isinstance(inputs.get(name), Tensor)}


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
