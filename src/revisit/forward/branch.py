"""A second run of the model next to the first, for methods that contrast the two.

`generate()` itself prepares the contrasted prompt, exactly as the clean one, and each branch has its own prefill: prompts
differ in length, and a shorter one then costs less. From the second token on, both branches are rows of one batch with one
KV cache, the shorter rows padded on the left. transformers' own loop runs on a wrapper of the model that returns the clean
rows only.

If the rows cannot be stacked (no cache, a static or quantized cache, sliding-window layers with prompts of different
lengths, recurrent layers), the branches run one after the other, each with its own cache; see `Branches.stacked`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from revisit.errors import RevisitError
from revisit.forward.pixels import check_empty_cache
from revisit.forward.states import Hooks, saved_positions

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from revisit.decoding.run import Run

CACHE = "past_key_values"
# Options of generate() that a contrasted run shares with the clean one.
COPIED_OPTIONS = (
    *("num_beams", "num_return_sequences", "do_sample", "use_cache", "cache_implementation", "cache_config"),
    *("pad_token_id", "eos_token_id", "bos_token_id"),
)


class ModelWrapper:
    """A wrapper of the model that observes beam reordering."""

    def __init__(self, run: Run) -> None:
        self._run, self._model = run, run.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def _valid_auto_compile_criteria(self, *_args: object, **_kwargs: object) -> bool:
        return False  # the loop must call the wrapper, not a compiled forward of the model

    def _reorder_cache(self, cache: Cache, beam_idx: Tensor) -> Cache:
        self.reorder(cache, beam_idx)
        for hook in self._run.reorder_hooks:
            hook(beam_idx)
        return cache

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        cache.reorder_cache(rows)  # type: ignore[arg-type]


@dataclass
class Branch:
    """One contrasted run: its prompt, the arguments that generate() prepared for it, and the logits of its newest position."""

    ids: Tensor  # (rows, T') the contrast prompt
    kwargs: dict[str, Any]  # keyword arguments that the loop would pass to the model
    config: GenerationConfig
    live: slice | None = None  # its rows in the running forward; None if the forward does not contain it
    shift: int = 0  # columns of padding before its prompt in the cache
    logits: Tensor | None = None  # (rows, V)

    def take(self) -> Tensor:
        """Return the logits of this step, once."""
        if self.logits is None:
            raise RevisitError(
                "The contrasted branch was not run at this step, because transformers' loop did not call the model through its wrapper."
            )
        logits, self.logits = self.logits, None
        return logits


def add_branch(run: Run, inputs: dict[str, Any] | None, *, stacked: bool) -> Branch:
    """Add a contrasted run of the prompt with these inputs; None for the call's prompt again."""
    branch = Branch(*loop_arguments(run, inputs))
    if not isinstance(run.loop_model, Branches):
        run.loop_model = Branches(run)
    run.loop_model.add(branch, stacked)
    return branch


def loop_arguments(run: Run, inputs: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any], GenerationConfig]:
    """Return a prompt as generate() prepares it for its loop: encoded images, positions, cache, repeated for beams.

    Without `inputs`, return the prompt of this call.
    """
    check_empty_cache(run)
    if inputs is None:
        cache = copy.deepcopy(run.model_kwargs.get(CACHE))
        return run.input_ids, {**run.model_kwargs, CACHE: cache}, run.generation_config

    def return_arguments(
        _model: object,
        input_ids: Tensor,
        logits_processor: object,
        stopping_criteria: object,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any], GenerationConfig]:
        return input_ids, model_kwargs, generation_config

    call = run.generation_config
    config = GenerationConfig(
        max_new_tokens=max(1, call.max_length - run.input_ids.shape[1]),
        **{name: getattr(call, name) for name in COPIED_OPTIONS},
    )
    with saved_positions(run.model):
        prepared: tuple[Tensor, dict[str, Any], GenerationConfig] = run.model.generate(
            **inputs, generation_config=config, custom_generate=return_arguments
        )
    return prepared


def last_states(run: Run, inputs: dict[str, Any] | None) -> list[Tensor]:
    """Run a prompt, by default the call's, on its own and return the output of every decoder layer at its last token.

    -> layers × (rows, d)
    """
    outputs: list[Tensor] = []
    ids, kwargs, config = loop_arguments(run, inputs)
    run.contrasting = True
    try:
        with ExitStack() as stack, saved_positions(run.model):
            hooks = Hooks(stack)
            for layer in run.parts.layers:
                hooks.after(layer, lambda states: outputs.append(states[:, -1].clone()))
            run.model._prefill(ids, config, kwargs)
    finally:
        run.contrasting = False
    return outputs


