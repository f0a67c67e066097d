"""The engine in this process: transformers' generate() on batches. In float32 on a CPU every row equals its single run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from PIL.Image import Image

from revisit.decoding.batch import decode_prompts
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.base import Engine
from revisit.eval.log import Answer, item_seed
from revisit.eval.spec import fingerprint, libraries, loaded_fingerprint, model_folder
from revisit.explain.files import digest
from revisit.models.config import load_config, name_of, resolve
from revisit.models.loading import as_dtype, load
from revisit.models.types import Model, Processor


class LocalEngine(Engine):
    """One model: a name, loaded at the first answer, or a loaded pair of model and processor."""

    def __init__(
        self,
        model: str | tuple[Model, Processor] = "tiny",
        dtype: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        allow_incomplete: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.device_map = device_map or ("cuda" if torch.cuda.is_available() else None)
        self.trust_remote_code, self.allow_incomplete = trust_remote_code, allow_incomplete

    @cached_property
    def loaded(self) -> tuple[Model, Processor]:
        """The model and its processor."""
        if not isinstance(self.model, str):
            return self.model
        pair = load(
            self.model,
            dtype=self.dtype,
            device_map=self.device_map,
            trust_remote_code=self.trust_remote_code,
            allow_incomplete=self.allow_incomplete,
        )
        planned = self.__dict__.get("placement")  # what answers are stored under
        if planned is not None and placement_of(pair[0]) != planned:
            found = " in ".join(placement_of(pair[0]))
            raise RevisitError(
                f"{self.model} was loaded on {found}, not on {' in '.join(planned)}: use --device-map and --dtype to choose."
            )
        return pair

    @cached_property
    def placement(self) -> tuple[str, str]:
        """The device and the dtype of the model as loaded; read from small files if they decide."""
        if isinstance(self.model, str):
            device, dtype = self._device(), self._dtype()
            if device is not None and dtype is not None:
                return device, dtype
        return placement_of(self.loaded[0])

    def _device(self) -> str | None:
        try:
            return torch.device(self.device_map or "cpu").type
        except (RuntimeError, TypeError):  # "auto" and mappings are decided by loading
            return None

    def _dtype(self) -> str | None:
        dtype = self.dtype or ("auto" if self.device_map else "float32")
        if dtype != "auto":
            return _name(as_dtype(dtype))
        config = load_config(str(self.model), trust_remote_code=self.trust_remote_code)
        return _name(config.dtype) if getattr(config, "dtype", None) else None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's weights, configuration, tokenizer and chat template."""
        if isinstance(self.model, str):
            return fingerprint(model_folder(resolve(self.model)))
        return loaded_fingerprint(self.model[0])

    def about(self) -> Mapping[str, Any]:
        device, dtype = self.placement
        return {
            "model": self.model if isinstance(self.model, str) else name_of(self.model[0]),
            "fingerprint": self.fingerprint,
            "device": device,
            "dtype": dtype,
            "engine": "local",
            "libraries": libraries("torch", "transformers", "tokenizers", "pillow"),
        }

    def batching(self, batch_size: int, items: Sequence[Item]) -> dict[str, Any] | None:
        """Outside float32 on a CPU, rounding may depend on the shape of the batch, and so on the other items."""
        if self.placement == ("cpu", "float32"):
            return None
        return {"size": batch_size, "items": digest([[item.id, item.hash] for item in items])}

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], images: Sequence[list[Image]]
    ) -> list[Answer]:
        """Rows without an image are decoded without the method."""
        model, processor = self.loaded
        started = time.perf_counter()
        prompts, seeds = [item.prompt for item in items], [item_seed(seed, item.id) for item in items]
        try:
            found = decode_prompts(model, processor, prompts, images, method, decoding, seeds)
        except torch.OutOfMemoryError as error:
            rows = len(items)
            advice = (
                f"run the same command with a smaller --batch-size than {rows}" if rows > 1 else "use a smaller model"
            )
            raise RevisitError(f"The device ran out of memory with {rows} answers at once: {advice}.") from error
        share = round((time.perf_counter() - started) / len(items), 6)
        return [
            Answer(
                id=item.id,
                item=item.hash,
                prompt=item.prompt,
                text=row.text,
                thought=row.thought,
                tokens=row.tokens,
                counters=row.counters(),
                seconds=share,
                finish=row.finish,
            )
            for item, row in zip(items, found, strict=True)
        ]

    def close(self) -> None:
        """Free the weights, so that the next model of a grid finds room."""
        self.__dict__.pop("loaded", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def placement_of(model: Model) -> tuple[str, str]:
    """Return the kinds of devices and the dtype of a loaded model: ("cuda", "bfloat16"), or ("cpu+cuda", …) if it is split."""
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return "+".join(devices), _name(model.dtype)


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
