"""What a command says on stderr about the embedded model, so that nobody takes its answers for a real model's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def tell_embedded(name: str, model: Any, processor: Any, images: Sequence[tuple[str, Image]]) -> None:
    """For the embedded model: what it knows, and which of the named pictures are not like that."""
    from revisit.models.config import is_embedded
    from revisit.tiny.familiar import KNOWS, advice

    if not is_embedded(name):
        return
    print(f"note: {KNOWS}", file=sys.stderr)
    unlike = [(what, said) for what, image in images if (said := advice(model, processor, image, what)) is not None]
    if unlike:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        print(f"note: {unlike[0][1].replace(' is not like', more + ' is not like', 1)}", file=sys.stderr)
