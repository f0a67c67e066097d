"""The parts of a vision-language model that decoding methods need, found in its configuration and modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.head import Head, calibrated, is_elsewhere
from revisit.models.types import Model

# The head of each model, as it was last calibrated.
_HEADS: WeakKeyDictionary[Model, Head] = WeakKeyDictionary()


@dataclass(frozen=True)
class ModelParts:
    """A model's decoder, its layers, final norm and LM head, and the ids of vision tokens in its prompts."""

    model: Model
    decoder: nn.Module
    layers: nn.ModuleList
    head: nn.Module  # `calibrate` returns what projects states
    tied: bool
    vision_ids: tuple[int, ...]

    @property
    def depth(self) -> int:
        """L: hidden state 0 is the embedding, 1..L-1 are layer outputs, L is the output after the final norm."""
        return len(self.layers)

    @property
    def final_norm(self) -> nn.Module:
        norm = _child(self.decoder, families.FINAL_NORMS)
        if norm is None:
            raise RevisitError(f"{describe(self.model)} has no recognizable final norm; use norm='none'.")
        return norm

    def calibrate(self, state: Tensor, logits: Tensor) -> Head:
        """Return the head that turns this normed final state (d,) into these logits (V,), as the model did."""
        head = calibrated(self.head, text_config(self.model.config), state, logits, describe(self.model))
        _HEADS[self.model] = head
        return head

    def calibrated(self) -> Head | None:
        """Return the head as it was last calibrated, in any call; None for a model that has not run yet."""
        return _HEADS.get(self.model)

    def check_state(self, layer: int, hidden: Tensor) -> None:
        """Raise RevisitError if the hidden states of a layer are not one vector per token (models with several streams)."""
        text = text_config(self.model.config)
        width = getattr(text, "hidden_size", None)
        part_of_a_sum = layer > 0 and hasattr(text, families.BLOCKS_OF_LAYERS)
        if part_of_a_sum or hidden.ndim != 3 or (isinstance(width, int) and hidden.shape[-1] != width):
            raise RevisitError(
                f"Between its layers, {describe(self.model)} keeps several states per token, so hidden state {layer} cannot be "
                "projected: use the last layer (layers='last')."
            )

    @property
    def mlps(self) -> list[nn.Module]:
        """The feed-forward network of every decoder layer."""
        mlps = [mlp for layer in self.layers if (mlp := _child(layer, families.MLPS)) is not None]
        if len(mlps) < len(self.layers):
            raise RevisitError(
                f"A decoder layer of {describe(self.model)} has no recognizable feed-forward network: use another method."
            )
        return mlps

    def feed_forward(self, layer: int, states: Tensor) -> Tensor:
        """Apply the feed-forward half of a decoder layer with its norms.  (..., d) -> (..., d)"""
        before = _child(self.layers[layer], families.NORMS_BEFORE_MLP) or nn.Identity()
        after = _child(self.layers[layer], families.NORMS_AFTER_MLP) or nn.Identity()
        output = self.mlps[layer](before(states))
        output = output[0] if isinstance(output, tuple) else output  # experts also return their scores
        return cast("Tensor", states + after(output.view(states.shape)))

    @classmethod
    def of(cls, model: Model) -> ModelParts:
        """Find the parts of a model; raise RevisitError if there are no vision tokens in its decoder's sequence."""
        config, what = model.config, describe(model)
        if reason := unsupported(config, what):
            raise RevisitError(reason)
        if count := virtual_tokens(model):
            raise RevisitError(
                f"Prompt tuning puts {count} virtual tokens before the prompts of {what}, so the image is not where the prompt has it: use "
                "an adapter inside the layers, such as LoRA, or method='greedy'."
            )
        head = _head(model)
        if head is None:
            raise RevisitError(f"{what} has no LM head (get_output_embeddings() is None).")
        decoder = _decoder(model)
        layers = _layers(decoder)
        if layers is None:
            raise RevisitError(f"The decoder layers of {what} could not be found.")
        weights = [getattr(module, "weight", None) for module in (model.get_input_embeddings(), head)]
        tied = None not in weights and weights[0].data_ptr() == weights[1].data_ptr() != 0  # type: ignore[union-attr]
        if weights[1] is not None and is_elsewhere(weights[1]):  # nothing to compare
            tied = declares_tied_head(config)
        return cls(model, decoder, layers, head, tied, vision_token_ids(config))


def running(model: Model) -> Model:
    """Return the model whose forward pass runs when this one generates: it may be compiled, or wrapped by adapters (peft)."""
    inner: Any = getattr(model, "_orig_mod", None)
    if inner is None and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]
    return model if inner is None or inner is model else running(inner)


