"""What a command says on stderr about the embedded models, so that nobody takes their answers for a real model's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def tell_embedded(name: str, model: Any, processor: Any, images: Sequence[tuple[str, Image]]) -> None:
    """For an embedded model: what it knows, and, for the first one, which of the named pictures are not like that."""
    from revisit.embedded.familiar import KNOWS, advice
    from revisit.models.config import is_embedded, knows_scenes_only

    if not knows_scenes_only(name):
        return
    print(f"note: {KNOWS}", file=sys.stderr)
    if not is_embedded(name):
        return
    unlike = [(what, said) for what, image in images if (said := advice(model, processor, image, what)) is not None]
    if unlike:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        print(f"note: {unlike[0][1].replace(' is not like', more + ' is not like', 1)}", file=sys.stderr)
