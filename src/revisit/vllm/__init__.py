"""ReVisiT inside vLLM: opt-in per server, then opt-in per request; nothing changes without both.

    export REVISIT_VLLM=1                                                     # or revisit.vllm.enable()
    SamplingParams(..., extra_args={"revisit": {"alpha": 1e-5}})              # this request only

A subclass of the in-tree model class, registered under the model's own architecture name as vLLM documents for out-of-tree
models, stores the vision states of its forward in a `Pool` and refines the logits of opted-in rows where they are computed
(`models`). A few of vLLM's methods are extended to follow requests and batches (`hooks`); both model runners share the rest
(`worker`). The entry point `vllm.general_plugins` does this in each of vLLM's processes if REVISIT_VLLM=1 is set.
"""

from __future__ import annotations

from revisit import settings
from revisit.models.families import vllm_architectures


def plugin() -> None:
    """Register if REVISIT_VLLM=1 is set; the `vllm.general_plugins` entry point."""
    if settings.vllm_plugin():
        register()


def enable() -> None:
    """Do what REVISIT_VLLM=1 does, for this process and those it starts. Call it before creating an engine."""
    settings.enable_vllm_plugin()
    register()


def register() -> None:
    """Replace vLLM's model classes by our subclasses and extend its methods, in this process."""
    from vllm import ModelRegistry

    from revisit.vllm.hooks import install

    install()
    for name in vllm_architectures():
        if name in ModelRegistry.models:  # older versions of vLLM have fewer
            ModelRegistry.register_model(name, f"{__name__}.models:{name}")
