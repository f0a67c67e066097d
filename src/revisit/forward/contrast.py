"""A second forward pass alongside the first, for methods that contrast the two.

`generate()` itself prepares the contrasted prompt, exactly as the main one, and each pass has its own prefill: prompts
differ in length, and a shorter one then costs less. From the second token on, both passes are rows of one batch with one
KV cache, the shorter rows padded on the left. transformers' own loop runs on a wrapper of the model that returns the main
rows only.

If the rows cannot be stacked (no cache, a static or quantized cache, sliding-window layers with prompts of different
lengths, recurrent layers), the passes run one after the other, each with its own cache; see `Contrasted.stacked`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from revisit.errors import RevisitError
from revisit.forward.prompt import CACHE, Prompt
from revisit.forward.states import Pass, saved_positions
from revisit.models.types import Arguments

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

# Options of generate() that a contrasted pass shares with the main one.
COPIED_OPTIONS = (
    *("num_beams", "num_return_sequences", "do_sample", "use_cache", "cache_implementation", "cache_config"),
    *("pad_token_id", "eos_token_id", "bos_token_id"),
)


class ModelWrapper:
    """A wrapper of the model that observes beam reordering."""

    def __init__(self, model: Any, on_reorder: list[Callable[[Tensor], None]]) -> None:
        self._model, self._on_reorder = model, on_reorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def _valid_auto_compile_criteria(self, *_args: object, **_kwargs: object) -> bool:
        return False  # the loop must call the wrapper, not a compiled forward of the model

    def _reorder_cache(self, cache: Cache, beam_idx: Tensor) -> Cache:
        self.reorder(cache, beam_idx)
        for function in self._on_reorder:
            function(beam_idx)
        return cache

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        cache.reorder_cache(rows)  # type: ignore[arg-type]


@dataclass
class Contrast(Pass):
    """A contrasted pass: its prompt, the arguments that generate() prepared for it, and the logits of its newest position."""

    ids: Tensor = field(kw_only=True)  # (rows, T')
    kwargs: Arguments = field(kw_only=True)  # keyword arguments that the loop would pass to the model
    config: GenerationConfig = field(kw_only=True)
    logits: Tensor | None = None  # (rows, V)

    def take(self) -> Tensor:
        """Return the logits of this step, once."""
        if self.logits is None:
            raise RevisitError(
                "The contrasted pass was not run at this step, because transformers' loop did not call the model through its wrapper."
            )
        logits, self.logits = self.logits, None
        return logits


@contextlib.contextmanager
def running(only: Pass | None, instead_of: Pass) -> Iterator[None]:
    """Declare that forwards within the context contain this pass and not the other; None for neither."""
    before, instead_of.live = instead_of.live, None
    if only is not None:
        only.live = before
    try:
        yield
    finally:
        instead_of.live = before
        if only is not None:
            only.live = None


def prepared(prompt: Prompt, inputs: Arguments | None) -> tuple[Tensor, Arguments, GenerationConfig]:
    """Return a prompt as generate() prepares it for its loop: encoded images, positions, cache, repeated for beams.

    Without `inputs`, return the prompt of this call.
    """
    prompt.check_empty_cache()
    if inputs is None:
        return prompt.ids, {**prompt.prepared, CACHE: copy.deepcopy(prompt.cache)}, prompt.config

    def return_arguments(
        _model: object,
        input_ids: Tensor,
        logits_processor: object,
        stopping_criteria: object,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> tuple[Tensor, Arguments, GenerationConfig]:
        return input_ids, model_kwargs, generation_config

    config = GenerationConfig(
        max_new_tokens=max(1, prompt.config.max_length - prompt.ids.shape[1]),
        **{name: getattr(prompt.config, name) for name in COPIED_OPTIONS},
    )
    with saved_positions(prompt.model):
        arguments: tuple[Tensor, Arguments, GenerationConfig] = prompt.model.generate(
            **inputs, generation_config=config, custom_generate=return_arguments
        )
    return arguments


class Contrasted(ModelWrapper):
    """A wrapper of the model for the decoding loop that runs all passes and returns the main rows."""

    def __init__(
        self, prompt: Prompt, main: Pass, on_reorder: list[Callable[[Tensor], None]], stack: ExitStack
    ) -> None:
        super().__init__(prompt.model, on_reorder)
        self._rows, self._prompt = prompt.ids.shape
        self._main = main
        self._others: list[Contrast] = []
        self._may_stack = True  # whether all passes allow it
        self._cache: Any = None  # the main pass's cache while rows of other passes are in it
        self.stacked: bool | None = None  # whether the passes share one forward; None until the second token
        stack.callback(self._restore_cache)

    def add(self, contrast: Contrast, stacked: bool) -> None:
        self._others.append(contrast)
        self._may_stack &= stacked

    # -- called by the loop --------------------------------------------------------------------------------------

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Arguments, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        prefill = type(self._model)._prefill
        outputs: CausalLMOutputWithPast = prefill(self._model, input_ids, generation_config, model_kwargs, **kwargs)
        for contrast in self._others:
            with running(contrast, instead_of=self._main):
                contrasted = prefill(self._model, contrast.ids, contrast.config, contrast.kwargs, **kwargs)
            self._keep(contrast, contrasted)
        return outputs

    def __call__(self, return_dict: bool = True, **inputs: Any) -> CausalLMOutputWithPast:
        parts = [inputs, *(self._next(contrast, inputs["input_ids"]) for contrast in self._others)]
        if self.stacked is None:
            self.stacked = self._may_stack and self._join(parts)
        if not self.stacked:
            outputs: CausalLMOutputWithPast = self._model(**inputs, return_dict=True)
            for contrast, part in zip(self._others, parts[1:], strict=True):
                with running(contrast, instead_of=self._main):
                    contrasted = self._model(**part, return_dict=True)
                self._keep(contrast, contrasted)
            return outputs
        merged = merge(parts, [self._main.shift, *(contrast.shift for contrast in self._others)])
        assert merged is not None  # as at the first step
        for number, contrast in enumerate(self._others, 1):
            contrast.live = slice(number * self._rows, (number + 1) * self._rows)
        outputs = self._model(**{**merged, CACHE: self._cache}, return_dict=True)
        assert outputs.logits is not None
        for contrast, logits in zip(self._others, outputs.logits.split(self._rows)[1:], strict=True):
            contrast.live, contrast.logits = None, logits[:, -1].float()
            contrast.kwargs = self._model._update_model_kwargs_for_generation({}, contrast.kwargs)
        return self._main_rows(outputs)

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        if self.stacked:
            offsets = torch.arange(1 + len(self._others), device=rows.device) * self._rows
            rows = (offsets[:, None] + rows).flatten()  # (passes·rows,)
        else:
            for contrast in self._others:
                contrast.kwargs[CACHE].reorder_cache(rows)
        super().reorder(cache, rows)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _keep(self, contrast: Contrast, outputs: CausalLMOutputWithPast) -> None:
        assert outputs.logits is not None
        contrast.logits = outputs.logits[:, -1].float()
        contrast.kwargs = self._model._update_model_kwargs_for_generation(outputs, contrast.kwargs)

    def _next(self, contrast: Contrast, input_ids: Tensor) -> Arguments:
        """Return the model's inputs for this pass at this step, with the tokens of the main pass."""
        cached = contrast.kwargs.get("use_cache", True)
        ids = input_ids[:, -1:] if cached else torch.cat([contrast.ids, input_ids[:, self._prompt :]], dim=1)
        inputs: Arguments = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if cached else None, **contrast.kwargs
        )
        return inputs

    def _join(self, parts: list[Arguments]) -> bool:
        """Append the cached rows of all passes to the main ones, padded on the left; return False if that is not possible."""
        caches: list[Any] = [part.get(CACHE) for part in parts]
        if any(cache is None for cache in caches):
            return False
        lengths = [cache.get_seq_length() for cache in caches]
        allowed = (DynamicLayer, DynamicSlidingWindowLayer) if len(set(lengths)) == 1 else (DynamicLayer,)
        if any(type(layer) not in allowed for cache in caches for layer in cache.layers):
            return False
        shifts = [max(lengths) - length for length in lengths]
        if merge(parts, shifts) is None:
            return False
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            if layers[0].is_initialized:
                for name in ("keys", "values"):
                    padded = [
                        torch.nn.functional.pad(getattr(layer, name), (0, 0, shift, 0))  # (rows, heads, longest, d)
                        for layer, shift in zip(layers, shifts, strict=True)
                    ]
                    setattr(layers[0], name, torch.cat(padded))
        self._cache, self._main.shift = caches[0], shifts[0]
        for contrast, shift in zip(self._others, shifts[1:], strict=True):
            contrast.shift, contrast.kwargs[CACHE] = shift, self._cache
        return True

    def _main_rows(self, outputs: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
        """Remove the contrasted rows from the model's output."""
        for name in ("logits", "hidden_states", "attentions"):
            value = outputs.get(name)
            if isinstance(value, Tensor):
                outputs[name] = value[: self._rows]
            elif isinstance(value, tuple):
                outputs[name] = tuple(x[: self._rows] if isinstance(x, Tensor) else x for x in value)
        return outputs

    def _restore_cache(self) -> None:
        """Remove the contrasted rows and the padding from the main pass's cache."""
        if self._cache is None:
            return
        for layer in self._cache.layers:
            if layer.is_initialized and layer.keys.shape[0] > self._rows:
                layer.keys = layer.keys[: self._rows, :, self._main.shift :]
                layer.values = layer.values[: self._rows, :, self._main.shift :]
        self._cache = None


def merge(parts: list[Arguments], shifts: list[int]) -> Arguments | None:
    """Merge the inputs of several passes into those of one batch; None if they cannot be merged.

    Masks are padded by each pass's shift; positions are explicit, so padding does not move them.
    """
    rows = parts[0]["input_ids"].shape[0]
    merged: Arguments = {}
    masks = [part.get("attention_mask") for part in parts]
    if any(shifts) or any(mask is not None for mask in masks):
        longest = parts[shifts.index(0)]
        columns = longest[CACHE].get_seq_length() + longest["input_ids"].shape[1]
        padded = []
        for mask, part, shift in zip(masks, parts, shifts, strict=True):
            mask = part["input_ids"].new_ones(rows, columns - shift) if mask is None else mask
            if not isinstance(mask, Tensor) or mask.ndim != 2:
                return None
            padded.append(_pad_left(mask.long(), shift))
        merged["attention_mask"] = torch.cat(_on_one_device(padded))
    for name in dict.fromkeys(name for part in parts for name in part):
        if name in (CACHE, "attention_mask"):
            continue
        values: list[Any] = [part.get(name) for part in parts]
        if name == "position_ids":
            if any(not isinstance(value, Tensor) for value in values):
                return None
            merged[name] = torch.cat(_on_one_device(values), dim=-2)
        elif all(isinstance(value, Tensor) and value.shape[:1] == (rows,) for value in values):
            width = max(value.shape[-1] for value in values)
            merged[name] = torch.cat(_on_one_device([_pad_left(value, width - value.shape[-1]) for value in values]))
        else:
            known = [value for value in values if value is not None]
            if any(isinstance(value, Tensor) for value in known) or any(value != known[0] for value in known):
                return None
            merged[name] = known[0] if known else None
    return merged


def _on_one_device(values: list[Tensor]) -> list[Tensor]:
    """Move all values to the first one's device; a pass's values may be on the vision tower's device."""
    return [value.to(values[0].device) for value in values]


def _pad_left(value: Tensor, count: int) -> Tensor:
    """Pad the last axis with `count` zeros on the left."""
    return torch.nn.functional.pad(value, (count, 0)) if count else value
