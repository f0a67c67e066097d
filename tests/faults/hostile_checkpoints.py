"""Damaged and hostile model folders. Each case changes a complete folder of a tiny LLaVA."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
BREACH = "breach"  # written by any code of a folder that runs
CODE = f"import pathlib\npathlib.Path(__file__).with_name({BREACH!r}).write_text('ran')\n"
TENSOR = "language_model.model.layers.0.mlp.up_proj.weight"


class Pickled:
    """An object that runs code when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.folder / BREACH, "ran")


def edit(name: str, **changes: Any) -> Damage:
    """Change fields of a JSON file; None removes one, a dict is merged."""

    def damage(folder: Path) -> None:
        path = folder / name
        value = json.loads(path.read_text()) if path.exists() else {}
        for key, change in changes.items():
            if change is None:
                value.pop(key, None)
            elif isinstance(change, dict) and isinstance(value.get(key), dict):
                value[key] |= change
            else:
                value[key] = change
        path.write_text(json.dumps(value))

    return damage


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str, share: float) -> Damage:
    """Keep only the first share of a file."""
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the weights."""

    def damage(folder: Path) -> None:
        found = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def header(length: int | None = None, text: bytes | None = None) -> Damage:
    """Replace the header of the weights, or the length it claims."""

    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (old,) = struct.unpack("<Q", data[:8])
        new = data[8 : 8 + old] if text is None else text
        (folder / WEIGHTS).write_bytes(
            struct.pack("<Q", len(new) if length is None else length) + new + data[8 + old :]
        )

    return damage


def index(file: str) -> Damage:
    """Add an index in which all weights are in this file."""

    def damage(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))

    return damage


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def pickled(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Pickled(folder)))


# Each raises RevisitError with one sentence.
REJECTED: dict[str, Damage] = {
    "config missing": remove(CONFIG),
    "config not json": write(CONFIG, "model_type: llava"),
    "config truncated": cut(CONFIG, 0.5),
    "config nested deeply": write(CONFIG, "[" * 100_000),
    "type unknown": edit(CONFIG, model_type="no_such_model"),
    "a billion beams": edit("generation_config.json", _from_model_config=None, num_beams=10**9),
    "type needs code": both(
        edit(CONFIG, model_type="no_such_model", auto_map={"AutoConfig": "evil.Config"}), write("evil.py", CODE)
    ),
    "internvl with code": edit(CONFIG, model_type="internvl_chat"),
    "text model": edit(CONFIG, model_type="llama"),
    "layers too many": edit(CONFIG, text_config={"num_hidden_layers": 5}),
    "width doubled": edit(CONFIG, text_config={"hidden_size": 64}),
    "vocabulary huge": edit(CONFIG, text_config={"vocab_size": 10**12}),
    "patches of no size": edit(CONFIG, vision_config={"patch_size": 0}),
    "weights missing": remove(WEIGHTS),
    "weights truncated": cut(WEIGHTS, 0.6),
    "weights a folder": both(remove(WEIGHTS), lambda folder: (folder / WEIGHTS).mkdir()),
    "header without end": header(length=2**62),
    "header not json": header(text=b"{" * 64),
    "offsets beyond the file": header(text=b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999]}}'),
    "a tensor missing": tensors(lambda found: found.pop(TENSOR)),
    "a tensor too many": tensors(lambda found: found.update(extra=torch.zeros(3))),
    "a tensor of another shape": tensors(lambda found: found.update({TENSOR: torch.zeros(3, 3)})),
    "weights as integers": tensors(lambda found: found.update({TENSOR: found[TENSOR].to(torch.int32)})),
    "vision layer beyond the tower": edit(CONFIG, vision_feature_layer=1_000_000),
    "early exit as a default": edit("generation_config.json", _from_model_config=None, assistant_early_exit=1),
    "nan": tensors(lambda weights: weights[TENSOR][0, 0].fill_(torch.nan)),
    "only a pickle": both(remove(WEIGHTS), pickled("pytorch_model.bin")),
    "a pickle by another name": pickled(WEIGHTS),
    "index names a pickle": both(index("shard.bin"), pickled("shard.bin")),
    "index leaves the folder": index("../elsewhere.safetensors"),
    "index with an absolute path": index("/etc/passwd.safetensors"),
    "sharded weights as integers": both(
        tensors(lambda found: found.update({TENSOR: found[TENSOR].to(torch.int32)})),
        index("model-00001-of-00001.safetensors"),
    ),
    "tokenizer that panics when it is loaded": edit(
        "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    ),
    "tokenizer that panics when it is used": edit(
        "tokenizer.json", truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
    ),
    "index names a missing file": index("model-00009-of-00009.safetensors"),
    "tokenizer missing": remove("tokenizer.json"),
    "image processor missing": remove("preprocessor_config.json", "processor_config.json"),
    "template of broken syntax": write(TEMPLATE, "{% for m in %}"),
    "template that raises": write(TEMPLATE, "{{ raise_exception('no images today') }}"),
    "template that escapes": write(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template without image": write(TEMPLATE, "hello"),
    "settings a list": edit("generation_config.json", _from_model_config=None, revisit=[1]),
    "settings unknown": edit("generation_config.json", _from_model_config=None, revisit={"alfa": 1}),
    "settings out of range": edit("generation_config.json", _from_model_config=None, revisit={"alpha": 7}),
    "attention from a repository": edit(CONFIG, _attn_implementation="evil/kernel"),
    "a pipe instead of the tokenizer": both(
        remove("tokenizer.json"), lambda folder: os.mkfifo(folder / "tokenizer.json")
    ),
    "image token beyond the vocabulary": edit(CONFIG, image_token_id=10**6, image_token_index=10**6),
}

for _name in ("generation_config.json", TEMPLATE):
    REJECTED |= {
        f"{_name} {kind}": both(lambda folder, name=_name: (folder / name).unlink(missing_ok=True), damage)
        for kind, damage in {
            "empty": write(_name, ""),
            "a dangling link": lambda folder, name=_name: (folder / name).symlink_to("nowhere"),
            "a folder": lambda folder, name=_name: (folder / name).mkdir(),
            "a pipe": lambda folder, name=_name: os.mkfifo(folder / name),
            "not UTF-8": lambda folder, name=_name: (folder / name).write_bytes(b'{"a": "\xff"}'),
        }.items()
    }
REJECTED["generation_config.json truncated"] = cut("generation_config.json", 0.5)

# These load, and none of their code runs.
HARMLESS: dict[str, Damage] = {
    "model code beside a known type": both(
        edit(CONFIG, auto_map={"AutoModelForImageTextToText": "evil.Model", "AutoConfig": "evil.Config"}),
        write("evil.py", CODE),
    ),
    "generate code": both(
        lambda folder: (folder / "custom_generate").mkdir(), write("custom_generate/generate.py", CODE)
    ),
    "tokenizer code": both(
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}), write("evil.py", CODE)
    ),
    "a pickle beside the weights": pickled("pytorch_model.bin"),
    "training state beside the weights": pickled("training_args.bin"),
}
