"""The parts of a vision-language model that decoding methods need, found in its configuration and modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.types import Model

HALF = (torch.float16, torch.bfloat16)
LARGEST_LOGIT = 1e30  # larger products have overflowed, or nearly so
# A CPU tensor: `torch.where` would start a kernel to fill a Python number on the device.
NOT_A_LOGIT = torch.tensor(math.nan)


class Projection(Protocol):
    """Projects states to logits for some token ids, as the model would."""

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Project in at least float32, or in the model's dtype and rounding.  (..., n, d), (..., k) -> (..., n, k)"""

    @property
    def plain_weight(self) -> Tensor | None:
        """The (V, d) weight if logits are just states times it; else None."""


@dataclass(frozen=True)
class LinearHead:
    """A head whose rows can be gathered: a weight, an optional bias and an optional elementwise function of the logits."""

    weight: Tensor  # (V, d)
    bias: Tensor | None = None  # (V,)
    transform: Callable[[Tensor], Tensor] | None = None

    @property
    def plain_weight(self) -> Tensor | None:
        return self.weight if self.bias is None and self.transform is None else None

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Project states; NaN where `transform` would hide an overflow.  (..., n, d), (..., k) -> (..., n, k)"""
        if not model_dtype and ids.ndim > 1 and not self.gathers(states, ids):
            full = multiply(states.flatten(0, -2)[None], self.weight[None]).view(*states.shape[:-1], -1)  # (..., n, V)
            raw = full.gather(-1, ids.unsqueeze(-2).expand(*states.shape[:-1], -1))
        else:
            rows = self.rows(self.weight, ids)  # (..., k, d)
            raw = states.to(rows.dtype) @ rows.mT if model_dtype else multiply(states, rows)
        if self.bias is not None:
            raw = raw + self.rows(self.bias, ids).unsqueeze(-2).to(raw.dtype)
        if self.transform is None:
            return raw
        return torch.where(raw.abs() < LARGEST_LOGIT, self.transform(raw), NOT_A_LOGIT)

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        """Gather the rows of token ids.  (V, ...), (..., k) -> (..., k, ...)"""
        return values[ids]

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        """Return whether gathering rows moves fewer bytes than computing the logits of the whole vocabulary."""
        vocabulary, width = self.weight.shape
        rows = (3 * ids.numel() - vocabulary) * width * self.weight.element_size()  # written once, read twice
        return rows <= 4 * (vocabulary + 2 * ids.shape[-1]) * states.numel() // width


def multiply(states: Tensor, rows: Tensor) -> Tensor:
    """Multiply in at least float32.  (..., n, d), (..., k, d) -> (..., n, k)

    Half-precision matrices on a GPU are not converted if torch can accumulate their product in float32.
    """
    half = states.is_cuda and states.ndim == 3 and states.dtype == rows.dtype and rows.dtype in HALF
    if half and _has_wide_products(states.device, states.dtype):
        return torch.bmm(states, rows.mT, out_dtype=torch.float32)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return states.to(wide) @ rows.to(wide).mT


@cache
def _has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can multiply half-precision matrices into a float32 one on this device."""
    matrix = torch.zeros(1, 8, 8, device=device, dtype=dtype)
    try:
        torch.bmm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


@dataclass
class Head:
    """The language-model head and the transform of its logits (scaling, soft-capping)."""

    module: nn.Module
    transforms: list[Callable[[Tensor], Tensor]] = field(default_factory=lambda: [_identity])
    transform: Callable[[Tensor], Tensor] | None = None
    _computed: tuple[Tensor, Tensor | None] | None = None  # weight and bias of a head that cannot be indexed

    @property
    def weight(self) -> Tensor | None:
        """The (V, d) weight if its rows can be gathered; None for quantized, wrapped or off-loaded heads."""
        weight = getattr(self.module, "weight", None)
        if type(self.module) is not nn.Linear or weight is None or not weight.is_floating_point():
            return None
        return None if weight.device.type == "meta" else weight

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight if there is no bias, scaling or cap; else None."""
        return self.linear().plain_weight

    @property
    def device(self) -> torch.device:
        weight = self.weight
        if weight is not None:
            return weight.device
        device = next(self.module.parameters()).device
        # An off-loaded module has its weights on the meta device between calls.
        hook = getattr(self.module, "_hf_hook", None)
        return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device

    def linear(self) -> LinearHead:
        """Return a head whose rows can be gathered. If this one cannot be indexed, its rows are computed once."""
        weight, bias = self.weight, getattr(self.module, "bias", None)
        if weight is None:
            if self._computed is None:
                self._computed = compute_rows(self.module, self.device)
            weight, bias = self._computed
        return LinearHead(weight, bias, None if self.transform in (None, _identity) else self.transform)

    @property
    def vocabulary(self) -> int:
        """The number of logits."""
        return len(self.linear().weight)

    def all_logits(self, states: Tensor) -> Tensor:
        """Project states over the whole vocabulary, in at least float32.  (n, d) -> (n, V)"""
        raw = self.module(states)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return raw if self.transform is None else self.transform(raw)

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Project states for some token ids, as the model would.  (..., n, d), (..., k) -> (..., n, k)"""
        return self.linear().logits(states, ids, model_dtype)

    def calibrate(self, state: Tensor, logits: Tensor, what: str) -> None:
        """Find the declared transform that the model applies, from one state (d,) and its logits (V,).

        A configuration may declare a scaling or cap that the model's forward pass does not use.
        """
        ids = logits.topk(min(256, logits.numel())).indices.to(self.device)
        target = logits.to(self.device)[ids].float()
        kept = target.abs() < LARGEST_LOGIT  # models mask tokens with -inf or the smallest number
        ids, target = ids[kept], target[kept]
        if not len(ids):
            raise RevisitError(
                f"No logit of {what} is finite: its weights or its image processor's settings (mean, scale) are damaged, or "
                "half precision overflows; get a complete copy, or load it in float32."
            )
        self.transform = None
        raw = self.logits(state[None].to(self.device), ids)[0].float()
        errors = []
        for transform in self.transforms:
            scaled = transform(raw)
            errors.append(float(((scaled - scaled[0]) - (target - target[0])).abs().max()))
        best = min(range(len(errors)), key=errors.__getitem__)
        rounding = 16 * torch.finfo(state.dtype).eps * float(raw.abs().max())
        if errors[best] > 2e-3 * float(target.max() - target.min()) + rounding + 1e-6:
            raise RevisitError(
                f"The logits of {what} are not its LM head applied to its final hidden state (largest difference "
                f"{errors[best]:.3g}), so vision tokens cannot be projected as the model projects its own output; "
                "this model is not supported."
            )
        self.transform = self.transforms[best]


