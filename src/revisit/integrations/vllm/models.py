"""Out-of-tree model classes: vLLM's own, which also show their states to a `Tap`. Imported by name, made on demand.

The forward is the in-tree one and its result is passed on unchanged, so requests that did not opt in get what vanilla
vLLM gives them. States of intermediate layers come through vLLM's own auxiliary-hidden-state outputs, which survive
compilation and graph capture.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from revisit.errors import RevisitError
from revisit.integrations.vllm import ARCHITECTURES
from revisit.integrations.vllm.head import ShardedHead
from revisit.integrations.vllm.request import LAYERS_SWITCH, collectable
from revisit.integrations.vllm.tap import Layout, Tap, publish
from revisit.models.families import FINAL_NORMS
from revisit.models.parts import vision_token_ids
from revisit.taps.vision import resolve_layers


class Tapped:
    """Put in front of a vLLM model class: the same model, with a `Tap` on its states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        refuse(vllm_config)
        self.revisit_tap = build_tap(self, vllm_config)
        publish(vllm_config, self.revisit_tap)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        final, others = output if isinstance(output, tuple) else (output, ())
        if self.revisit_tap.listening and hasattr(final, "shape"):  # earlier pipeline stages return no states
            self.revisit_tap.observe(final, others, None if self.revisit_tap.slots else current_layout())
        return final

    def compute_logits(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.revisit_tap.listening:
            self.revisit_tap.observe_sampled(hidden_states)
        return super().compute_logits(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def get_model_state_cls(self) -> Any:
        """The V2 runner asks the model for the class that follows its requests."""
        from revisit.integrations.vllm.v2 import following

        own = getattr(super(), "get_model_state_cls", None)
        return following(own() if own is not None else None)


def build_tap(model: Any, vllm_config: VllmConfig) -> Tap:
    """The tap of a freshly built (not yet loaded) vLLM model."""
    text = model.get_language_model()
    decoder: Any = getattr(text, "model", None)
    missing = [name for name in ("lm_head", "logits_processor") if not hasattr(text, name)]
    if missing or not hasattr(decoder, "layers"):
        raise RevisitError(
            f"ReVisiT's vLLM plug-in could not find the decoder and LM head of {type(model).__name__}; this model is not supported."
        )
    depth = len(decoder.layers)
    embedding = getattr(decoder, "embed_tokens", None)
    tied = embedding is not None and (text.lm_head is embedding or text.lm_head.weight is embedding.weight)
    wanted = collectable()
    layers = tuple(sorted({*resolve_layers(wanted, depth, tied), depth}))
    if layers != (depth,):
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise RevisitError(f"{LAYERS_SWITCH}={wanted!r} is not supported with pipeline parallelism: use 'last'.")
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise RevisitError(
                f"{type(model).__name__} does not give out intermediate states in vLLM; use {LAYERS_SWITCH}=last."
            )
        model.set_aux_hidden_state_layers(tuple(layer for layer in layers if layer < depth))
    norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
    ids = vision_token_ids(vllm_config.model_config.hf_config)
    return Tap(lambda: sharded_head(text), ids, depth, tied, layers, norm)


def sharded_head(text: Any) -> ShardedHead:
    """The head of a vLLM text model, with what its logits layer does afterwards."""
    head, layer = text.lm_head, text.logits_processor
    plain = isinstance(head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
    part = head.shard_indices
    return ShardedHead(
        weight=head.weight.data if plain else None,
        bias=getattr(head, "bias", None),
        start=part.org_vocab_start_index,
        stop=part.org_vocab_end_index,
        sum_over_ranks=tensor_model_parallel_all_reduce if head.tp_size > 1 else None,
        full=lambda states: layer(head, states),
        soft_cap=layer.soft_cap,
        scale=layer.scale,
    )


def current_layout() -> Layout | None:
    """Rows and positions of the tokens in the running forward, from the attention metadata; None in dummy runs."""
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    for one in metadata.values():
        starts, lengths = getattr(one, "query_start_loc", None), getattr(one, "seq_lens", None)
        if starts is not None and lengths is not None:
            begin, total = starts.tolist(), lengths.tolist()
            firsts = [n - (b - a) for n, a, b in zip(total, begin, begin[1:], strict=False)]
            return Layout(begin, firsts)
    return None


def refuse(config: VllmConfig) -> None:
    """One clear sentence, at start-up, for what cannot be done exactly."""
    parallel, model = config.parallel_config, config.model_config
    reasons = {
        "LoRA (the head may differ per request)": config.lora_config is not None,
        "prompt embeddings (they do not say where the image is)": model.enable_prompt_embeds,
        "dual batch overlap": getattr(parallel, "enable_dbo", False),
        "batch-sharded sampling (ranks would ask for different tokens)": getattr(
            parallel, "enable_batch_sharded_sampling", False
        ),
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "speculative decoding": config.speculative_config is not None,
        "whole-model graphs for prefills (cudagraph_mode FULL; use FULL_AND_PIECEWISE)": replays_prefills(config),
    }
    for what, asked in reasons.items():
        if asked:
            raise RevisitError(
                f"ReVisiT's vLLM plug-in does not work with {what}: switch it off, or leave the plug-in out."
            )


def replays_prefills(config: VllmConfig) -> bool:
    """Whether prefills run as one replayed graph, of which Python sees nothing."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.mixed_mode() is CUDAGraphMode.FULL


@functools.cache
def tapped(name: str) -> type:
    """vLLM's class for an architecture, tapped."""
    base = getattr(import_module(f"vllm.model_executor.models.{ARCHITECTURES[name]}"), name)
    return type(name, (Tapped, base), {"__module__": __name__, "__doc__": f"{name}, tapped."})


def __getattr__(name: str) -> Any:
    if name in ARCHITECTURES:
        return tapped(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
