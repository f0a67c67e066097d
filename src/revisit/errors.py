"""The one error a user should ever see: a sentence that says what, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RevisitError(ValueError):
    """Raised for anything the caller can put right; the command line prints it and exits with status 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> RevisitError:
    """The error for a name that is not known, with the nearest known name if one is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return RevisitError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")
