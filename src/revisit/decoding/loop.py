"""One call of a decoding method by transformers' `generate()`.

`generate()` prepares everything (cache, expansion for beams, processors, stopping criteria) and calls the method as its
`custom_generate`. The method runs transformers' own sampling or beam loop, with one logits processor before all others,
or a loop of its own (`Method.decode`). Nothing in transformers is patched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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

from revisit.decoding.arguments import Arguments
from revisit.decoding.arguments import take as arguments_of_call
from revisit.decoding.floor import floor_of
from revisit.decoding.method import Method, Step, StepResult
from revisit.decoding.options import check_options
from revisit.decoding.processors import OtherProcessors
from revisit.decoding.recorder import EndedRows, Recorder
from revisit.decoding.speculation import Speculation
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError, brief, did_you_mean
from revisit.forward.adapters import follow_rows
from revisit.forward.contrast import Contrasted
from revisit.forward.passes import Passes, advance
from revisit.forward.prompt import CACHE, Prompt
from revisit.forward.states import one_call
from revisit.models import families
from revisit.models.families import PIXELS
from revisit.models.parts import check_context, describe
from revisit.models.thoughts import thoughts_of
from revisit.models.types import Model, Processor

if TYPE_CHECKING:
    from transformers import StoppingCriteria
    from transformers.generation.utils import GenerateOutput

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def decode_call(
    method: Method,
    model: Model,
    input_ids: Tensor,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    trace: Trace | None,
    vision_mask: Tensor | None,
    processor: Processor | None,
    stop_strings: str | list[str] | None,
    inputs_tensor: Tensor | None,
) -> GenerateOutput | Tensor:
    """Decode one call that transformers has prepared, and remove all hooks when it ends.

    Raises:
        RevisitError: If the options of the call are wrong, or cannot be combined with the method.
    """
    arguments = arguments_of_call()
    if not isinstance(trace, Trace | None):
        raise RevisitError(f"trace must be a revisit.Trace, not a {type(trace).__name__}.")
    mode = check_options(method, model, config, arguments)
    model_kwargs, inputs = (_in_float32(model, given) for given in (model_kwargs, arguments.inputs))
    if method.own_beams > 1 and config.num_beams == 1:
        if arguments.prefix_allowed_tokens_fn is not None or config.cache_implementation is not None:
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
    name = " + ".join(type(link).__name__ for link in method.links or (method,))
    record = trace is not None and trace.record and not method.links
    prompt = Prompt(model, input_ids, inputs, model_kwargs, config, name, record, processor, vision_mask)
    with one_call(), ExitStack() as stack, _translate_errors(model, config):
        ended = EndedRows(criteria, input_ids.shape[1], config.num_beams > 1)
        if stop_strings is not None:
            ended.append(StopStringCriteria(prompt.processor.tokenizer, stop_strings))  # type: ignore[arg-type]
        if hasattr(model, "peft_config"):
            follow_rows(model.get_decoder(), len(input_ids), stack)
        recorder = Recorder(trace, method, prompt, ended, stack)
        others = LogitsProcessorList(processors)
        loop = Loop(method, prompt, Passes(prompt, stack), recorder, mode, others, arguments, inputs_tensor)
        return loop.finish(method.decode(prompt, loop.passes, loop))


class Link:
    """A method in one call: its step and its phase. Calling it takes a step of all rows, checks it and has it recorded."""

    def __init__(self, method: Method, step: Step, prompt: Prompt, recorder: Recorder) -> None:
        if not callable(step):
            raise RevisitError(
                f"The method {method.name!r} cannot decode: its begin(prompt, passes) must return a function of (input_ids, logits), not "
                f"{type(step).__name__}."
            )
        self.name, self.step, self.prompt, self.recorder = method.name, step, prompt, recorder
        self.in_phase = find_phase(prompt, method)

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Return the scores of the method's step.  (rows, length), (rows, V) -> (rows, V)"""
        return self.take(input_ids, logits, self.step(input_ids, logits))

    def take(self, input_ids: Tensor, logits: Tensor, result: Tensor | StepResult) -> Tensor:
        """Return the scores of what a step returned: only where the method acted and in its phase."""
        result = result if isinstance(result, StepResult) else StepResult(result)
        scores = result.scores
        shape = scores.shape if isinstance(scores, Tensor) else None  # known without waiting for the device
        if shape != logits.shape:
            raise RevisitError(
                f"The method {self.name!r} must return logits of the same shape, {tuple(logits.shape)}, not "
                f"{type(scores).__name__ if shape is None else tuple(shape)}."
            )
        if scores is not logits:
            if result.acted is not None:
                scores = scores.where(result.acted[:, None].to(scores.device), logits)
            if self.prompt.beams and not result.comparable:  # the logits of beams are already normalized
                scores = scores.log_softmax(-1)
        in_phase = None if self.in_phase is None else self.in_phase(input_ids)  # (rows,)
        self.recorder.note(input_ids, logits, result._replace(scores=scores), in_phase)
        return scores if in_phase is None else scores.where(in_phase[:, None], logits)


