"""Decode with ReVisiT: the entry point that transformers loads for `custom_generate="…"`."""

from typing import Any

from transformers import GenerationMixin

from revisit import methods


def generate(model: Any, *args: Any, method: str = "revisit", **kwargs: Any) -> Any:
    """Generate with a decoding method of the revisit library.

    Args:
        model: The model that `generate()` was called on.
        *args: Passed to `generate()`.
        method: A method by name, optionally with settings: `"revisit"`, `"revisit:alpha=1e-3"`, `"vcd"`.
        **kwargs: Passed to `generate()`.
    """
    # GenerationMixin.generate, because a model repository with this folder replaces model.generate by this function.
    chosen = methods.as_method(method, model)
    return GenerationMixin.generate(model, *args, custom_generate=chosen, **kwargs)