def virtual_tokens(model: Model) -> int:
    """Return the number of tokens that an adapter (peft's prompt learning) puts before every prompt."""
    prepares = getattr(model, "prepare_inputs_for_generation", None)
    for part in (model, getattr(prepares, "__self__", None)):
        adapter: Any = getattr(part, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            return int(adapter.num_virtual_tokens)
    return 0


def unsupported(config: object, what: str) -> str | None:
    """Return the reason why a model of this configuration cannot be decoded with its vision tokens; None if it can."""
    text = text_config(config)
    instead = "so there is nothing to revisit; use a decoder-only model such as LLaVA, Qwen-VL or InternVL."
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        return f"{what} is an encoder–decoder model: its decoder never sees vision tokens, {instead}"
    if any(getattr(part, name, None) for part in (config, text) for name in families.CROSS_ATTENTION):
        return f"{what} reads images by cross-attention and keeps no vision tokens in its decoder's sequence, {instead}"
    if reason := families.of(getattr(config, "model_type", "")).unsupported:
        return f"{what} {reason}, {instead}"
    if not vision_token_ids(config):
        images = hasattr(config, "vision_config")
        kind = "keeps no vision tokens in its decoder's sequence" if images else "is a text-only model"
        return f"{what} {kind}, {instead}"
    return None


def text_config(config: object) -> Any:
    """Return the configuration of the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def vocabulary_size(model: Model) -> int:
    """Return the number of a model's logits."""
    return int(getattr(_head(model), "out_features", 0) or text_config(model.config).vocab_size)


def declares_tied_head(config: object) -> bool:
    """Return whether the configuration declares that the LM head shares its weights with the embedding."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (text_config(config), config))


def context_length(config: object) -> int | None:
    """Return the largest number of positions; None if it is not declared, or if scaled rotary embeddings extend it."""
    text = text_config(config)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    scalings = [rope, *rope.values()] if isinstance(rope, dict) else []  # one for all layers, or one per type of layer
    if any(isinstance(scaling, dict) and "factor" in scaling for scaling in scalings):
        return None
    return limit if isinstance(limit, int) and limit > 0 else None


def check_context(model: Model, length: int) -> None:
    """Raise RevisitError for a number of tokens that does not fit into the model's context."""
    limit = context_length(model.config)
    if limit is not None and length > limit:
        raise RevisitError(
            f"The input has {length} tokens, including its image, and the context of {describe(model)} has {limit}: shorten the text, "
            "or send fewer or smaller images."
        )


def vision_token_ids(config: object) -> tuple[int, ...]:
    """Return the token ids of images and videos in prompts, as the configuration declares them."""
    values = (getattr(config, name, None) for name in families.VISION_TOKEN_IDS)
    return tuple(dict.fromkeys(value for value in values if isinstance(value, int)))


def vision_mask(input_ids: Tensor, vision_ids: Sequence[int]) -> Tensor:
    """Return the mask of vision tokens in prompts.  (B, T) -> (B, T)"""
    return torch.isin(input_ids, torch.tensor(vision_ids, device=input_ids.device))


def describe(model: Model) -> str:
    """Name the model's class and type, for messages."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown type')})"


def no_image(model: Model) -> RevisitError:
    """Return the error for prompts without an image."""
    return RevisitError(
        f"There is no image in the prompt: none of its tokens is a vision token of {describe(model)}; pass an image (with its "
        "placeholder in the text, which the processor's chat template writes), or use method='greedy'."
    )


def _head(model: Model) -> nn.Module | None:
    """Return the LM head of the model, or of its language model if the model itself declares none."""
    models: list[Any] = [model, *(getattr(model, name, None) for name in families.LANGUAGE_MODELS)]
    heads = (part.get_output_embeddings() for part in models if hasattr(part, "get_output_embeddings"))
    return next((head for head in heads if head is not None), None)


def _decoder(model: Model) -> nn.Module:
    """Return the module that contains the decoder layers and returns the normed last hidden state."""
    decoder = model.get_decoder()
    while _layers(decoder) is None:
        inside = (decoder.get_decoder() if hasattr(decoder, "get_decoder") else None, getattr(decoder, "model", None))
        inner = next((part for part in inside if part is not None and part is not decoder), None)
        if inner is None:
            break
        decoder = inner
    return decoder  # type: ignore[no-any-return]


def _layers(decoder: nn.Module) -> nn.ModuleList | None:
    layers = getattr(decoder, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def _child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """Return the first submodule with one of these names; None if there is none."""
    children = (getattr(module, name, None) for name in names)
    return next((child for child in children if isinstance(child, nn.Module)), None)