class Loop:
    """The decoding loop of one call: transformers' own, and the parts of it for methods with a loop of their own.

    Attributes:
        output: Of the model, in the last `forward`.
    """

    def __init__(
        self,
        method: Method,
        prompt: Prompt,
        passes: Passes,
        recorder: Recorder,
        mode: GenerationMode,
        others: LogitsProcessorList,
        arguments: Arguments,
        inputs_tensor: Tensor | None,
    ) -> None:
        self.method, self.prompt, self.passes, self.recorder = method, prompt, passes, recorder
        self._function = getattr(type(prompt.model), GENERATION_MODES_MAPPING[mode])
        self._options: dict[str, Any] = {"synced_gpus": bool(arguments.synced_gpus)}
        self._streamer = arguments.streamer
        self._speculates = mode == GenerationMode.ASSISTED_GENERATION
        floor = floor_of(method, prompt, passes, recorder)
        self._others = OtherProcessors(passes, prompt.config, others, floor, checks_drafts=self._speculates)
        if self._speculates:
            self._options |= {"assistant_model": arguments.assistant_model, "inputs_tensor": inputs_tensor}
        self.output: Any = None
        self._kwargs = dict(prompt.prepared)  # keyword arguments for the next `forward`
        self._length = 0  # tokens per row at the last call of `forward`
        self._link = Link(method, lambda _, logits: logits, prompt, recorder)  # of a method with a loop of its own

    def __call__(self) -> GenerateOutput | Tensor:
        """Run transformers' loop with the method's step before all other logits processors."""
        passes, recorder = self.passes, self.recorder
        link = self._begin(self.method, recorder)
        if self._speculates:
            passes.model = Speculation(self.prompt, self._others.repeatable, recorder.accept)

        def first(input_ids: Tensor, logits: Tensor) -> Tensor:
            passes.check_attention()
            passes.raw, passes.ended = logits, recorder.ended.before(input_ids)
            if self._speculates:
                recorder.mark()  # the counters are rolled back if the previous token is rejected
            return link(input_ids, logits)

        output: GenerateOutput | Tensor = self._function(
            passes.model,
            self.prompt.ids,
            logits_processor=LogitsProcessorList([first, self._others]),
            stopping_criteria=recorder.ended,
            generation_config=self.prompt.config,
            **self._options,
            **({} if self._streamer is None else {"streamer": self._streamer}),
            **self.prompt.prepared,
        )
        self._streamer = None
        return output

    def _begin(self, method: Method, recorder: Recorder) -> Link:
        """Begin the methods of a chain, or a single method."""
        if not method.links:
            return Link(method, method.begin(self.prompt, self.passes), self.prompt, recorder)
        for inner in method.links:
            if type(inner).decode is not Method.decode:
                raise RevisitError(f"Chain: {inner.name} has its own decoding loop; use it alone.")
        links = [self._begin(inner, recorder.link(inner)) for inner in method.links]
        every_row = torch.ones(len(self.prompt.ids), dtype=torch.bool, device=self.prompt.ids.device)

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            scores = logits
            for link in links:
                scores = link(input_ids, scores)
            return StepResult(scores, acted=every_row if scores is logits else None, comparable=True)

        return Link(method, step, self.prompt, recorder)

    # -- for methods with a loop of their own -------------------------------------------------------------------------

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the model on the tokens that the KV cache does not hold yet.

        Args:
            input_ids: (rows, length) the prompt and all tokens chosen so far; longer than at the last `forward` or `crop`.

        Returns:
            The model's own logits for the next token.  (rows, V), float32
        """
        model, prompt = self.passes.model, self.prompt
        if not self._length:
            if not input_ids.shape[1]:
                raise RevisitError(
                    f"{prompt.method} has its own decoding loop, which needs the prompt as input_ids, not as inputs_embeds."
                )
            output = model._prefill(input_ids, prompt.config, self._kwargs)
        else:
            new = input_ids.shape[1] - self._length
            if new < 1:
                raise RevisitError("loop.forward needs at least one new token: append one, or crop first.")
            output, self._kwargs = advance(model, input_ids, self._kwargs, new, new)
        self.passes.check_attention()
        self.output, self._length = output, input_ids.shape[1]
        raw: Tensor = output.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        return raw

    def crop(self, length: int) -> None:
        """Step back to the first `length` tokens of each row, in the KV cache and in the trace too."""
        drop, prompt = self._length - length, self.prompt
        if drop < 0 or length < prompt.ids.shape[1]:
            raise RevisitError(
                f"loop.crop({length}): the length must be between {prompt.ids.shape[1]} (the "
                f"prompt) and {self._length} (all tokens run so far)."
            )
        cache = self._kwargs.get(CACHE)
        try:
            if isinstance(self.passes.model, Contrasted):
                raise NotImplementedError("it also holds the rows of a contrasted pass")
            if cache is not None:
                cache.crop(-drop)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            raise RevisitError(
                f"{prompt.method} steps back, which the KV cache of {describe(prompt.model)} does "
                f"not support ({error}): use the default cache, or another method."
            ) from error
        for name in PER_TOKEN:
            if isinstance(value := self._kwargs.get(name), Tensor):
                self._kwargs[name] = value[..., : value.shape[-1] - drop]
        self._length = length
        self.recorder.step_back(length)

    def reorder(self, rows: Tensor) -> None:
        """Continue row i from row rows[i], which belongs to the same item.  (rows,)"""
        wrapper = self.passes.wrapped()
        if (cache := self._kwargs.get(CACHE)) is not None:
            self._kwargs[CACHE] = wrapper._reorder_cache(cache, rows)

    def scores(self, input_ids: Tensor, logits: Tensor, result: Tensor | StepResult | None = None) -> Tensor:
        """Record a step, and return its scores after the other logits processors.

        Args:
            input_ids: (rows, length).
            logits: (rows, V) the model's own.
            result: What the method makes of them; by default nothing.
        """
        self.passes.raw = logits
        scores = self._link.take(input_ids, logits, logits if result is None else result)
        return self._others(input_ids, scores)

    def ended(self, input_ids: Tensor) -> Tensor:
        """Return which rows end with their newest token, by any stopping criterion.  -> (rows,)"""
        return self.recorder.ended(input_ids, None)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, output: GenerateOutput | Tensor) -> GenerateOutput | Tensor:
        """Complete the trace, and return the output of a method's `decode` in the requested form."""
        if isinstance(output, Tensor) and self.prompt.config.return_dict_in_generate:
            output = GenerateDecoderOnlyOutput(sequences=output)  # type: ignore[arg-type]
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        if sequences is None:
            raise RevisitError(
                f"The method {self.method.name!r} must return token ids from its decode, not {type(output).__name__}."
            )
        if self._streamer is not None:  # the method has a loop of its own
            for token in sequences[0, self.prompt.ids.shape[1] :].cpu():
                self._streamer.put(token[None])
            self._streamer.end()
        tokenizer = None
        if self.recorder.trace is not None and self.recorder.trace.record:
            with suppress(RevisitError):  # without a processor, recorded tokens have no text
                tokenizer = self.prompt.processor.tokenizer
        self.recorder.finish(sequences, tokenizer)
        return output


