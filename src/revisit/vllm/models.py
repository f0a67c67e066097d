"""Subclasses of vLLM's model classes whose states and logits pass through a `Worker`; created on demand by name.

The forward is the in-tree one and its result is returned unchanged, so requests that did not opt in get what vanilla vLLM
computes. States of intermediate layers come from vLLM's auxiliary-hidden-state outputs, which survive compilation and
graph capture. Logits are refined where they are computed, before grammars, biases and penalties.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import vllm.envs
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.registry import _VLLM_MODELS

from revisit.errors import RevisitError
from revisit.models.families import FINAL_NORMS, vllm_architectures
from revisit.vllm.head import ShardedHead
from revisit.vllm.hooks import follow_runner
from revisit.vllm.plan import Plan, make_plan
from revisit.vllm.request import LAYERS_SWITCH
from revisit.vllm.worker import Worker

SPECULATION = ("ngram", "ngram_gpu", "draft_model")  # methods whose candidates are verified row by row


class WithWorker:
    """Mix-in for a vLLM model class that adds a `Worker` on its last pipeline stage, unless it only drafts tokens."""

    revisit: Worker | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        plan = None if is_draft(vllm_config) else make_plan(vllm_config)
        if plan is not None:
            check_supported(vllm_config, plan.collected)
            key_compile_cache(vllm_config, plan.collected)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if plan is not None and get_pp_group().is_last_rank:
            self.revisit = build_worker(self, plan)
            follow_runner(vllm_config.use_v2_model_runner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.revisit is None:
            return output
        final, others = output if isinstance(output, tuple) else (output, ())
        self.revisit.observe(final, others)
        return final

    def compute_logits(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        logits = super().compute_logits(hidden_states, *args, **kwargs)  # type: ignore[misc]
        if self.revisit is None or logits is None:
            return logits
        if not self.revisit.rehearsed and logits.device.type != "cpu":  # the first call profiles memory
            self.revisit.rehearse(logits)
        return self.revisit.refine(logits, hidden_states)


def key_compile_cache(config: VllmConfig, layers: tuple[int, ...]) -> None:
    """Add the collected layers to the key of vLLM's compile cache, which otherwise holds one graph for all of them."""
    given = config.additional_config
    if isinstance(given, dict):
        config.additional_config = {**given, "revisit_layers": list(layers)}
    else:
        given_hash = given.compute_hash()
        given.compute_hash = lambda: f"{given_hash} revisit_layers={layers}"  # type: ignore[method-assign]


def build_worker(model: Any, plan: Plan) -> Worker:
    """Build the worker of a vLLM model whose weights are not loaded yet."""
    text = model.get_language_model()
    owner = next((one for one in (text, model) if hasattr(one, "lm_head") and hasattr(one, "logits_processor")), None)
    decoder: Any = getattr(text, "model", text)
    if owner is None or not hasattr(decoder, "layers"):
        raise RevisitError(
            f"ReVisiT's vLLM plug-in does not support {type(model).__name__}: it has no decoder or no LM head."
        )
    if not isinstance(owner.lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        raise RevisitError(
            "ReVisiT's vLLM plug-in does not support quantized LM heads: use another checkpoint, or disable the plug-in."
        )
    if len(plan.collected) > 1:
        if not isinstance(decoder, EagleModelMixin):
            raise RevisitError(
                f"{type(decoder).__name__} does not return intermediate states in vLLM; use {LAYERS_SWITCH}=last."
            )
        SupportsEagle3.set_aux_hidden_state_layers(model, plan.collected[:-1])
    norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
    return Worker(plan, owner.lm_head.weight.device, lambda: sharded_head(owner), norm)


def sharded_head(owner: Any) -> ShardedHead:
    """Wrap the head of a vLLM model with the scaling and cap of its logits layer."""
    head = owner.lm_head
    cap: float | None = owner.logits_processor.soft_cap
    scale: float = owner.logits_processor.scale

    def transform(logits: Tensor) -> Tensor:
        return (logits if cap is None else torch.tanh(logits / cap) * cap) * scale

    plain = cap is None and scale == 1
    sum_over_ranks = tensor_model_parallel_all_reduce if head.tp_size > 1 else None
    start, end = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    weight, bias = head.weight.data[: end - start], getattr(head, "bias", None)  # without vLLM's padding
    bias = None if bias is None else bias[: end - start]
    return ShardedHead(weight, bias, None if plain else transform, start, sum_over_ranks, head.org_vocab_size)


def is_draft(config: VllmConfig) -> bool:
    """Return whether a configuration belongs to a model that only drafts tokens."""
    drafter = config.speculative_config  # n-grams have the model itself there
    return drafter is not None and drafter.method == "draft_model" and config.model_config is drafter.draft_model_config


def check_supported(config: VllmConfig, layers: tuple[int, ...]) -> None:
    """Raise RevisitError for options of the server with which results would not be exact; `layers` are stored."""
    parallel, model = config.parallel_config, config.model_config
    drafter, graphs = config.speculative_config, config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    breakable = vllm.envs.VLLM_USE_BREAKABLE_CUDAGRAPH and not model.enforce_eager
    # The V1 runner replays the graph of a decoding step for prefills of as many tokens, without any Python code.
    replayed = drafter is not None and not config.use_v2_model_runner and graphs.decode_mode() is CUDAGraphMode.FULL
    reasons = (
        (config.lora_config, "LoRA (the head may differ per request)"),
        (model.enable_prompt_embeds, "prompt embeddings (the position of the image is unknown)"),
        (parallel.use_ubatching, "micro-batches (dual batch overlap, or ubatch_size above 1)"),
        (parallel.enable_batch_sharded_sampling, "batch-sharded sampling (ranks would score different tokens)"),
        (parallel.decode_context_parallel_size > 1, "context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism"),
        (drafter is not None and drafter.method not in SPECULATION, f"speculation other than {', '.join(SPECULATION)}"),
        (
            replayed,
            "speculation with whole-model graphs in the V1 runner (use cudagraph_mode PIECEWISE, or the V2 runner)",
        ),
        (
            getattr(drafter, "enable_adaptive_verification", False),
            "adaptive verification (only the device counts the rows of a request)",
        ),
        (config.kv_transfer_config, "KV transfer (states of tokens computed elsewhere are missing)"),
        (config.cache_config.kv_sharing_fast_prefill, "fast prefills over shared KV caches (they skip states)"),
        (
            parallel.pipeline_parallel_size > 1 and len(layers) > 1,
            f"pipeline parallelism and states of other layers than the last (set {LAYERS_SWITCH}=last)",
        ),
        (
            graphs.mixed_mode() is CUDAGraphMode.FULL,
            "whole-model graphs for prefills (cudagraph_mode FULL; use FULL_AND_PIECEWISE)",
        ),
        (breakable, "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH; set it to 0)"),
    )
    for enabled, option in reasons:
        if enabled:
            raise RevisitError(
                f"ReVisiT's vLLM plug-in does not support {option}: turn it off, or disable the plug-in."
            )


@functools.cache
def with_worker(name: str) -> type:
    """Derive the class of an architecture from vLLM's."""
    module, cls = _VLLM_MODELS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{module}"), cls)
    return type(name, (WithWorker, base), {"__module__": __name__, "__doc__": f"{name} with vision states."})


def __getattr__(name: str) -> Any:
    if name in vllm_architectures():
        return with_worker(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
