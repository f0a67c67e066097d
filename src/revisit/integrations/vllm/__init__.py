"""ReVisiT inside vLLM: opt-in per server, then opt-in per request; nothing happens to people who do neither.

    export REVISIT_VLLM=1                                                     # or revisit.integrations.vllm.enable()
    SamplingParams(..., extra_args={"revisit": {"alpha": 1e-5}})              # this request only

How it works. A subclass of the in-tree model class (registered under the model's own architecture name, the way vLLM
documents for out-of-tree models) keeps the vision states that its forward computes in a `Pool`, and refines the logits of
opted-in rows where they are computed. A few of vLLM's methods are extended to follow requests and batches (`hooks`); its two
model runners share everything else (`worker`).

The package has one entry point for vLLM (`vllm.general_plugins`), which does this in each of vLLM's processes if
REVISIT_VLLM=1 is set and returns at once if not.
"""

from __future__ import annotations

from revisit import settings
from revisit.models.families import vllm_architectures


def plugin() -> None:
    """The `vllm.general_plugins` entry point: does nothing unless REVISIT_VLLM=1 asks for it."""
    if settings.vllm_plugin():
        register()


def enable() -> None:
    """What REVISIT_VLLM=1 does, from Python: for this process and those it starts. Call it before making an engine."""
    settings.enable_vllm_plugin()
    register()


def register() -> None:
    """Put our subclasses in the place of vLLM's model classes, and our extensions in their places, in this process."""
    from vllm import ModelRegistry

    from revisit.integrations.vllm.hooks import install

    install()
    for name in vllm_architectures():
        if name in ModelRegistry.models:  # older versions of vLLM know fewer
            ModelRegistry.register_model(name, f"{__name__}.models:{name}")
