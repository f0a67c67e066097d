"""Loading any vision-language model and its processor, with safe defaults."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.models import cpu

EMBEDDED = "tiny"

_PROCESSORS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model -> processor


def processor_of(model: Any) -> Any | None:
    """The processor that the model was loaded with by `load`, or None."""
    return _PROCESSORS.get(model)


def embedded_folder() -> Path:
    """The folder of the embedded model, which any transformers program can load."""
    folder = Path(__file__).parents[1] / "tiny" / "weights"
    if not (folder / "model.safetensors").is_file():
        raise RevisitError(f"The embedded model is missing from {folder}; install revisit-decoding again.")
    return folder


def resolve(name_or_path: str | Path) -> str:
    """A local path or hub id; "tiny" is the embedded model."""
    if str(name_or_path) == EMBEDDED and not Path(EMBEDDED).is_dir():
        return str(embedded_folder())
    return str(name_or_path)


def load(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: Any = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """(model, processor) from a local folder or a hub id, ready to generate.

    Weights come from safetensors only and no remote code runs unless asked. Without a `dtype`, a CPU gets float32
    (half precision is slow there) and an accelerator the checkpoint's own. Other arguments go to `from_pretrained`,
    so quantised models load as they do in transformers.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    name = resolve(name_or_path)
    dtype = as_dtype(dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if dtype is None:
        on_accelerator = device_map is not None or torch.cuda.is_available()
        dtype = "auto" if on_accelerator or kwargs.get("quantization_config") else torch.float32
    config = load_config(name, trust_remote_code=trust_remote_code, **_hub_arguments(kwargs))
    on_cpu = str(device_map) == "cpu" if torch.cuda.is_available() else True
    if on_cpu and (getattr(config, "dtype", None) if dtype == "auto" else dtype) in (torch.bfloat16, torch.float16):
        cpu.check_half_precision()
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            name,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise RevisitError(
                f"{name!r} is a {config.model_type} model, which takes no images; use a vision-language model such as LLaVA, "
                "Qwen-VL or InternVL."
            ) from None
        raise
    except OSError as error:
        raise RevisitError(
            f"The weights of {name!r} could not be loaded: {_first_line(error)} Only safetensors are read."
        ) from None
    processor = load_processor(name, trust_remote_code=trust_remote_code, **_hub_arguments(kwargs))
    _PROCESSORS[model] = processor  # for methods with words in their settings
    return model.eval(), processor


def as_dtype(name: str) -> Any:
    """The torch type of this name."""
    import torch

    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise RevisitError(f"The type of the weights must be float32, float16, bfloat16 or auto, not {name!r}.")
    return kind


def describe_model(name: str, trust_remote_code: bool = False) -> Any:
    """What a method's recommendation looks at, read from the model's small files: no weights are loaded."""
    from types import SimpleNamespace

    from transformers import GenerationConfig

    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(resolve(name))
    except OSError:  # a model may come without one
        generation = GenerationConfig()
    return SimpleNamespace(config=config, generation_config=generation)


def load_config(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The configuration of a model, or one sentence that says why there is none."""
    from transformers import AutoConfig

    name = resolve(name_or_path)
    local = Path(name)
    if local.exists() and not (local / "config.json").is_file():
        raise RevisitError(f"{name!r} is not a model folder: it has no config.json.")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except OSError as error:
        raise RevisitError(
            f"There is no model {name!r}: it is neither a local folder nor a hub id that can be reached ({_first_line(error)})."
        ) from None
    except ValueError as error:
        raise RevisitError(f"The model {name!r} cannot be loaded: {_first_line(error)}") from None


def load_processor(name_or_path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The processor of a model, padding on the left as batched generation needs.

    Processors that own a video processor cannot be built where torchvision is missing; there a version for images
    only is made of the same class.
    """
    from transformers import AutoProcessor

    name = resolve(name_or_path)
    images_only = None
    if importlib.util.find_spec("torchvision") is None:
        images_only = _images_only_class(name, trust_remote_code=trust_remote_code, **kwargs)
    if images_only is not None:
        processor = images_only.from_pretrained(name, **kwargs)
    else:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return processor


def _images_only_class(name: str, *, trust_remote_code: bool, **kwargs: Any) -> Any:
    """The model's processor class without its video processor, or None if it has none to leave out."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    from transformers.processing_utils import ProcessorMixin

    config = load_config(name, trust_remote_code=trust_remote_code, **kwargs)
    try:
        declared = ProcessorMixin.get_processor_dict(name, **kwargs)[0].get("processor_class")
    except OSError:
        declared = None
    cls = getattr(transformers, declared or PROCESSOR_MAPPING_NAMES.get(config.model_type) or "", None)
    try:
        attributes = cls.get_attributes() if cls is not None else []
    except ImportError as error:  # a placeholder class: the processor itself needs something that is missing
        raise RevisitError(f"The processor of {name!r} cannot be built here: {_first_line(error)}") from None
    return images_only(cls) if "video_processor" in attributes else None


def images_only(cls: Any) -> Any:
    """A subclass of a processor class that is built, and works on images, without its video processor."""
    from transformers.processing_utils import ProcessorMixin

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
                "This processor was built without its video processor because torchvision is missing, so it would be saved "
                "incomplete; install torchvision to save it."
            )

    ImagesOnly.__name__ = ImagesOnly.__qualname__ = cls.__name__
    WithoutVideo.__name__ = cls.__name__
    return ImagesOnly


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
