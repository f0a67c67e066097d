"""The engine in this process: transformers' generate() on batches. In float32 on a CPU, batches do not change answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch

from revisit.decoding.decode import decode_prompts
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.base import Engine, item_seed, item_visuals
from revisit.eval.log import Answer
from revisit.eval.spec import libraries
from revisit.io.files import digest
from revisit.io.records import Fields
from revisit.models.config import load_config, name_of, resolve
from revisit.models.devices import default_device
from revisit.models.identity import fingerprint, loaded_fingerprint, model_folder
from revisit.models.loading import as_dtype, load
from revisit.models.reader import OutOfMemory, scale_for
from revisit.models.types import Model, Processor
from revisit.video.clip import Visual


class LocalEngine(Engine):
    """An engine for one model: a name, loaded for the first answer, or a loaded pair of model and processor."""

    def __init__(
        self,
        model: str | tuple[Model, Processor] = "tiny",
        dtype: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        allow_incomplete: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.device_map = device_map or default_device()
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
        planned, actual = self.__dict__.get("placement"), placement_of(pair[0])  # the spec has the planned one
        if planned not in (None, actual):
            raise RevisitError(
                f"{self.model} was loaded on {' in '.join(actual)}, not on {' in '.join(planned)}: use --device-map and "
                "--dtype to choose."
            )
        return pair

    @cached_property
    def placement(self) -> tuple[str, str]:
        """The device and the dtype of the model as loaded; the model is loaded only if they are not known before."""
        if not isinstance(self.model, str):
            return placement_of(self.model[0])
        requested = self.dtype or ("auto" if self.device_map else "float32")
        if requested == "auto":
            dtype = getattr(load_config(self.model, trust_remote_code=self.trust_remote_code), "dtype", None)
        else:
            dtype = as_dtype(requested)
        try:
            device = torch.device(self.device_map or "cpu").type
        except (RuntimeError, TypeError):  # "auto" and mappings are decided by loading
            return placement_of(self.loaded[0])
        return (device, dtype_name(dtype)) if dtype else placement_of(self.loaded[0])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's weights, configuration, tokenizer and chat template."""
        if isinstance(self.model, str):
            return fingerprint(model_folder(resolve(self.model)))
        return loaded_fingerprint(*self.model)

    def identity(self, batch_size: int, items: Sequence[Item]) -> Fields:
        """Outside float32 on a CPU, rounding may depend on the shape of a batch, and so on the other items in it."""
        device, dtype = self.placement
        batches = {"size": batch_size, "items": digest([[item.id, item.hash] for item in items])}
        readers = ("av", "torchvision") if any(item.frames for item in items) else ()
        return {
            "model": self.model if isinstance(self.model, str) else name_of(self.model[0]),
            "fingerprint": self.fingerprint,
            "device": device,
            "dtype": dtype,
            "engine": "local",
            "libraries": libraries("torch", "transformers", "tokenizers", "pillow", *readers),
            "batching": None if self.placement == ("cpu", "float32") else batches,
        }

    def open_item(self, item: Item, files: Sequence[bytes] | None = None) -> list[Visual]:
        """Return the images and videos of an item, from these bytes or from disk, no larger than the model can use."""
        return item_visuals(item, files, scale_for(self.loaded[1]))

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        _ = self.loaded  # before the threads that open images need it
        return super().stream(method, decoding, seed, batches)

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], visuals: Sequence[Sequence[Visual]]
    ) -> list[Answer]:
        """Return one answer per item; items without an image are decoded without the method."""
        model, processor = self.loaded
        started = time.perf_counter()
        prompts, seeds = [item.prompt for item in items], [item_seed(seed, item.id) for item in items]
        try:
            rows = decode_prompts(model, processor, prompts, visuals, method, decoding, seeds)
        except torch.OutOfMemoryError as error:
            size = len(items)
            smaller = f"run the same command with a smaller --batch-size than {size}"
            advice = smaller if size > 1 else "use a smaller model"
            raise OutOfMemory(f"The device ran out of memory with {size} answers at once: {advice}.") from error
        share = round((time.perf_counter() - started) / len(items), 6)
        return [
            Answer.to(
                item,
                text=row.text,
                thought=row.thought,
                tokens=row.tokens,
                counters=row.counters(),
                seconds=share,
                finish=row.finish,
            )
            for item, row in zip(items, rows, strict=True)
        ]

    def close(self) -> None:
        """Free the memory of the weights for the next model."""
        self.__dict__.pop("loaded", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def placement_of(model: Model) -> tuple[str, str]:
    """Return the device and the dtype of a loaded model: ("cuda", "bfloat16"), or ("cpu+cuda", …) if it is split."""
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return "+".join(devices), dtype_name(model.dtype)


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")
