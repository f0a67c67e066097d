"""What a command prints on stderr about the embedded models, so that nobody takes their answers for a real model's."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_notice(name: str) -> None:
    """For an embedded model: what it knows."""
    from revisit.embedded.familiar import NOTICE
    from revisit.models.config import is_embedded

    if is_embedded(name):
        print(f"note: {NOTICE}", file=sys.stderr)


def print_unfamiliar(pictures: Sequence[str]) -> None:
    """Name pictures that are not like what the embedded model knows."""
    from revisit.embedded.familiar import advice

    if pictures:
        more = f" (and {len(pictures) - 1} more)" if len(pictures) > 1 else ""
        print(f"note: {advice(pictures[0] + more)}", file=sys.stderr)
