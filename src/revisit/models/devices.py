"""The default device, and what torch can compute on a device."""

from __future__ import annotations

import torch


def default_device() -> str | None:
    """Return the accelerator that models are loaded onto by default; None for the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else None


def emulates_bfloat16() -> bool:
    """Return whether the default device is a GPU without instructions for bfloat16, such as a T4."""
    return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise type of a device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