def find_phase(prompt: Prompt, method: Method) -> Callable[[Tensor], Tensor] | None:
    """Return a function from input_ids to the mask of rows in the method's phase, (rows,); None if all rows always are."""
    if method.phase == "both":
        return None
    if method.changes_forward:
        raise RevisitError(
            f"{method.name} changes the model's forward pass, so it cannot be limited to the {method.phase}: leave out phase."
        )
    thoughts = thoughts_of(prompt.model, prompt.processor)
    if thoughts is None:
        opening, closing = families.of(prompt.model.config.model_type).thought
        raise RevisitError(
            f"The tokenizer of {describe(prompt.model)} has no tokens {opening} and {closing} for thoughts: leave out phase."
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
    if unused := re.search(r"not used by the model: (\[.*?\])", str(error)):
        names = re.findall(r"'(\w+)'", unused[1])
        hint = did_you_mean(names[0], ("method", "trace", *GenerationConfig().to_dict()))
        return RevisitError(f"generate has no argument {' or '.join(map(repr, names))}.{hint}")
    return RevisitError(
        f"transformers cannot generate with these arguments, or with the model's generation_config.json: {brief(error)}"
    )


def _in_float32(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with pixels in float32 for a float32 model: some processors return half precision for every model."""
    if getattr(model, "dtype", None) != torch.float32:
        return dict(inputs)
    return {**inputs} | {name: inputs[name].float() for name in PIXELS if isinstance(inputs.get(name), Tensor)}