@torch.no_grad()
def compute_rows(module: nn.Module, device: torch.device, chunk: int = 512) -> tuple[Tensor, Tensor | None]:
    """Compute the weight (V, d) and bias of a head that cannot be indexed (quantized, wrapped, off-loaded) from unit states."""
    width = getattr(module, "in_features", None) or getattr(getattr(module, "base_layer", None), "in_features", None)
    if not isinstance(width, int):
        raise RevisitError(
            f"The LM head is a {type(module).__name__} whose rows cannot be read and whose width is not declared (in_features), so "
            "vision tokens cannot be projected: load the model with a plain head."
        )
    dtype = next((p.dtype for p in module.parameters() if p.dtype in HALF), torch.float32)
    bias = module(torch.zeros(1, width, device=device, dtype=dtype))[0]  # (V,)
    weight = bias.new_empty(len(bias), width)
    for start in range(0, width, chunk):
        units = torch.eye(width, dtype=dtype, device=device)[start : start + chunk]
        weight[:, start : start + chunk] = (module(units) - bias).T
    return weight, bias if bool(bias.any()) else None


def _identity(logits: Tensor) -> Tensor:
    return logits


def _declared_transforms(text_config: Any) -> list[Callable[[Tensor], Tensor]]:
    """Return the identity and the transforms of logits that the configuration declares."""
    scale = 1.0
    for name, power in families.LOGIT_FACTORS.items():
        value = getattr(text_config, name, None)
        if isinstance(value, (int, float)) and value:
            scale *= float(value) ** power
    cap = getattr(text_config, families.LOGIT_CAP, None)
    transforms: list[Callable[[Tensor], Tensor]] = [_identity]
    if scale != 1.0:
        transforms.append(lambda x: x * scale)
    if cap:
        transforms.append(lambda x: torch.tanh(x * scale / cap) * cap)
    return transforms


@dataclass
class ModelParts:
    """A model's decoder, its layers, final norm and head, and the ids of vision tokens in its prompts."""

    model: Model
    decoder: nn.Module
    layers: nn.ModuleList
    head: Head
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
        head = _head(model)
        if head is None:
            raise RevisitError(f"{what} has no LM head (get_output_embeddings() is None).")
        decoder = _decoder(model)
        layers = _layers(decoder)
        if layers is None:
            raise RevisitError(f"The decoder layers of {what} could not be found.")
        weights = [getattr(module, "weight", None) for module in (model.get_input_embeddings(), head)]
        tied = None not in weights and weights[0].data_ptr() == weights[1].data_ptr() != 0  # type: ignore[union-attr]
        if getattr(weights[1], "is_meta", False):  # off-loaded: nothing to compare
            tied = declares_tied_head(config)
        transforms = _declared_transforms(text_config(config))
        return cls(model, decoder, layers, Head(head, transforms), tied, vision_token_ids(config))


def unsupported(config: Any, what: str) -> str | None:
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


def text_config(config: Any) -> Any:
    """Return the configuration of the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def declares_tied_head(config: Any) -> bool:
    """Return whether the configuration declares that the LM head shares its weights with the embedding."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (text_config(config), config))


def context_length(config: Any) -> int | None:
    """Return the largest number of positions; None if it is not declared, or if scaled rotary embeddings extend it."""
    text = text_config(config)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    scalings = [rope, *rope.values()] if isinstance(rope, dict) else []  # one for all layers, or one per type of layer
    if any(isinstance(scaling, dict) and "factor" in scaling for scaling in scalings):
        return None
    return limit if isinstance(limit, int) and limit > 0 else None


def vision_token_ids(config: Any) -> tuple[int, ...]:
    """Return the token ids of images and videos in prompts, as the configuration declares them."""
    values = (getattr(config, name, None) for name in families.VISION_TOKEN_IDS)
    return tuple(dict.fromkeys(value for value in values if isinstance(value, int)))


def vision_mask(input_ids: Tensor, vision_ids: Sequence[int]) -> Tensor:
    """Return the mask of vision tokens in prompts.  (B, T) -> (B, T)"""
    return torch.isin(input_ids, torch.tensor(vision_ids, device=input_ids.device))


def describe(model: Model) -> str:
    """Name the model's class and type, for messages."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown type')})"


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
