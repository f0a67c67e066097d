"""Decode with ReVisiT: the entry point that transformers loads for `custom_generate="…"`."""

import warnings
from typing import Any

from transformers import GenerationMixin

from revisit import methods
from revisit.models.parts import vision_mask, vision_token_ids


def generate(model: Any, *args: Any, method: str = "revisit", **kwargs: Any) -> Any:
    """Generate with a decoding method of the revisit library.

    Args:
        model: The model that `generate()` was called on.
        *args: Passed to `generate()`.
        method: A method by name, optionally with settings: `"revisit"`, `"revisit:alpha=1e-3"`, `"vcd"`.
        **kwargs: Passed to `generate()`.
    """
    ids = kwargs.get("input_ids", *args[:1])
    if ids is not None and ids.shape[1] and not vision_mask(ids, vision_token_ids(model.config)).any():
        if method != "greedy":
            warnings.warn(f"A prompt without an image is decoded without {method}.", stacklevel=2)
        method = "greedy"
    # GenerationMixin.generate, because a model repository with this folder replaces model.generate by this function.
    chosen = methods.as_method(method, model)
    return GenerationMixin.generate(model, *args, custom_generate=chosen, **kwargs)
