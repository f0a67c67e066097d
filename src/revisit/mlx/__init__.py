"""ReVisiT in mlx-vlm: a logits processor for its `generate`, computed in MLX.

    import mlx_vlm, revisit.mlx

    model, processor = mlx_vlm.load("mlx-community/Qwen2.5-VL-3B-Instruct-4bit")
    with revisit.mlx.attach(model, revisit.ReVisiT()) as refine:
        mlx_vlm.generate(model, processor, prompt, image="photo.jpg", logits_processors=[refine])

Inside the context, modules of the decoder are wrapped to keep the hidden states of the image tokens during prefill, in one piece
or in chunks. The arithmetic is that of `revisit.step.reference`, in float32. The host reads the number of plausible tokens once
per step; everything else stays on the device. With `floor`, it also reads the tokens written so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx import nn

from revisit.decoding.row_guard import AnswerGuard
from revisit.errors import RevisitError
from revisit.forward.support import best_support
from revisit.methods.revisit import ReVisiT
from revisit.models.families import LOGIT_CAP, LOGIT_FACTORS, resolve_layers
from revisit.models.head import LARGEST_LOGIT
from revisit.models.parts import vision_token_ids
from revisit.step.interface import RESOLUTION
from revisit.step.rule import Rule

__all__ = ["Refiner", "attach", "refine_row"]

PART = 8192  # tokens whose logits are computed at once to read the image tokens over the whole vocabulary
Head = Callable[[mx.array, mx.array], mx.array]  # states (n, d), token ids (k,) -> logits (n, k)


@contextmanager
def attach(model: nn.Module, method: ReVisiT | None = None, processor: Any = None) -> Iterator[Refiner]:
    """Wrap modules of a model and yield ReVisiT's logits processor; restore the model at the end.

    Args:
        model: A model loaded by `mlx_vlm.load`. It decodes one prompt at a time.
        method: The settings; by default those recommended for the model's family. `floor` reads the layer `floor_layer`, by
            default the last.
        processor: The processor that `mlx_vlm.load` returned, which `floor` needs to find the names.
    """
    config, language = model.config, model.language_model
    decoder: Any = getattr(language, "model", None)
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise RevisitError(
            f"revisit.mlx does not support {config.model_type}: its decoder has no layers or no final norm."
        )
    text = getattr(config, "text_config", config)
    if transformed := [name for name in (LOGIT_CAP, *LOGIT_FACTORS) if getattr(text, name, None) not in (None, 1)]:
        raise RevisitError(f"revisit.mlx does not support {config.model_type}: its logits depend on {transformed[0]}.")
    image_tokens = vision_token_ids(config)
    if not image_tokens:
        raise RevisitError(f"revisit.mlx does not support {config.model_type}: its configuration names no image token.")
    method = method or ReVisiT.recommended(model)
    if not method.usual or method.phase != "both":
        raise RevisitError(
            'revisit.mlx supports divergence="jsd", select="min" or "max", fusion="poe", vocabulary="subset", '
            'precision="float32" and phase="both" only.'
        )
    if method.floor and processor is None:
        raise RevisitError("revisit.mlx needs the processor to find the names that floor withholds: pass it to attach.")
    tied = not hasattr(language, "lm_head")
    depth, norm, embed = len(decoder.layers), decoder.norm, model.get_input_embeddings
    layers = resolve_layers(method.layers, depth, tied)
    head = _projection(decoder.embed_tokens if tied else language.lm_head)
    norms = {layer: norm if layer == depth or method.norm == "final" else nn.Identity() for layer in layers}
    names = None
    if method.floor:
        layer = depth if method.floor_layer is None else method.floor_layer
        rows = (decoder.embed_tokens if tied else language.lm_head).weight.shape[0]
        guard = AnswerGuard(getattr(processor, "tokenizer", processor), config.model_type, method)
        names = _Names(guard, layer, norm if layer == depth else nn.Identity(), head, rows)
        layers = tuple({*layers, layer})
    refiner = Refiner(method, head, image_tokens, norms, depth, names)

    def get_input_embeddings(input_ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        output = embed(input_ids, *args, **kwargs)
        if output.inputs_embeds.shape[1] != input_ids.shape[1]:
            raise RevisitError(
                f"revisit.mlx does not support {config.model_type}: its image tokens are not in the prompt."
            )
        refiner.begin(input_ids)
        return output

    with ExitStack() as stack:
        model.get_input_embeddings = get_input_embeddings
        stack.callback(delattr, model, "get_input_embeddings")
        for layer in layers:
            if layer < depth:
                block = decoder.layers[layer]
                decoder.layers[layer] = _Observed(block, partial(refiner.keep, layer))
                stack.callback(decoder.layers.__setitem__, layer, block)
        decoder.norm = _Observed(norm, partial(refiner.keep, depth))
        stack.callback(setattr, decoder, "norm", norm)
        yield refiner
        refiner.check()


class Refiner:
    """A logits processor that applies ReVisiT's step to states of the layers in `norms`; made by `attach`."""

    def __init__(
        self,
        rule: Rule,
        head: Head,
        image_tokens: Sequence[int],
        norms: Mapping[int, nn.Module],
        final: int,
        names: _Names | None = None,
    ) -> None:
        self._rule, self._head, self._image_tokens, self._names = rule, head, image_tokens, names
        self._norms, self._final = norms, final  # the norm of each layer's states, and the last layer
        self._forwards = self._calls = 0

    def begin(self, input_ids: mx.array) -> None:
        """Start a prompt, and drop the states of the previous one.  (1, length)"""
        if len(input_ids) != 1:
            raise RevisitError(f"revisit.mlx decodes one prompt at a time, not {len(input_ids)}.")
        prompt = input_ids[0].tolist()
        self._images = [position for position, token in enumerate(prompt) if token in self._image_tokens]
        self._length, self._ids = len(prompt), prompt
        layers = {*self._norms, *([self._names.layer] if self._names else [])}
        self._position = dict.fromkeys((*layers, self._final), 0)
        self._kept: dict[int, list[mx.array]] = {layer: [] for layer in layers}
        self._states: mx.array | None = None
        self._prompt = 0  # length of the part of the prompt that mlx-vlm passes to logits processors

    def keep(self, layer: int, states: mx.array) -> None:
        """Keep the states of image tokens in a chunk of the prompt, and count the forwards that predict a token.  (1, m, d)"""
        start, self._position[layer] = self._position[layer], self._position[layer] + states.shape[1]
        if layer == self._final and self._position[layer] >= self._length:
            self._forwards += 1
        rows = [position - start for position in self._images if start <= position < start + states.shape[1]]
        if rows and layer in self._kept:
            self._kept[layer].append(states[0, mx.array(rows)])
            mx.async_eval(self._kept[layer][-1])

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the scores of one step.  (m,), (1, V) -> (1, V)"""
        self._calls += 1
        if self._states is None:
            if not self._images:
                raise RevisitError(
                    "revisit.mlx found no image tokens in the prompt: pass an image, and no prompt cache that already holds it."
                )
            kept = {layer: mx.concatenate(states) for layer, states in self._kept.items()}
            self._kept.clear()
            self._states = mx.concatenate([norm(kept[layer]) for layer, norm in self._norms.items()])
            self._prompt = len(tokens)
            if self._names:
                self._names.begin(self._ids, kept[self._names.layer])
        written = tokens[self._prompt :]
        scores = refine_row(logits[0], self._states, self._head, self._rule, written)
        if self._names:
            scores = self._names.withhold(scores, logits[0], written)
        return scores[None].astype(logits.dtype)

    @property
    def support(self) -> dict[str, float]:
        """The support of each category of names by the last image, with `floor`; names below the floor are withheld."""
        return self._names.guard.support if self._names else {}

    def check(self) -> None:
        """Raise RevisitError if the model predicted tokens that were not refined."""
        if self._forwards > self._calls:
            raise RevisitError(
                f"mlx-vlm predicted {self._forwards - self._calls} tokens without ReVisiT: pass the refiner in "
                "logits_processors, and no draft model."
            )


class _Names:
    """Withhold names with little support: the setting `floor`."""

    def __init__(self, guard: AnswerGuard, layer: int, norm: nn.Module, head: Head, vocabulary: int) -> None:
        self.guard, self.layer = guard, layer
        self._norm, self._head, self._vocabulary = norm, head, vocabulary

    def begin(self, prompt: Sequence[int], states: mx.array) -> None:
        """Read the support of the names by a layer's states of the image tokens.  (n, d)"""
        states, ids = self._norm(states), self.guard.spelling.read_tokens
        total = mx.full((states.shape[0],), -math.inf)  # over the whole vocabulary, in parts
        for start in range(0, self._vocabulary, PART):
            part = mx.arange(start, min(start + PART, self._vocabulary))
            total = mx.logaddexp(total, mx.logsumexp(self._head(states, part), -1))
            mx.eval(total)
        read = mx.exp(self._head(states, mx.array(ids)) - total[:, None])
        self.guard.begin(prompt, self.guard.spelling.support(best_support(torch.from_numpy(np.array(read)), ids)))

    def withhold(self, scores: mx.array, logits: mx.array, written: mx.array) -> mx.array:
        """Return the scores without names that may not come next; the logits without them if nothing else is left.  (V,), (V,), (m,)"""
        blocked = self.guard.blocked(written.tolist()).numpy()
        if not len(blocked):
            return scores
        ids, never = mx.array(blocked), mx.full((len(blocked),), -math.inf)
        left = mx.put_along_axis(scores, ids, never.astype(scores.dtype), -1)
        plain = mx.put_along_axis(logits, ids, never.astype(logits.dtype), -1)
        return mx.where(left.max() > -math.inf, left, plain)


