"""Load vision-language models and their processors with safe defaults: complete weights, no remote code, the GPU if any."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText
from transformers.utils.hub import cached_file

from revisit.errors import RevisitError, brief
from revisit.models.config import EMBEDDED, HUB, is_embedded, load_config, read_object, resolve
from revisit.models.devices import default_device, emulates_bfloat16
from revisit.models.head import plain_tensors
from revisit.models.processors import keep_processor, load_processor, processor_of
from revisit.models.types import Model, Processor

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DeviceMap: TypeAlias = "str | int | torch.device | dict[str, Any]"
_log = logging.getLogger(__name__)


def load(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    allow_incomplete: bool = False,
    **kwargs: Any,
) -> tuple[Model, Processor]:
    """Load a vision-language model and its processor, ready to generate.

    Only safetensors weights are read.

    Args:
        name_or_path: A Hub id, a folder, or the name of an embedded model ("tiny", "photo").
        dtype: Precision of the weights. By default float32 on a CPU, where half precision is slow, and the checkpoint's own
            on an accelerator, except float16 instead of bfloat16 on a GPU that only emulates it.
        device_map: Device of the model, or of each of its parts. By default the GPU if there is one.
        trust_remote_code: Whether code from the model's repository may run.
        allow_incomplete: Whether to accept a checkpoint with missing, unexpected or non-finite tensors.
        **kwargs: Passed to transformers' `from_pretrained`, so quantized models load as they do there.

    Returns:
        The model, in evaluation mode, and its processor, which pads on the left.

    Raises:
        RevisitError: There is no such model, it takes no images, or its files are damaged.
    """
    if sys.flags.optimize > 1:
        raise RevisitError(
            "transformers needs docstrings, which Python drops with -OO or PYTHONOPTIMIZE=2: use -O or 1."
        )
    unload()  # before another model needs the memory
    name = resolve(name_or_path)
    dtype = kwargs.pop("torch_dtype", None) if dtype is None else dtype  # the former name in transformers
    dtype = as_dtype(dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    quantized = bool(kwargs.get("quantization_config"))
    device_map = _device_map(device_map, quantized=quantized)
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    config = load_config(name, trust_remote_code=trust_remote_code, **hub)
    if dtype is None:
        dtype = torch.float32 if device_map is None and not quantized else "auto"
        if dtype == "auto" and not quantized and config.dtype == torch.bfloat16 and emulates_bfloat16():
            dtype = torch.float16
    remote_code = trust_remote_code and hasattr(config, "auto_map")
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not remote_code:
        raise RevisitError(
            f"{name!r} is a {config.model_type} model, which does not take images; use a vision-language model such as LLaVA, "
            "Qwen-VL or InternVL."
        )
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    _check_vision_layers(name, config)
    index = cached_file(name, INDEX, **quiet, **hub)
    shards = _check_index(Path(index)) if index else set[str]()
    if cached_file(name, "adapter_config.json", **quiet, **hub):  # with peft, transformers would load its base model
        raise RevisitError(
            f"{name!r} contains an adapter (adapter_config.json), which would replace the weights by those of another repository: "
            "merge it into its base model with peft's merge_and_unload(), save that, and load the result."
        )
    processor = load_processor(name, trust_remote_code=trust_remote_code, **hub)
    model, loading = _from_pretrained(
        name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, **kwargs
    )
    if not allow_incomplete:
        _check_weights(name, model, loading)
        if not quantized and not hasattr(config, "quantization_config"):
            for file in {WEIGHTS, *shards}:
                if path := cached_file(name, file, **quiet, **hub):
                    _check_types(Path(path))
    if getattr(model.generation_config, "assistant_early_exit", None) is not None:
        raise RevisitError(
            f"The generation_config.json of {name!r} sets assistant_early_exit, which works only as an argument of generate: "
            "remove it there."
        )
    if (limit := model.generation_config.max_time) is not None:
        _log.warning("The generation_config.json of %r ends answers after max_time=%s seconds.", name, limit)
    keep_processor(model, processor)
    _log.info("%s is on %s", name_or_path, placement(model))
    if is_embedded(name):
        logging.getLogger("revisit.tiny").warning(
            "`tiny` is a demonstration model that was trained on cartoon scenes only; use `photo` or another model for photographs."
        )
    return model.eval(), processor


# The last model that a function was given by name, with its files: one session asks one model many times.
_last: dict[tuple[str, str], tuple[Model, Processor]] = {}


def unload() -> None:
    """Free the model that `ask`, `check` or `lens` loaded by its name, which stays loaded until another one is."""
    _last.clear()


def loaded_pair(
    model: str | Path | Model | tuple[Model, Processor], needed_by: str = "This"
) -> tuple[Model, Processor]:
    """Return (model, processor); a name or a path is loaded, unless it was the last one."""
    if isinstance(model, (str, Path)):
        files = (path.stat() for path in sorted(Path(resolve(model)).glob("*")))
        key = str(model), repr([(file.st_size, file.st_mtime_ns) for file in files])
        if key not in _last:
            _last[key] = load(str(model))
        return _last[key]
    if isinstance(model, (list, tuple)):
        if len(model) != 2 or not hasattr(model[0], "generate"):
            raise RevisitError("Pass a loaded model as the pair (model, processor) that revisit.load returns.")
        return model[0], model[1]
    if hasattr(model, "generate"):
        return model, processor_of(model, needed_by)
    raise RevisitError(
        f"model must be a name, a path or the pair (model, processor) of revisit.load, not a {type(model).__name__}."
    )


def placement(model: Model) -> str:
    """Describe the device and precision of a model, as in "cuda:0 (NVIDIA A100), bfloat16"."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    names = [f"{d} ({torch.cuda.get_device_name(d)})" if d.startswith("cuda") else d for d in devices]
    return f"{', '.join(names)}, {str(model.dtype).removeprefix('torch.')}"


