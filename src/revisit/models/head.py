"""The language-model head: how a model turns states into logits.

A configuration may declare a scaling or a cap that the model's forward pass does not use. So a `Head` is only made by `calibrated`, from
a state and the logits that the model computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.models import families

HALF = (torch.float16, torch.bfloat16)
LARGEST_LOGIT = 1e30  # larger products have overflowed, or nearly so
Transform = Callable[[Tensor], Tensor]  # an elementwise function of logits


@dataclass(frozen=True)
class LinearHead:
    """Projects states to logits for some token ids, as the model would.

    Subclasses gather rows that are not in `weight`, or not all of them.
    """

    weight: Tensor  # (V, d)
    bias: Tensor | None = None  # (V,)
    transform: Transform | None = None

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight if logits are just states times it; else None."""
        return self.weight if self.bias is None and self.transform is None else None

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def vocabulary(self) -> int:
        """The number of logits."""
        return len(self.weight)

    def all_logits(self, states: Tensor) -> Tensor:
        """Project states over the whole vocabulary, in at least float32.  (n, d) -> (n, V)"""
        raw = nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)
        return self.transformed(raw.to(torch.promote_types(raw.dtype, torch.float32)))

    def transformed(self, raw: Tensor) -> Tensor:
        """Return the logits for a raw product."""
        return raw if self.transform is None else self.transform(raw)

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Project in at least float32, or in the model's dtype and rounding.  (..., n, d), (..., k) -> (..., n, k)

        NaN where `transform` would hide an overflow.
        """
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
        return torch.where(raw.abs() < LARGEST_LOGIT, self.transform(raw), constant(math.nan, raw.device))

    @property
    def local(self) -> bool:
        """Whether the weight has the rows of all tokens, so that kernels can read them in place."""
        return True

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        """Gather the rows of token ids.  (V, ...), (..., k) -> (..., k, ...)"""
        return values[ids]

    def gathered(self, ids: Tensor) -> GatheredHead:
        """Return a head that has the rows of these tokens only."""
        bias = None if self.bias is None else self.rows(self.bias, ids)
        return GatheredHead(self.rows(self.weight, ids), bias, self.transform)

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        """Return whether gathering rows moves fewer bytes than computing the logits of the whole vocabulary."""
        vocabulary, width = self.weight.shape
        rows = (3 * ids.numel() - vocabulary) * width * self.weight.element_size()  # written once, read twice
        return rows <= 4 * (vocabulary + 2 * ids.shape[-1]) * states.numel() // width


class GatheredHead(LinearHead):
    """A head with a row for each token of a list (..., k), which `ids` repeats in any shape."""

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        return values.view(*ids.shape, *values.shape[ids.ndim :])

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        return True


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor of a device, made once.

    torch copies a tensor of the host to the device in every call, and waits; for a Python number it starts a kernel.
    """
    with torch.inference_mode(False):
        return torch.full((), value, device=device, dtype=torch.float32)


def multiply(states: Tensor, rows: Tensor) -> Tensor:
    """Multiply in at least float32.  (..., n, d), (..., k, d) -> (..., n, k)

    Half-precision matrices on a GPU are not converted if torch can accumulate their product in float32.
    """
    half = states.is_cuda and states.ndim == 3 and states.dtype == rows.dtype and rows.dtype in HALF
    if half and _has_wide_products(states.device, states.dtype):
        return torch.bmm(states, rows.mT, out_dtype=torch.float32)
    wide = torch.promote_types(rows.dtype, torch.float32)
    states, rows = states.to(wide), rows.to(wide)
    # On a CPU, a few rows times many states are slower the other way round.
    return (rows @ states.mT).mT if states.ndim == 2 else states @ rows.mT


@cache
def _has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can multiply half-precision matrices into a float32 one on this device."""
    matrix = torch.zeros(1, 8, 8, device=device, dtype=dtype)
    try:
        torch.bmm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class Head(LinearHead):
    """A model's LM head, with the transform (scaling, soft-capping) that its forward pass applies to the logits."""

    module: nn.Module = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        return head_device(self.module)

    def all_logits(self, states: Tensor) -> Tensor:
        raw = self.module(states)
        return self.transformed(raw.to(torch.promote_types(raw.dtype, torch.float32)))


