"""Processors: what turns texts and images into model inputs, with or without torchvision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.processing_utils import ProcessorMixin

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.checkpoint import brief
from revisit.models.config import load_config, resolve
from revisit.models.types import Model, Processor

ATTRIBUTE = "revisit_processor"  # of a model
MAX_SIDE, MAX_PIXELS = 20_000, 200_000_000  # of images that an image processor may make


def load_processor(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Processor:
    """The processor of a model, padding on the left as batched generation needs.

    A processor that has a video processor cannot be built without torchvision; a subclass for images only takes its place.
    """
    name = resolve(name_or_path)
    config = load_config(name, trust_remote_code=trust_remote_code, **kwargs)
    needs = families.of(config.model_type).needs
    if needs and importlib.util.find_spec(needs) is None:
        raise RevisitError(f"The processor of {name!r} needs {needs}, which is not installed: pip install {needs}.")
    try:
        processor = _build(name, config, trust_remote_code=trust_remote_code, **kwargs)
    except RevisitError:
        raise
    except Exception as error:  # tokenizers, image processors and JSON readers raise many kinds
        raise RevisitError(f"The processor of {name!r} cannot be built: {brief(error)}") from error
    tokenizer, images = getattr(processor, "tokenizer", None), getattr(processor, "image_processor", None)
    if tokenizer is None or images is None:
        lacks = "tokenizer" if tokenizer is None else "image processor"
        raise RevisitError(f"The model {name!r} has no {lacks}; get a complete copy of its folder.")
    _check_sizes(name, images)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor  # type: ignore[no-any-return]


def _check_sizes(name: str, images: object) -> None:
    """Refuses an image processor that would make images of no size, or larger than memory."""
    for field in ("size", "crop_size", "pad_size", "max_image_size"):
        sides = dict(getattr(images, field, None) or {})
        most = MAX_PIXELS if getattr(images, "merge_size", None) else MAX_SIDE  # Qwen-VL's edges are numbers of pixels
        if not all(edge is None or (isinstance(edge, int) and 0 < edge <= most) for edge in sides.values()):
            raise RevisitError(f"The image processor of {name!r} is damaged: {field} is {str(sides)[:80]}.")


def processor_of(model: Model, needed_by: str = "This") -> Processor:
    """The processor of a model: the one `load` put there, or else the one in the folder or Hub id it was loaded from.

    It is kept as `model.revisit_processor`, so it lives as long as the model. No remote code runs.

    Raises:
        RevisitError: No processor can be found; the message begins with `needed_by`.
    """
    found = getattr(model, ATTRIBUTE, None)
    if found is None:
        name = getattr(model.config, "_name_or_path", "")
        why = "the model does not say where it was loaded from"
        try:
            found = load_processor(Path(name) if Path(name).is_dir() else name) if name else None
        except RevisitError as error:
            why = str(error).rstrip(".")
        if found is None:
            raise RevisitError(
                f"{needed_by} needs the model's processor, which was not found ({why}): pass processor=processor to generate, or load "
                "the model with revisit.load."
            )
        setattr(model, ATTRIBUTE, found)
    return found  # type: ignore[no-any-return]


def _build(name: str, config: Any, *, trust_remote_code: bool, **kwargs: Any) -> Any:
    """The processor, for images only where its video processor cannot be built."""
    cls = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type) or "", None)
    if importlib.util.find_spec("torchvision") is None and cls and "video_processor" in cls.get_attributes():
        return images_only(cls).from_pretrained(name, **kwargs)
    return transformers.AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)


def images_only(cls: Any) -> Any:
    """A subclass of a processor class that is built, and works on images, without its video processor."""

    class WithoutVideo(cls):  # type: ignore[misc]
        """Lists only the parts that can be built, while they are being loaded."""

        @classmethod
        def get_attributes(klass) -> list[str]:
            return [name for name in cls.get_attributes() if name != "video_processor"]

    class ImagesOnly(cls):  # type: ignore[misc]
        """Accepts None as its video processor."""

        @classmethod
        def _get_arguments_from_pretrained(klass, *args: Any, **kwargs: Any) -> list[Any]:
            parts = dict(
                zip(
                    WithoutVideo.get_attributes(),
                    WithoutVideo._get_arguments_from_pretrained(*args, **kwargs),
                    strict=True,
                )
            )
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            # the common template: a family's own version may ask its video processor for frame rates
            return ProcessorMixin.apply_chat_template(self, *args, **kwargs)

        def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            raise RevisitError(
                "This processor was built without its video processor because torchvision is missing, so it cannot be "
                "saved completely; install torchvision first."
            )

    ImagesOnly.__name__ = ImagesOnly.__qualname__ = cls.__name__
    WithoutVideo.__name__ = cls.__name__
    return ImagesOnly