class _Observed:
    """A module whose input is passed to a callback."""

    def __init__(self, module: Any, callback: Callable[[mx.array], None]) -> None:
        self._module, self._callback = module, callback

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> Any:
        self._callback(states)
        return self._module(states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# -- the step -----------------------------------------------------------------------------------------------------


def refine_row(logits: mx.array, states: mx.array, head: Head, rule: Rule, written: mx.array) -> mx.array:
    """Take one step of one sequence, as `revisit.step.reference.refine_row` does.  (V,), (n, d), (m,) -> (V,)"""
    logp = _log_softmax(logits.astype(mx.float32))
    keep = logp >= logp.max() + math.log(rule.alpha)
    size = int(keep.sum())
    if not size:  # the logits are not a distribution
        return logits
    ids = mx.sort(mx.argpartition(-logp, size - 1)[:size])  # (k,)
    log_p = _log_softmax(logp[ids])
    repeated = (ids[:, None] == written).any(-1)
    final = log_p if size == 1 else _fuse(log_p, head(states, ids), rule, repeated)
    return mx.put_along_axis(mx.full(logp.shape, -math.inf), ids, final, -1)


def _fuse(log_p: mx.array, logits: mx.array, rule: Rule, repeated: mx.array) -> mx.array:
    """Return the product of P and the nearest vision tokens' Q.  (k,), (n, k), (k,) -> (k,)"""
    usable = (mx.abs(logits) < LARGEST_LOGIT).all(-1)  # (n,); False if a logit is NaN
    log_qs = _log_softmax(logits)
    distance = _jsd(log_p, log_qs) * (-1 if rule.select == "max" else 1)
    distance = mx.where(usable, distance, math.inf)
    gap = mx.where(usable, mx.round((distance - distance.min()) / RESOLUTION), 1e7).astype(mx.int64)
    order = mx.argsort(gap * len(gap) + mx.arange(len(gap)))[: rule.neighbors]  # the first in case of a tie
    count = mx.minimum(usable.sum(), len(order))
    chosen = mx.where((mx.arange(len(order)) < count)[:, None], log_qs[order], -math.inf)
    log_q = mx.logsumexp(chosen, 0) - mx.log(count)
    weight = _weight(log_p, log_q, rule.weight)
    fused = mx.where((count > 0) & (weight > 0), log_p + weight * log_q, log_p)
    if rule.once:
        fused = _limit(log_p, fused, repeated, rule.once)
    return _log_softmax(fused) if rule.normalize else fused


def _limit(log_p: mx.array, fused: mx.array, written: mx.array, once: float) -> mx.array:
    """Limit what written tokens gain, as `revisit.step.reference.limit` does.  (k,), (k,), (k,) -> (k,)"""
    gain = fused - log_p
    order = mx.argsort(mx.where(written, gain, math.inf))
    sums = []
    for values in (log_p, fused):
        others = mx.logsumexp(mx.where(written, -math.inf, values), keepdims=True)
        added = mx.where(written, values, -math.inf)[order]
        sums.append(mx.logcumsumexp(mx.concatenate([others, added])))
    means = mx.where(sums[0] > -math.inf, sums[1] - sums[0], math.inf)
    return mx.where(written, fused - once * mx.maximum(gain - means.min(), 0), fused)


def _weight(log_p: mx.array, log_q: mx.array, weight: float | str) -> mx.array:
    """Return the weight of the vision side.  -> ()"""
    if not isinstance(weight, str):
        return mx.array(weight)
    agreement = mx.clip(1 - _jsd(log_p, log_q) / math.log(2), 0, 1)
    uncertainty = mx.sqrt(mx.clip(-mx.expm1(log_p.max()), 0, 1))
    return {"agreement": agreement, "uncertainty": uncertainty, "both": agreement * uncertainty}[weight]


def _jsd(log_p: mx.array, log_q: mx.array) -> mx.array:
    """Return the Jensen-Shannon divergence in nats.  (k,), (..., k) -> (...)"""
    log_m = mx.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_mean(log_p, log_p - log_m) + _mean(log_q, log_q - log_m))


def _mean(log_p: mx.array, values: mx.array) -> mx.array:
    """Return the mean of values under P; tokens of probability 0 contribute nothing."""
    p = mx.exp(log_p)
    return mx.where(p > 0, p * values, 0).sum(-1)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, -1, keepdims=True)


# -- the model ----------------------------------------------------------------------------------------------------


def _projection(layer: nn.Module) -> Head:
    """Return the projection of states onto some tokens by a linear layer or a tied embedding, quantized or not."""

    def logits(states: mx.array, ids: mx.array) -> mx.array:
        rows = layer.weight[ids]
        if "scales" in layer:  # quantized
            biases = layer.biases[ids] if "biases" in layer else None
            rows = mx.dequantize(rows, layer.scales[ids], biases, layer.group_size, layer.bits, layer.mode)
        product = states.astype(mx.float32) @ rows.astype(mx.float32).T
        return product + layer.bias[ids].astype(mx.float32) if "bias" in layer else product

    return logits