class Branches(ModelWrapper):
    """A wrapper of the model for the decoding loop that runs all branches and returns the clean rows."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._rows = run.input_ids.shape[0]
        self._prompt = run.input_ids.shape[1]
        self._branches: list[Branch] = []
        self._may_stack = True  # whether all branches allow it
        self._cache: Any = None  # the clean branch's cache while other branches' rows are in it
        self.stacked: bool | None = None  # whether the branches share one forward; None until the second token
        run.stack.callback(self._restore_cache)

    def add(self, branch: Branch, stacked: bool) -> None:
        self._branches.append(branch)
        self._may_stack &= stacked

    # -- called by the loop --------------------------------------------------------------------------------------

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> CausalLMOutputWithPast:
        prefill = type(self._model)._prefill
        outputs: CausalLMOutputWithPast = prefill(self._model, input_ids, generation_config, model_kwargs, **kwargs)
        for branch in self._branches:
            with self._alone(branch):
                contrasted = prefill(self._model, branch.ids, branch.config, branch.kwargs, **kwargs)
            self._keep(branch, contrasted)
        return outputs

    def __call__(self, return_dict: bool = True, **inputs: Any) -> CausalLMOutputWithPast:
        parts = [inputs, *(self._next(branch, inputs["input_ids"]) for branch in self._branches)]
        if self.stacked is None:
            self.stacked = self._may_stack and self._join(parts)
        if not self.stacked:
            outputs: CausalLMOutputWithPast = self._model(**inputs, return_dict=True)
            for branch, part in zip(self._branches, parts[1:], strict=True):
                with self._alone(branch):
                    contrasted = self._model(**part, return_dict=True)
                self._keep(branch, contrasted)
            return outputs
        shifts = [self._run.clean_shift, *(branch.shift for branch in self._branches)]
        merged = merge(parts, shifts)
        assert merged is not None  # as at the first step
        for number, branch in enumerate(self._branches, 1):
            branch.live = slice(number * self._rows, (number + 1) * self._rows)
        outputs = self._model(**{**merged, CACHE: self._cache}, return_dict=True)
        assert outputs.logits is not None
        for branch, logits in zip(self._branches, outputs.logits.split(self._rows)[1:], strict=True):
            branch.live, branch.logits = None, logits[:, -1].float()
            branch.kwargs = self._model._update_model_kwargs_for_generation({}, branch.kwargs)
        return self._clean(outputs)

    def reorder(self, cache: Cache, rows: Tensor) -> None:
        if self.stacked:
            offsets = torch.arange(1 + len(self._branches), device=rows.device) * self._rows
            rows = (offsets[:, None] + rows).flatten()  # (branches·rows,)
        else:
            for branch in self._branches:
                branch.kwargs[CACHE].reorder_cache(rows)
        super().reorder(cache, rows)

    # -- parts ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, branch: Branch) -> Iterator[None]:
        """Mark the forward within the context as one that runs this branch only."""
        self._run.contrasting, branch.live = True, slice(0, self._rows)
        try:
            yield
        finally:
            self._run.contrasting, branch.live = False, None

    def _keep(self, branch: Branch, outputs: CausalLMOutputWithPast) -> None:
        assert outputs.logits is not None
        branch.logits = outputs.logits[:, -1].float()
        branch.kwargs = self._model._update_model_kwargs_for_generation(outputs, branch.kwargs)

    def _next(self, branch: Branch, input_ids: Tensor) -> dict[str, Any]:
        """Return the model's inputs for this branch at this step, with the tokens of the clean branch."""
        cached = branch.kwargs.get("use_cache", True)
        ids = input_ids[:, -1:] if cached else torch.cat([branch.ids, input_ids[:, self._prompt :]], dim=1)
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if cached else None, **branch.kwargs
        )
        return prepared

    def _join(self, parts: list[dict[str, Any]]) -> bool:
        """Append the cached rows of all branches to the clean ones, padded on the left; return False if that is not possible."""
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
        self._cache, self._run.clean_shift = caches[0], shifts[0]
        for branch, shift in zip(self._branches, shifts[1:], strict=True):
            branch.shift, branch.kwargs[CACHE] = shift, self._cache
        return True

    def _clean(self, outputs: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
        """Remove the contrasted rows from the model's output."""
        for name in ("logits", "hidden_states", "attentions"):
            value = outputs.get(name)
            if isinstance(value, Tensor):
                outputs[name] = value[: self._rows]
            elif isinstance(value, tuple):
                outputs[name] = tuple(x[: self._rows] if isinstance(x, Tensor) else x for x in value)
        return outputs

    def _restore_cache(self) -> None:
        """Remove the contrasted rows and the padding from the clean branch's cache."""
        if self._cache is None:
            return
        for layer in self._cache.layers:
            if layer.is_initialized and layer.keys.shape[0] > self._rows:
                layer.keys = layer.keys[: self._rows, :, self._run.clean_shift :]
                layer.values = layer.values[: self._rows, :, self._run.clean_shift :]
        self._cache = None


def merge(parts: list[dict[str, Any]], shifts: list[int]) -> dict[str, Any] | None:
    """Merge the inputs of several branches into those of one batch; None if they cannot be merged.

    Masks are padded by each branch's shift; positions are explicit, so padding does not move them.
    """
    rows = parts[0]["input_ids"].shape[0]
    merged: dict[str, Any] = {}
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
    """Move all values to the first one's device; a branch's values may be on the vision tower's device."""
    return [value.to(values[0].device) for value in values]


def _pad_left(value: Tensor, count: int) -> Tensor:
    """Pad the last axis with `count` zeros on the left."""
    return torch.nn.functional.pad(value, (count, 0)) if count else value
