"""One call of generate() as a method sees it: the prompt, the model's parts, and what can be tapped while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.decoding.recorder import EndedRows, Recorder
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError
from revisit.models.families import IMAGE_INPUTS
from revisit.models.parts import ModelParts, describe
from revisit.models.processors import processor_of
from revisit.models.types import Processor
from revisit.taps.early_exits import EarlyExits
from revisit.taps.vision import Capture, VisionStates, no_image, vision_mask

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig

    from revisit.decoding.method import Method

CACHE = "past_key_values"
PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass
class Run:
    """One call of generate."""

    method: Method
    model: Any
    input_ids: Tensor  # (rows, T) the prompt, already repeated for beams and return sequences
    model_kwargs: dict[str, Any]  # what the loop passes to the model
    inputs: dict[str, Any]  # what the caller passed to generate, before any preparation (pixels, grid sizes, ...)
    generation_config: GenerationConfig
    copies: int  # consecutive rows that are copies of one item
    recorder: Recorder
    stack: ExitStack  # closed when the call ends, however it ends
    user_mask: Tensor | None = None  # vision positions given by the caller
    given_processor: Processor | None = None  # the processor that the caller passed
    raw: Tensor | None = None  # (rows, V) the model's own logits at this step
    contrasting: bool = False  # whether a forward runs that has no clean rows
    clean_shift: int = 0  # columns of padding that the KV cache has before the clean prompt
    parts: ModelParts = field(init=False)

    def __post_init__(self) -> None:
        self.loop_model: Any = self.model  # what the loop runs: the model or a stand-in for it
        self.reorder_hooks: list[Callable[[Tensor], None]] = []
        self._exits = False  # whether some method looks at early layers
        self._length = 0  # tokens of each row that `forward` has run

    @classmethod
    def begin(
        cls,
        method: Method,
        model: Any,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        inputs: dict[str, Any],
        generation_config: Any,
        trace: Trace,
        stack: ExitStack,
        user_mask: Tensor | None = None,
        processor: Processor | None = None,
    ) -> Run:
        """A call that is about to decode; the trace is emptied for it, and names the method as it was asked for.

        The method takes what it left to the model. If it needs the model's processor, it is bound to it.
        """
        method = method.for_model(model)
        ended = EndedRows(input_ids.shape[1], generation_config.num_beams > 1)
        run = cls(
            method=method,
            model=model,
            input_ids=input_ids,
            model_kwargs=model_kwargs,
            inputs=inputs,
            generation_config=generation_config,
            copies=max(generation_config.num_beams, generation_config.num_return_sequences),
            recorder=Recorder(trace, method, input_ids.shape[0], ended, stack),
            stack=stack,
            user_mask=user_mask,
            given_processor=processor,
        )
        if method.needs_processor:
            run.method = method.bind(run.processor)
        return run

    @property
    def processor(self) -> Processor:
        """The model's processor, as the caller passed it or as found; raises RevisitError if there is none."""
        return self.given_processor or processor_of(self.model, type(self.method).__name__)

    @property
    def trace(self) -> Trace:
        """The trace of the method that acts now."""
        return self.recorder.trace

    @property
    def beams(self) -> bool:
        """Whether rows are beams, which are compared with each other and change places."""
        return bool(self.generation_config.num_beams > 1)

    def item(self, row: int) -> int:
        """Which item of the batch a row belongs to; beams never cross items."""
        return row // self.copies

    # -- the prompt ---------------------------------------------------------------------------------------------

    def find_vision_tokens(self, *, required: bool = True) -> Tensor:
        """Find the model's parts and the prompt's vision positions (rows, T).

        Refuses prompts without any image, unless the method does not need one (`required=False`).
        """
        self.parts = ModelParts.of(self.model)
        mask = self._vision_mask(required)
        counts = mask.sum(-1).tolist()  # vision tokens of each row
        if not any(counts):
            if not required:
                return mask
            raise no_image(self.model)
        cached = self.model_kwargs.get("past_key_values")
        has_pixels = any(self.inputs.get(name) is not None for name in (*IMAGE_INPUTS, "inputs_embeds"))
        if not has_pixels and (cached is None or cached.get_seq_length() == 0):
            raise RevisitError(
                "The prompt has placeholders for an image but no pixels came with it: pass everything the processor returned "
                "(model.generate(**inputs))."
            )
        for row, count in zip(self.trace.rows, counts, strict=True):
            row.vision_tokens = count
        return mask

    def _vision_mask(self, required: bool) -> Tensor:
        embeds = self.model_kwargs.get("inputs_embeds")
        only_embeds = embeds is not None and self.input_ids.shape[1] == 0
        if self.user_mask is not None:
            if not isinstance(self.user_mask, Tensor):
                raise RevisitError(
                    f"vision_mask must be a tensor (batch, length), True at vision positions, not {type(self.user_mask).__name__}."
                )
            mask = self.user_mask.to(self.input_ids.device).bool()
            length = embeds.shape[1] if embeds is not None and only_embeds else self.input_ids.shape[1]
            wanted = (self.input_ids.shape[0] // self.copies, length)
            if tuple(mask.shape) != wanted:
                raise RevisitError(
                    f"vision_mask must have the shape of the prompts, {wanted} (batch, length), not {tuple(mask.shape)}."
                )
            return mask.repeat_interleave(self.copies, dim=0)
        if only_embeds:
            if not required:
                return self.input_ids.bool()
            raise RevisitError(
                "The prompt is given as inputs_embeds, which do not say where the vision tokens are: pass vision_mask, a "
                "(batch, length) mask that is True at their positions."
            )
        return vision_mask(self.input_ids, self.parts.vision_ids)

    def check_sliding_windows(self, method_name: str) -> None:
        """Refuses a call that outgrows the sliding window of some layer, where the image's place in attention is not known."""
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        if slides and window and self.generation_config.max_length > window:
            raise RevisitError(
                f"{method_name} changes attention, and some layers of {describe(self.model)} see only the last {window} tokens, fewer "
                f"than the {self.generation_config.max_length} that this call may reach: ask for fewer new tokens, or use another method."
            )

    # -- taps ---------------------------------------------------------------------------------------------------

    def capture(self, mask: Tensor, layers: tuple[int, ...], *, final_norm: bool = False) -> Capture:
        """Start keeping the states of the vision tokens at these layers; complete after the prefill."""
        self.trace.layers = layers
        cache = self.model_kwargs.get("past_key_values")
        return Capture(self.parts, mask, layers, self.copies, self.stack, final_norm=final_norm, cache=cache)

    def early_exits(self, layers: tuple[int, ...], *, final_norm: bool = False) -> EarlyExits:
        """Start projecting the last position's states at these layers, at every step."""
        self.trace.layers = layers
        if self._exits:
            raise RevisitError(
                "Only one method of a chain can look at early layers (DoLa, DeCo): leave one of them out."
            )
        self._exits = True
        return EarlyExits(
            self.parts,
            layers,
            self.input_ids.shape[0],
            self.stack,
            final_norm=final_norm,
            ignore=lambda: self.contrasting,
        )

    def finish_capture(self, capture: Capture, logits: Tensor) -> list[VisionStates]:
        """The captured states of every item, ready to be projected; call at the first step, with its raw logits."""
        capture.release()
        if capture.last is None:
            raise RevisitError(
                f"The prefill of {describe(self.model)} did not pass through its decoder module, so no vision states were seen; "
                "this way of running the model is not supported."
            )
        raw = logits if self.raw is None else self.raw  # another method may have changed the logits before
        self.parts.head.calibrate(capture.last[0], raw[0], describe(self.model))
        return capture.items

    # -- for methods with a decoding loop of their own, and for beams ------------------------------------------------

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the model on what the KV cache does not hold yet.

        Args:
            input_ids: (rows, length) the prompt and everything chosen so far, at least one token longer than at the last
                call, unless `crop` has shortened what is kept.

        Returns:
            The model's own logits for the next token.  (rows, V), float32
        """
        model, kwargs = self.loop_model, self.model_kwargs
        if not self._length:
            outputs = model._prefill(input_ids, self.generation_config, kwargs)
        else:
            new = input_ids.shape[1] - self._length
            if new < 1:
                raise RevisitError(
                    "run.forward needs at least one token that it has not run: append one, or crop first."
                )
            kwargs = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=new)
            ahead = new if kwargs.get("use_cache", True) else None
            outputs = model(
                **model.prepare_inputs_for_generation(input_ids, next_sequence_length=ahead, **kwargs), return_dict=True
            )
        self.model_kwargs, self._length = kwargs, input_ids.shape[1]
        self.raw = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        return self.raw

    def crop(self, length: int) -> None:
        """Go back: forget every token after the first `length` of each row, also in the KV cache and in the trace."""
        drop = self._length - length
        if drop < 0 or length < self.input_ids.shape[1]:
            raise RevisitError(
                f"run.crop({length}): the length must be between that of the prompt, {self.input_ids.shape[1]}, and that of what was run, "
                f"{self._length}."
            )
        cache: Cache | None = self.model_kwargs.get(CACHE)
        try:
            if isinstance(self.loop_model, StandIn):
                self.loop_model.crop(cache, drop)
            elif cache is not None:
                cache.crop(-drop)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            raise RevisitError(
                f"{type(self.method).__name__} steps back, and the KV cache of {describe(self.model)} cannot ({error}): use the default "
                "cache, or another method."
            ) from error
        for name in PER_TOKEN:
            if isinstance(value := self.model_kwargs.get(name), Tensor):
                self.model_kwargs[name] = value[..., : value.shape[-1] - drop]
        self._length = length
        self.recorder.step_back(length)

    def reorder(self, rows: Tensor) -> None:
        """Let each row go on from another one of its item: row i from row rows[i].  (rows,)"""
        self._stand_in()
        if (cache := self.model_kwargs.get(CACHE)) is not None:
            self.model_kwargs[CACHE] = self.loop_model._reorder_cache(cache, rows)

    def on_reorder(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with (rows,) whenever beams change places: row i goes on from what row rows[i] was."""
        if self.beams and not self.generation_config.use_cache:
            raise RevisitError(
                f"{type(self.method).__name__} follows beams, which transformers reorders with their KV cache: leave out use_cache=False."
            )
        self._stand_in()
        self.reorder_hooks.append(hook)

    def _stand_in(self) -> None:
        if not isinstance(self.loop_model, StandIn):
            self.loop_model = StandIn(self)


class StandIn:
    """Takes the model's place in the decoding loop, to hear of beams that change places."""

    def __init__(self, run: Run) -> None:
        self._run, self._model = run, run.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def _valid_auto_compile_criteria(self, *_args: object, **_kwargs: object) -> bool:
        return False  # the loop must call us, not a compiled forward of the model

    def _reorder_cache(self, cache: Cache, beam_idx: Tensor) -> Cache:
        self.reorder(cache, beam_idx)
        for hook in self._run.reorder_hooks:
            hook(beam_idx)
        return cache

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        cache.reorder_cache(rows)  # type: ignore[arg-type]

    def crop(self, cache: Cache | None, count: int) -> None:
        """Drop the last `count` tokens of every row."""
        if cache is not None:
            cache.crop(-count)
