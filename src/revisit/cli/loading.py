"""Load the model of a command."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Model, Processor


def load_for_image(model: str, image: Image, name: str, *, any_image: bool, **options: Any) -> tuple[Model, Processor]:
    """Load a model for images such as this one; `tiny` accepts other images than scenes only with `any_image`."""
    from revisit.models.config import is_embedded
    from revisit.models.loading import load

    logging.getLogger("revisit.tiny").disabled = True  # its notice is about unfamiliar images, which are checked here
    loaded, processor = load(model, **options)
    if is_embedded(model) and not any_image:
        from revisit.embedded.familiar import check_scene

        check_scene(loaded, processor, image, name)
    return loaded, processor