def as_dtype(name: str) -> torch.dtype:
    """Return the torch type of a name such as "bfloat16" or "bf16"."""
    kind = getattr(torch, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(name, name), None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise RevisitError(f"dtype must be float32, float16, bfloat16 (or fp32, fp16, bf16) or auto, not {name!r}.")
    return kind


def _device_map(requested: DeviceMap | None, *, quantized: bool) -> DeviceMap | None:
    """Return the requested device map; by default the GPU, NVIDIA's or Apple's, if there is one."""
    if requested is None:
        return None if quantized else default_device()
    for device in requested.values() if isinstance(requested, dict) else [requested]:
        gpu = re.fullmatch(r"cuda(?::(\d+))?", str(device))
        if gpu and int(gpu[1] or 0) >= torch.cuda.device_count():
            gpus = f"finds {torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "finds no GPU"
            raise RevisitError(
                f"The device map is {str(device)!r}, but torch {torch.__version__} {gpus} here; leave the device map out, or install a "
                "torch built for your GPU."
            )
    return requested


def _check_index(index: Path) -> set[str]:
    """Return the files that an index names; raise RevisitError for anything but safetensors files in its own folder."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise RevisitError(f"{str(index)!r} is damaged: its weight_map must map tensor names to files.")
    for file in files.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file:
            raise RevisitError(
                f"{str(index)!r} names {file[:200]!r}: only .safetensors files in its own folder are allowed."
            )
    return set(files.values())


def _check_vision_layers(name: str, config: object) -> None:
    """Raise RevisitError if the model reads layers that its vision tower does not have."""
    depth = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
    chosen = getattr(config, "vision_feature_layer", None)
    for layer in chosen if isinstance(chosen, list) else [chosen]:
        if isinstance(depth, int) and isinstance(layer, int) and not -depth - 1 <= layer <= depth:
            raise RevisitError(
                f"The config.json of {name!r} has vision_feature_layer {layer}, but its vision tower has {depth} layers."
            )


def _check_types(file: Path) -> None:
    """Raise RevisitError for weights stored as integers, which transformers would convert."""
    with safe_open(file, "pt") as weights:
        for key in weights.keys():  # noqa: SIM118 (it is no dictionary)
            if key.endswith(".weight") and weights.get_slice(key).get_dtype().startswith(("I", "U", "B0")):
                raise RevisitError(
                    f"{str(file)!r} holds {key[:200]} as integers, but the model is not quantized; get a complete copy."
                )


def _check_weights(name: str, model: Model, loading: dict[str, Any]) -> None:
    """Raise RevisitError for tensors that are missing, unexpected, of another shape, or not finite.

    `loading` is transformers' loading report, in which tied heads are not missing.
    """
    mismatched = [entry[0] for entry in loading.get("mismatched_keys") or ()]
    for problem, tensors in (
        ("lacks", loading.get("missing_keys") or ()),
        ("has another shape for", mismatched),
        ("unexpectedly contains", loading.get("unexpected_keys") or ()),
        ("has values that are not finite in", _not_finite(model)),
    ):
        if tensors:
            first, *others = sorted(tensors)
            names = first[:200] + (f" and {len(others)} more tensors" if others else "")
            raise RevisitError(
                f"The checkpoint {name!r} {problem} {names}: its answers would be meaningless. Get a complete copy, or load it "
                "anyway with allow_incomplete=True (--allow-incomplete)."
            )


def _not_finite(model: Model) -> list[str]:
    """List the tensors that contain infinities or NaN."""

    def finite(tensor: torch.Tensor) -> bool:
        wide = tensor.is_floating_point() and tensor.element_size() > 1  # float8 has no aminmax
        if tensor.is_meta or not tensor.numel() or not wide:
            return True
        return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())

    return [name for name, value in model.state_dict().items() if not all(map(finite, plain_tensors(value)))]


def _from_pretrained(name: str, *, device_map: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Load with transformers; return the model and the loading report, or raise RevisitError for any failure."""
    move_to = None
    if isinstance(device_map, str) and device_map != "auto" and importlib.util.find_spec("accelerate") is None:
        device_map, move_to = None, device_map  # only accelerate can load onto a device
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            name, device_map=device_map, use_safetensors=True, output_loading_info=True, **kwargs
        )
        model, loading = loaded
        return model if move_to is None else model.to(move_to), loading
    except Exception as error:  # transformers, safetensors and torch raise many kinds
        raise RevisitError(f"The weights of {name!r} could not be loaded: {brief(error)}") from error