def calibrated(module: nn.Module, text_config: object, state: Tensor, logits: Tensor, what: str) -> Head:
    """Return the head of a model that computed these logits (V,) from this state (d,); `what` names the model in errors."""
    device = head_device(module)
    ids = logits.topk(min(256, logits.numel())).indices.to(device)
    target = logits.to(device)[ids].float()
    kept = target.abs() < LARGEST_LOGIT  # models mask tokens with -inf or the smallest number
    ids, target = ids[kept], target[kept]
    if not len(ids):
        raise RevisitError(
            f"No logit of {what} is finite: its weights or its image processor's settings (mean, scale) are damaged, or "
            "half precision overflows; get a complete copy, or load it in float32."
        )
    weight, bias = rows_of(module)
    raw = LinearHead(weight, bias).logits(state[None].to(device), ids)[0].float()
    transforms = declared_transforms(text_config)
    errors = []
    for transform in transforms:
        scaled = raw if transform is None else transform(raw)
        errors.append(float(((scaled - scaled[0]) - (target - target[0])).abs().max()))
    best = min(range(len(errors)), key=errors.__getitem__)
    rounding = 16 * torch.finfo(state.dtype).eps * float(raw.abs().max())
    if errors[best] > 2e-3 * float(target.max() - target.min()) + rounding + 1e-6:
        raise RevisitError(
            f"The logits of {what} are not its LM head applied to its final hidden state (largest difference "
            f"{errors[best]:.3g}), so vision tokens cannot be projected as the model projects its own output; "
            "this model is not supported."
        )
    return Head(weight, bias, transforms[best], module=module)


def declared_transforms(text_config: object) -> Sequence[Transform | None]:
    """Return the transforms of logits that a configuration declares, after None for no transform."""
    scale = 1.0
    for name, power in families.LOGIT_FACTORS.items():
        value = getattr(text_config, name, None)
        if isinstance(value, (int, float)) and value:
            scale *= float(value) ** power
    cap = getattr(text_config, families.LOGIT_CAP, None)
    transforms: list[Transform | None] = [None]
    if scale != 1.0:
        transforms.append(lambda x: x * scale)
    if cap:
        transforms.append(lambda x: torch.tanh(x * scale / cap) * cap)
    return transforms


def plain_tensors(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors that a quantized one consists of; nothing for other values."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def has_plain_weight(module: nn.Module) -> bool:
    """Return whether a head is a linear layer with a weight that can be read: not quantized, wrapped, off-loaded or sharded."""
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or weight is None or hasattr(weight, "__tensor_flatten__"):
        return False
    return weight.is_floating_point() and not is_elsewhere(weight)


def is_elsewhere(weight: Tensor) -> bool:
    """Return whether a weight is only read while its module runs: off-loaded, or empty as those that DeepSpeed partitions."""
    return weight.is_meta or not weight.numel()


def head_device(module: nn.Module) -> torch.device:
    """Return the device on which a head computes."""
    device = next(module.parameters()).device
    # An off-loaded module has its weights on the meta device between calls.
    hook = getattr(module, "_hf_hook", None)
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


# -- rows ----------------------------------------------------------------------------------------------------------

Rows = tuple[Tensor, Tensor | None]  # (V, d) weight, (V,) bias
# Heads that cannot be indexed -> their logits for one state, and their rows.
_COMPUTED: WeakKeyDictionary[nn.Module, tuple[Tensor, Rows]] = WeakKeyDictionary()


@torch.no_grad()
def rows_of(module: nn.Module) -> Rows:
    """Return the weight and bias of a head. Those of a quantized, wrapped or off-loaded one are computed, and kept until they change."""
    if has_plain_weight(module):
        return module.weight, module.bias  # type: ignore[return-value]
    width = head_width(module)
    dtype = next((p.dtype for p in module.parameters() if p.dtype in HALF), torch.float32)
    state = torch.linspace(-1, 1, width, dtype=dtype, device=head_device(module))
    logits = module(state[None])[0]  # (V,) change with adapters, which may be switched without changing a weight
    known = _COMPUTED.get(module)
    if known is None or not torch.equal(known[0], logits):
        known = _COMPUTED[module] = logits, compute_rows(module, state)
    return known[1]


def head_width(module: nn.Module) -> int:
    """Return the size of the states that a head takes."""
    width = getattr(module, "in_features", None) or getattr(getattr(module, "base_layer", None), "in_features", None)
    if not isinstance(width, int):
        raise RevisitError(
            f"The LM head is a {type(module).__name__} whose rows cannot be read and whose width is not declared (in_features), so "
            "vision tokens cannot be projected: load the model with a plain head."
        )
    return width


def compute_rows(module: nn.Module, like: Tensor, chunk: int = 512) -> Rows:
    """Compute the weight (V, d) and bias of a head from its logits for unit states, which are `like` a state (d,)."""
    width = len(like)
    bias = module(torch.zeros_like(like)[None])[0]  # (V,)
    weight = bias.new_empty(len(bias), width)
    for start in range(0, width, chunk):
        units = torch.eye(width, dtype=like.dtype, device=like.device)[start : start + chunk]
        weight[:, start : start + chunk] = (module(units) - bias).T
    return weight, bias if bool(bias.any()) else None
