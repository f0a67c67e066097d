"""What a command prints on stderr about pictures that the embedded model cannot know."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_unfamiliar(pictures: Sequence[str]) -> None:
    """Name pictures that are not like what the embedded model knows, and say what it knows."""
    from revisit.embedded.familiar import NOTICE, advice

    if pictures:
        more = f" (and {len(pictures) - 1} more)" if len(pictures) > 1 else ""
        print(f"note: {NOTICE} {advice(pictures[0] + more)}", file=sys.stderr)
