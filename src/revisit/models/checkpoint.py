"""Is a checkpoint whole? Looked at before its weights are opened, and again when they are in the model."""

from __future__ import annotations

import json
import struct
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError

INDEX = "model.safetensors.index.json"
MAX_JSON = 50_000_000  # bytes of a JSON file or header
MAX_BEAMS, MAX_COUNT = 1000, 100_000_000  # generation settings
MAX_SIDE, MAX_PICTURE = 20_000, 200_000_000  # pixels that an image processor may be told to make
MAX_FILES = 10_000  # of weights
MAX_GROWTH = 100  # of a text by a tokenizer's normalizers; real ones put one character for another, or one in front
MAX_LAYERS = 10_000  # of a text or vision model; real ones have fewer than 200


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder; raises RevisitError if there is none."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise RevisitError(f"{str(path)!r} is larger than {MAX_JSON:,} bytes, which no such file is.")
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RevisitError):
            raise
        raise RevisitError(f"{str(path)!r} is damaged: it is not JSON ({brief(error)}); get a whole copy.") from None
    if not isinstance(value, dict):
        raise RevisitError(f"{str(path)!r} is damaged: it must hold a JSON object.")
    return value


def check_folder(folder: Path, quantized: bool = False) -> None:
    """Refuses a model folder whose weights are missing, outside the folder, of another format or cut off.

    Weights of integers are refused too, unless the configuration says that the model is quantized.
    """
    if (folder / INDEX).is_file():
        files = [folder / name for name in index_files(folder / INDEX)]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            raise RevisitError(
                f"{str(folder)!r} holds no weights that are read here: only safetensors are (model.safetensors or {INDEX})."
            )
    for path in files:
        if not path.is_file():
            raise RevisitError(f"The checkpoint {str(folder)!r} is incomplete: {path.name} is missing.")
        for name, dtype in check_safetensors(path).items():
            if not quantized and dtype[:1] in "IUBC" and dtype != "BF16" and name.endswith(("weight", "bias")):
                raise RevisitError(
                    f"The checkpoint {str(folder)!r} holds {name[:200]} as {dtype}, but its config.json names no quantization; get "
                    "a whole copy."
                )


def index_files(index: Path) -> list[str]:
    """The files that an index names: safetensors beside it and nothing else."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise RevisitError(f"{str(index)!r} is damaged: its weight_map must map tensors to files.")
    files = sorted(set(names.values()))
    if len(files) > MAX_FILES:
        raise RevisitError(f"{str(index)!r} is damaged: it names {len(files):,} files.")
    for name in files:
        if not name.endswith(".safetensors"):
            raise RevisitError(f"{str(index)!r} names {name[:200]!r}: only .safetensors files are read.")
        if name != Path(name).name or "\\" in name or name.startswith("."):
            raise RevisitError(f"{str(index)!r} names {name[:200]!r}, which is not a file of its own folder; refused.")
    return files


def check_safetensors(path: Path) -> dict[str, str]:
    """The type of every tensor; refuses a file whose header is damaged or whose size is not what its header says."""
    damaged = f"The weights in {str(path)!r} are truncated or damaged"
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        if not 2 <= length <= min(size - 8, MAX_JSON):
            raise RevisitError(f"{damaged}: there is no safetensors header; get a whole copy.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            dtypes = {str(name): str(entry["dtype"]) for name, entry in header.items()}
            end = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise RevisitError(f"{damaged}: the safetensors header cannot be read; get a whole copy.") from None
    if size != end:
        raise RevisitError(f"{damaged}: {size:,} bytes instead of {end:,}; get a whole copy.")
    return dtypes


def check_config(name: str, config: Any) -> None:
    """Refuses sizes that no model has, before a model of that size is built."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for field in ("num_hidden_layers", "num_layers", "depth"):
            value = getattr(part, field, None)
            if value is not None and (not isinstance(value, int) or not 0 <= value <= MAX_LAYERS):
                raise RevisitError(f"The config.json of {name!r} is damaged: {field} is {str(value)[:40]!r}.")
    layer = getattr(config, "vision_feature_layer", None)
    depth = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
    for number in layer if isinstance(layer, (list, tuple)) else [layer]:
        if isinstance(number, int) and isinstance(depth, int) and not -depth - 1 <= number <= depth:
            raise RevisitError(
                f"The config.json of {name!r} is damaged: vision_feature_layer is {number}, and the vision tower has {depth} layers."
            )


