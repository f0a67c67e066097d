"""The engine in this process: transformers' generate() on batches; in float32 on a CPU every row equals its single run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from PIL.Image import Image

import revisit
from revisit.decoding.batch import decode_prompts
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.evaluation.engines.base import Engine, Job
from revisit.evaluation.environment import version
from revisit.evaluation.identity import fingerprint, model_folder
from revisit.evaluation.records import Answer
from revisit.models.config import resolve
from revisit.models.loading import load
from revisit.models.types import Model, Processor


class LocalEngine(Engine):
    """One model, loaded at the first answer."""

    def __init__(
        self,
        model: str = "tiny",
        dtype: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        allow_incomplete: bool = False,
    ) -> None:
        self.name = model
        self.dtype = dtype
        self.device_map = device_map or ("cuda" if torch.cuda.is_available() else None)
        self.trust_remote_code, self.allow_incomplete = trust_remote_code, allow_incomplete

    @cached_property
    def loaded(self) -> tuple[Model, Processor]:
        """(model, processor)."""
        return load(
            self.name,
            dtype=self.dtype,
            device_map=self.device_map,
            trust_remote_code=self.trust_remote_code,
            allow_incomplete=self.allow_incomplete,
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's weights, configuration, tokenizer and chat template."""
        return fingerprint(model_folder(resolve(self.name)))

    @property
    def precision(self) -> str:
        """The dtype that `load` will use; "auto" is the checkpoint's own."""
        return self.dtype or ("auto" if self.device_map else "float32")

    def identity(self) -> Mapping[str, Any]:
        """Model, precision, device kind, and the versions of all code between the prompt and the text."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "dtype": self.precision,
            "device": self.device,
            "engine": "local",
            "revisit": revisit.__version__,
            "libraries": {name: version(name) for name in ("torch", "transformers", "tokenizers", "pillow")},
        }

    @property
    def device(self) -> str:
        """The kind of device the model runs on."""
        return "cuda" if torch.cuda.is_available() and self.device_map != "cpu" else "cpu"

    def batch_invariant(self) -> bool:
        """True in float32 on a CPU, where rows equal single runs; elsewhere rounding may depend on the batch's shape."""
        return self.precision == "float32" and self.device == "cpu"

    def answer(
        self, method: Method, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Image]]
    ) -> list[Answer]:
        """Rows without a picture are decoded without the method."""
        model, processor = self.loaded
        started = time.perf_counter()
        prompts, seeds = [job.prompt for job in jobs], [job.seed for job in jobs]
        try:
            found = decode_prompts(model, processor, prompts, images, method, decoding, seeds)
        except torch.OutOfMemoryError as error:
            rows = len(jobs)
            advice = (
                f"run the same command with a smaller --batch-size than {rows}" if rows > 1 else "use a smaller model"
            )
            raise RevisitError(f"The device ran out of memory with {rows} answers at once: {advice}.") from error
        share = (time.perf_counter() - started) / len(jobs)
        return [job.answered(row, share) for job, row in zip(jobs, found, strict=True)]

    def close(self) -> None:
        """Frees the weights, so that the next model of a grid finds room."""
        self.__dict__.pop("loaded", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
