"""A wrapper of the model in transformers' decoding loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

if TYPE_CHECKING:
    from revisit.decoding.run import Run

CACHE = "past_key_values"


class StandIn:
    """Wraps the model to observe beam reordering."""

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

    def crop(self, cache: Cache | None, count: int) -> None:
        """Drop the last `count` tokens of every row."""
        if cache is not None:
            cache.crop(-count)
