"""One call of generate() for a method: the prompt, the model's parts, hooks, and the recorder of its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from revisit.decoding.recorder import Recorder
from revisit.decoding.trace import Trace
from revisit.errors import RevisitError
from revisit.forward.attention import AttentionHook, Call, watching
from revisit.forward.branch import CACHE, Branches, ModelWrapper
from revisit.forward.early_exits import EarlyExits
from revisit.forward.states import Capture, no_image
from revisit.models.families import IMAGE_INPUTS, resolve_layers
from revisit.models.head import Head
from revisit.models.parts import ModelParts, describe, vision_mask
from revisit.models.processors import processor_of
from revisit.models.types import Processor

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig

    from revisit.decoding.method import Method

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass
class Run:
    """One call of generate() by one method."""

    method: Method
    model: Any
    input_ids: Tensor  # (rows, T) the prompt, already repeated for beams and return sequences
    model_kwargs: dict[str, Any]  # keyword arguments that the loop passes to the model
    inputs: dict[str, Any]  # arguments of generate() before any preparation (pixels, grid sizes, ...)
    generation_config: GenerationConfig
    recorder: Recorder  # of the method that is running now
    stack: ExitStack  # closed when the call ends, however it ends
    user_mask: Tensor | None = None  # the caller's vision_mask
    user_processor: Processor | None = None  # the caller's processor

    def __post_init__(self) -> None:
        config = self.generation_config
        self.output: Any  # of the model, in the last `forward`
        self.raw: Tensor  # (rows, V) the model's own logits at this step; set before a method's step
        self.rows_per_item: int = max(config.num_beams, config.num_return_sequences)  # consecutive rows of one item
        self.loop_model: Any = self.model  # the model, or a wrapper of it, that the loop runs
        self.contrasting = False  # whether the running forward has no clean rows
        self.clean_shift = 0  # columns of padding before the clean prompt in the KV cache
        self.reorder_hooks: list[Callable[[Tensor], None]] = []
        self._reads_early_layers = False
        self._unreached: set[str] = set()  # methods whose attention hooks have not been called yet
        self._length = 0  # tokens per row at the last call of `forward`

    @cached_property
    def parts(self) -> ModelParts:
        """The model's decoder, layers, final norm and head; RevisitError if it keeps no vision tokens in its sequence."""
        return ModelParts.of(self.model)

    @property
    def processor(self) -> Processor:
        """The processor passed to the call, or else the model's; RevisitError if there is none."""
        return self.user_processor or processor_of(self.model, type(self.method).__name__)

    @property
    def trace(self) -> Trace:
        """The trace of the method that is running now."""
        return self.recorder.trace

    @property
    def beams(self) -> bool:
        """Whether rows are beams, which are compared with each other and reordered."""
        return bool(self.generation_config.num_beams > 1)

    # -- the prompt ---------------------------------------------------------------------------------------------

    def find_vision_tokens(self, *, required: bool = True) -> Tensor:
        """Find the prompt's vision positions (rows, T), and count them in the trace.

        Raises:
            RevisitError: No prompt has an image, and `required` is true.
        """
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
                "The prompt has placeholders for an image but no pixels: pass everything the processor returned "
                "(model.generate(**inputs))."
            )
        for row, count in zip(self.trace.rows, counts, strict=True):
            row.vision_tokens = count
        return mask

    def _vision_mask(self, required: bool) -> Tensor:
        embeds = self.model_kwargs.get("inputs_embeds")
        only_embeds = embeds is not None and self.input_ids.shape[1] == 0
        if self.user_mask is not None:
            mask = self.user_mask.to(self.input_ids.device).bool()
            length = embeds.shape[1] if embeds is not None and only_embeds else self.input_ids.shape[1]
            shape = (self.input_ids.shape[0] // self.rows_per_item, length)
            if tuple(mask.shape) != shape:
                raise RevisitError(
                    f"vision_mask must have the shape of the prompts, {shape} (batch, length), not {tuple(mask.shape)}."
                )
            return mask.repeat_interleave(self.rows_per_item, dim=0)
        if only_embeds:
            if not required:
                return self.input_ids.bool()
            raise RevisitError(
                "The prompt was passed as inputs_embeds, so the positions of the vision tokens are unknown: pass vision_mask, a "
                "(batch, length) mask that is True at their positions."
            )
        return vision_mask(self.input_ids, self.parts.vision_ids)

    def real_tokens(self, mask: Tensor) -> Tensor:
        """Return the mask of prompt positions that are not padding; `mask` is the vision mask.  (rows, T) -> (rows, T)"""
        attended = self.model_kwargs.get("attention_mask")
        return torch.ones_like(mask) if attended is None else attended[:, : mask.shape[1]].bool().to(mask.device)

    # -- hooks --------------------------------------------------------------------------------------------------

    def capture(self, mask: Tensor, layers: str | tuple[int, ...], *, final_norm: bool = False) -> Capture:
        """Capture the vision tokens' states at these layers, or a set of layers such as "last", during the prefill."""
        known = resolve_layers(layers, self.parts.depth, self.parts.tied)  # raises for layers that do not exist
        self.trace.layers = layers = known if isinstance(layers, str) else layers
        cache = self.model_kwargs.get("past_key_values")
        return Capture(
            self.parts,
            mask,
            layers,
            self.rows_per_item,
            self.stack,
            final_norm=final_norm,
            cache=cache,
            ignore=lambda: self.contrasting,
        )

    def watch_attention(self, hook: AttentionHook, name: str, *, prompt_only: bool = False) -> None:
        """Let `hook` read or change every attention call of the decoder until this call of generate ends.

        Args:
            hook: Called before each attention call.
            name: The method, for error messages.
            prompt_only: Whether the hook needs the prompt's attention only, so that later steps may leave a sliding window.

        Raises:
            RevisitError: The model's attention cannot be hooked, or the call may outgrow the sliding window of some layer,
                where the image's columns in the attention are no longer known.
        """
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        if not prompt_only and slides and window and self.generation_config.max_length > window:
            raise RevisitError(
                f"{name} works on attention, and some layers of {describe(self.model)} see only the last {window} tokens, fewer "
                f"than the {self.generation_config.max_length} that this call may reach: use a smaller max_new_tokens, or another method."
            )

        def reached(call: Call) -> Callable[[Tensor], Tensor] | None:
            self._unreached.discard(name)
            return hook(call)

        self._unreached.add(name)
        self.stack.enter_context(watching(self.parts, reached, name))

    def check_attention(self) -> None:
        """Raise RevisitError if the model has run without calling the hooks of `watch_attention`."""
        if self._unreached:
            raise RevisitError(
                f"{min(self._unreached)}: {describe(self.model)} computes its attention without transformers' attention interface, so it "
                "cannot be read or changed: use another method."
            )

    def early_exits(self, layers: tuple[int, ...], *, final_norm: bool = False) -> EarlyExits:
        """Project the last position's states at these layers through the LM head, at every step."""
        self.trace.layers = layers
        if self._reads_early_layers:
            raise RevisitError(
                "Only one method of a chain can read early layers (DoLa, DeCo, VISTA): remove the others."
            )
        self._reads_early_layers = True
        return EarlyExits(
            self.parts,
            layers,
            self.input_ids.shape[0],
            self.stack,
            final_norm=final_norm,
            ignore=lambda: self.contrasting,
        )

    def finish_capture(self, capture: Capture) -> Head:
        """Complete the capture of states, and return the head that projects them; call it at the first step."""
        capture.release()
        capture.check_reached()
        assert capture.last is not None
        return self.parts.calibrate(capture.last[0], self.raw[0])

    # -- steps --------------------------------------------------------------------------------------------------

    def decode_by(
        self,
        input_ids: Tensor,
        logits: Tensor,
        scores: Tensor,
        other: Tensor | None = None,
        acted: Tensor | None = None,
        layer: Tensor | None = None,
    ) -> Tensor:
        """Count and record a method's step, and return its scores; see `Recorder.note_scores` for the arguments.

        Rows in which the method did not act keep their logits.
        """
        if acted is not None and scores is not logits:
            scores = scores.where(acted[:, None].to(scores.device), logits)
        if self.beams and scores is not logits:  # beams are compared with each other; the logits are already normalized
            scores = scores.log_softmax(-1)
        self.recorder.note_scores(input_ids, logits, scores, other, acted, layer)
        return scores

    # -- for methods with a loop of their own, and for beams ------------------------------------------------

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run the model on the tokens that the KV cache does not hold yet.

        Args:
            input_ids: (rows, length) the prompt and all tokens chosen so far; longer than at the last `forward` or `crop`.

        Returns:
            The model's own logits for the next token.  (rows, V), float32
        """
        kwargs = self.model_kwargs
        if not self._length:
            if not input_ids.shape[1]:
                raise RevisitError(
                    f"{type(self.method).__name__} has its own decoding loop, which needs the prompt as input_ids, not as inputs_embeds."
                )
            output = self.loop_model._prefill(input_ids, self.generation_config, kwargs)
        else:
            new = input_ids.shape[1] - self._length
            if new < 1:
                raise RevisitError("run.forward needs at least one new token: append one, or crop first.")
            output, kwargs = _continue(self.loop_model, input_ids, kwargs, new, new)
        self.check_attention()
        self.output, self.model_kwargs, self._length = output, kwargs, input_ids.shape[1]
        self.raw = output.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        return self.raw

    def crop(self, length: int) -> None:
        """Step back to the first `length` tokens of each row, in the KV cache and in the trace too."""
        drop = self._length - length
        if drop < 0 or length < self.input_ids.shape[1]:
            raise RevisitError(
                f"run.crop({length}): the length must be between {self.input_ids.shape[1]} (the "
                f"prompt) and {self._length} (all tokens run so far)."
            )
        cache: Cache | None = self.model_kwargs.get(CACHE)
        try:
            if isinstance(self.loop_model, Branches):
                raise NotImplementedError("it also holds the rows of a contrasted run")
            if cache is not None:
                cache.crop(-drop)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            raise RevisitError(
                f"{type(self.method).__name__} steps back, which the KV cache of {describe(self.model)} does "
                f"not support ({error}): use the default cache, or another method."
            ) from error
        for name in PER_TOKEN:
            if isinstance(value := self.model_kwargs.get(name), Tensor):
                self.model_kwargs[name] = value[..., : value.shape[-1] - drop]
        self._length = length
        self.recorder.step_back(length)

    def look_ahead(self, input_ids: Tensor, token: Tensor) -> Generator[Tensor]:
        """Yield the greedy continuation from a first token (rows,), one token longer each time.

        Hooks treat these forwards as contrasted ones. Close the generator before the next step: it crops the KV cache.  -> (rows, n)
        """
        plain_cache = self.loop_model is self.model or type(self.loop_model) is ModelWrapper
        if not self.input_ids.shape[1] or not plain_cache:
            raise RevisitError(
                f"{type(self.method).__name__} looks ahead, which needs the prompt as input_ids and a KV cache without a contrasted run: "
                "use it alone, or in a chain without contrastive methods."
            )
        return self._ahead(input_ids, token)

    def _ahead(self, input_ids: Tensor, token: Tensor) -> Generator[Tensor]:
        kwargs = dict(self.model_kwargs)  # of the prompt
        cache: Cache | None = kwargs.get(CACHE)
        ids, known = torch.cat([input_ids, token[:, None]], dim=1), self.input_ids.shape[1]
        ahead = 0  # tokens in the KV cache after `input_ids`
        crops = cache is not None and all(type(layer) is DynamicLayer for layer in cache.layers)
        static = cache is not None and any(isinstance(layer, StaticLayer) for layer in cache.layers)
        self.contrasting, before = True, self.contrasting
        try:
            while True:
                yield ids[:, input_ids.shape[1] :]
                if static and ids.shape[1] >= self.generation_config.max_length:
                    raise RevisitError(
                        f"{type(self.method).__name__} looks ahead beyond the KV cache of fixed size: leave out cache_implementation."
                    )
                if not (ahead or crops):
                    kwargs[CACHE] = copy.deepcopy(cache)
                output, kwargs = _continue(self.model, ids, kwargs, ids.shape[1] - known, 1)
                known, ahead = ids.shape[1], ahead + 1
                ids = torch.cat([ids, output.logits[:, -1].argmax(-1, keepdim=True).to(ids.device)], dim=1)
        finally:
            self.contrasting = before
            if cache is not None and crops and ahead:
                cache.crop(-ahead)

    def reorder(self, rows: Tensor) -> None:
        """Continue row i from row rows[i], which belongs to the same item.  (rows,)"""
        self._wrap_model()
        if (cache := self.model_kwargs.get(CACHE)) is not None:
            self.model_kwargs[CACHE] = self.loop_model._reorder_cache(cache, rows)

    def on_reorder(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with (rows,) whenever beams are reordered: row i continues what was row rows[i]."""
        if self.beams and not self.generation_config.use_cache:
            raise RevisitError(
                f"{type(self.method).__name__} follows beams, which transformers reorders with their KV cache: leave out use_cache=False."
            )
        self._wrap_model()
        self.reorder_hooks.append(hook)

    def _wrap_model(self) -> None:
        if not isinstance(self.loop_model, ModelWrapper):
            self.loop_model = ModelWrapper(self)


def _continue(model: Any, ids: Tensor, kwargs: dict[str, Any], new: int, count: int) -> tuple[Any, dict[str, Any]]:
    """Run the last `count` tokens, or all without a KV cache; `new` tokens were added since `kwargs` were prepared.

    -> the model's output, and the keyword arguments for the next tokens
    """
    kwargs = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=new)
    length = count if kwargs.get("use_cache", True) else None
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, **kwargs)
    return model(**inputs, return_dict=True), kwargs