def check_generation(name: str, path: Path, generation: Any, vocabulary: int) -> None:
    """Refuses generation settings of a type or size that no call of `generate` could use; `path` is their file if the model is local."""
    if path.is_file():
        read_json(path)
    counts = (
        "num_beams",
        "num_return_sequences",
        "max_length",
        "max_new_tokens",
        "top_k",
        "min_length",
        "min_new_tokens",
    )
    for field in (
        *counts,
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "temperature",
        "top_p",
        "repetition_penalty",
    ):
        value = getattr(generation, field, None)
        if value is None:
            continue
        if field.endswith("_token_id"):
            tokens = value if isinstance(value, list) else [value]
            right = all(type(token) is int for token in tokens)
            if field.startswith("forced_"):
                right = right and all(0 <= token < vocabulary for token in tokens)
        elif field in counts:
            most = MAX_BEAMS if field in ("num_beams", "num_return_sequences") else MAX_COUNT
            right = type(value) is int and 0 <= value <= most
        else:
            right = type(value) in (int, float) and 0 <= value < float("inf")
        if not right:
            raise RevisitError(
                f"The generation_config.json of {name!r} is wrong: {field} cannot be {str(value)[:40]!r}."
            )


def check_tokenizer(path: Path) -> None:
    """Refuses a tokenizer that could make a text of any size of a short one, before it is built; `path` is its file."""
    if not path.is_file():
        return
    growth, waiting = 1, [read_json(path).get(part) for part in ("normalizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            growth *= max(1, *(len(str(part.get(field) or "")) for field in ("content", "prepend")))
            waiting += [part.get("normalizers"), part.get("decoders")]
        if growth > MAX_GROWTH:
            raise RevisitError(f"The tokenizer {str(path)!r} is refused: its normalizer could make a text of any size.")


def check_image_processor(name: str, processor: Any) -> None:
    """Refuses image processors that would make pictures of no size, or of any size."""
    for field in ("size", "crop_size", "pad_size", "max_image_size"):
        sides = getattr(processor, field, None)
        if sides is None:
            continue
        names = ("height", "width", "shortest_edge", "longest_edge")
        values = {
            n: v
            for n in names
            if (v := sides.get(n) if isinstance(sides, dict) else getattr(sides, n, None)) is not None
        }
        # edges of the Qwen-VL kind are numbers of pixels
        most = MAX_PICTURE if getattr(processor, "merge_size", None) else MAX_SIDE
        sane = all(type(edge) is int and 0 < edge <= most for edge in values.values())
        if not sane or values.get("height", 1) * values.get("width", 1) > MAX_PICTURE:
            raise RevisitError(f"The image processor of {name!r} is damaged: {field} is {str(values)[:80]}.")


def check_weights(name: str, model: Any, loading: dict[str, Any]) -> None:
    """Refuses a model with tensors that were missing, left over, of another shape, or not finite.

    `loading` is what transformers says about the loading; heads tied by declaration are not missing there.
    """
    mismatched = [entry[0] for entry in loading.get("mismatched_keys") or ()]
    for kind, found in (
        ("lacks", loading.get("missing_keys") or ()),
        ("has another shape for", mismatched),
        ("has, beyond what its configuration declares,", loading.get("unexpected_keys") or ()),
        ("has values that are not finite in", not_finite(model)),
    ):
        if found:
            raise RevisitError(
                f"The checkpoint {name!r} {kind} {_some(found)}: its answers would mean nothing. Get a whole copy, or load it as it "
                "is with allow_incomplete=True (--allow-incomplete)."
            )


def not_finite(model: Any) -> list[str]:
    """Names of the tensors that hold infinities or NaN; the device is waited for once."""
    import torch

    names, extremes = [], []
    scattered = len({parameter.device for parameter in model.parameters()}) > 1
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.numel():
            continue
        if tensor.is_floating_point() and tensor.element_size() > 1:  # float8 has no such operation
            pair = torch.stack(torch.aminmax(tensor.detach())).float()  # (2,)
            names.append(name)
            extremes.append(pair.cpu() if scattered else pair)
    if not extremes:
        return []
    finite = torch.stack(extremes).isfinite().all(-1).tolist()
    return [name for name, good in zip(names, finite, strict=True) if not good]


def _some(names: Iterable[str]) -> str:
    """The first of some tensors, and how many more there are."""
    first, *others = sorted(names)
    return f"{first[:200]}" + (f" and {len(others)} more tensors" if others else "")


def brief(error: BaseException) -> str:
    """An error in one line of bounded length, for a sentence."""
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder="…")
