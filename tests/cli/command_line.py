"""The end of a command, as its user sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The error, which must be the only line on stderr."""
        (line,) = self.err.splitlines()
        assert line.startswith("error: "), line
        return line.removeprefix("error: ")


Run = Callable[..., Done]
