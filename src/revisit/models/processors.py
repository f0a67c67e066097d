"""Load processors, with or without torchvision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.processing_utils import ProcessorMixin

from revisit.errors import RevisitError, brief
from revisit.models import families
from revisit.models.config import load_config, resolve
from revisit.models.types import Model, Processor

# model -> its processor, loaded together with the model or when it was first needed
_PROCESSORS: WeakKeyDictionary[Model, Processor] = WeakKeyDictionary()


def load_processor(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Processor:
    """Load a model's processor, which pads on the left as batched generation needs.

    Without torchvision, video processors cannot be built, and an images-only subclass is used.
    """
    name = resolve(name_or_path)
    config = load_config(name, trust_remote_code=trust_remote_code, **kwargs)
    needs = families.of(config.model_type).needs
    if needs and importlib.util.find_spec(needs) is None:
        raise RevisitError(f"The processor of {name!r} needs {needs}, which is not installed: pip install {needs}.")
    try:
        processor = _build(name, config, trust_remote_code=trust_remote_code, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # many kinds, and a panic of a tokenizer in Rust is no Exception
        raise RevisitError(f"The processor of {name!r} cannot be built: {brief(error)}") from error
    tokenizer, images = getattr(processor, "tokenizer", None), getattr(processor, "image_processor", None)
    if tokenizer is None or images is None:
        lacks = "tokenizer" if tokenizer is None else "image processor"
        raise RevisitError(f"The model {name!r} has no {lacks}; get a complete copy of its folder.")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor  # type: ignore[no-any-return]


def keep_processor(model: Model, processor: Processor) -> None:
    """Associate a processor with a model for as long as the model lives; the model is not changed."""
    _PROCESSORS[model] = processor


def processor_of(model: Model, needed_by: str = "This") -> Processor:
    """Return the processor that was loaded with a model, or load it from the model's folder or Hub id.

    It is kept for as long as the model lives. No remote code runs.

    Raises:
        RevisitError: No processor can be found; the message begins with `needed_by`.
    """
    if model in _PROCESSORS:
        return _PROCESSORS[model]
    name = getattr(model.config, "_name_or_path", "")
    why = "the model does not record where it was loaded from"
    try:
        if name:
            return _PROCESSORS.setdefault(model, load_processor(Path(name) if Path(name).is_dir() else name))
    except RevisitError as error:
        why = str(error).rstrip(".")
    raise RevisitError(
        f"{needed_by} needs the model's processor, which was not found ({why}): pass processor=processor to generate, or load "
        "the model with revisit.load."
    )


def _build(name: str, config: Any, *, trust_remote_code: bool, **kwargs: Any) -> Any:
    """Build the processor, for images only if its video processor cannot be built."""
    cls = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type) or "", None)
    if importlib.util.find_spec("torchvision") is None and cls and "video_processor" in cls.get_attributes():
        return images_only(cls).from_pretrained(name, **kwargs)
    return transformers.AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)


def images_only(cls: Any) -> Any:
    """Derive a processor class that works without its video processor."""

    class ImagesOnly(cls):  # type: ignore[misc]
        """Accepts None as its video processor."""

        @classmethod
        def _get_arguments_from_pretrained(klass, *args: Any, **kwargs: Any) -> list[Any]:
            names = cls.get_attributes()
            loaded = [name for name in names if name != "video_processor"]
            partial: Any = type(cls.__name__, (cls,), {"get_attributes": lambda: loaded})
            parts = dict(zip(loaded, partial._get_arguments_from_pretrained(*args, **kwargs), strict=True))
            return [parts.get(name) for name in names]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            # Skips a family's own implementation, which may read frame rates from its video processor.
            return ProcessorMixin.apply_chat_template(self, *args, **kwargs)

    ImagesOnly.__name__ = ImagesOnly.__qualname__ = cls.__name__
    return ImagesOnly
