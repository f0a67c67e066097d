"""The environment variables that ReVisiT reads."""

from __future__ import annotations

import os
from pathlib import Path

from revisit.errors import RevisitError

API_KEY = "REVISIT_API_KEY"  # read by `revisit serve` and `revisit ui` with their other options


def flag(name: str, default: bool) -> bool:
    """Read a switch; unset or empty means the default."""
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "1", "true", "yes", "on", "0", "false", "no", "off"):
        raise RevisitError(f"{name}={value!r} in the environment is not valid: use 1 or 0.")
    return value in ("1", "true", "yes", "on") if value else default


def triton_step() -> bool:
    """Return whether REVISIT_KERNEL enables the Triton step (on by default)."""
    return flag("REVISIT_KERNEL", True)


def vllm_plugin() -> bool:
    """Return whether REVISIT_VLLM enables the model classes for vLLM that store vision states (off by default)."""
    return flag("REVISIT_VLLM", False)


def enable_vllm_plugin() -> None:
    """Set REVISIT_VLLM for this process and its children."""
    os.environ["REVISIT_VLLM"] = "1"


def vllm_layers() -> str | None:
    """Return REVISIT_VLLM_LAYERS: the layers whose vision states vLLM stores; None means the recommended ones."""
    return os.environ.get("REVISIT_VLLM_LAYERS", "").strip() or None


def vllm_pool_mb() -> float | None:
    """Return REVISIT_VLLM_POOL_MB: megabytes that each vLLM worker reserves for vision states; None if it is not set."""
    value = os.environ.get("REVISIT_VLLM_POOL_MB", "").strip()
    if not value:
        return None
    try:
        megabytes = float(value)
    except ValueError:
        megabytes = 0.0
    if not 0 < megabytes < float("inf"):
        raise RevisitError(f"REVISIT_VLLM_POOL_MB={value!r} in the environment is not a number of megabytes.")
    return megabytes


def vllm_calibration() -> Path | None:
    """Return REVISIT_VLLM_CALIBRATION: the file of `revisit calibrate` for requests to vLLM; None means the model's own entry."""
    value = os.environ.get("REVISIT_VLLM_CALIBRATION", "").strip()
    return Path(value).expanduser() if value else None


def cache_folder() -> Path:
    """Return the folder for generated data: REVISIT_CACHE, else revisit/ in XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("REVISIT_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "revisit"


def nltk_folders() -> list[str]:
    """Return NLTK_DATA: folders with NLTK's data, searched before NLTK's own."""
    return [folder for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]


def secret(name: str) -> str | None:
    """Return the secret in a variable named by the user, for example the judge's API key; None if it is not set."""
    return os.environ.get(name) or None


def hide_progress_bars(*, downloads: bool) -> None:
    """Hide other libraries' progress bars, except those of downloads if requested; HF_HUB_DISABLE_PROGRESS_BARS takes precedence."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ:
        return
    disable_progress_bars()  # also those of transformers, which is imported later
    if downloads:
        enable_progress_bars("huggingface_hub")
    else:
        os.environ.setdefault("TQDM_DISABLE", "1")


def world_size() -> int:
    """Return WORLD_SIZE: the number of processes that a launcher (torchrun) started; 1 without one."""
    value = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if not value.isdecimal():
        raise RevisitError(f"WORLD_SIZE={value!r} in the environment is not a number of processes.")
    return int(value)
