"""The engine in this process: transformers' generate() on whole batches, every row as it would be alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import revisit
from revisit.decoding.loop import generate
from revisit.decoding.plain import Plain
from revisit.decoding.trace import RowTrace, Trace
from revisit.errors import RevisitError
from revisit.evaluation.engines.base import Answer, BatchEngine, Decoding, Job
from revisit.evaluation.environment import code_digest, version
from revisit.evaluation.store import digest, file_digest
from revisit.models.loading import load, resolve
from revisit.models.prompts import prepare

# Files of a model folder that cannot change an answer.
_IGNORED = {".md", ".txt", ".png", ".jpg", ".gitattributes", ".log", ".jsonl", ".csv", ".bin", ".pt", ".pth", ".h5"}
_KEPT_TEXT = {"merges.txt", "vocab.txt"}  # tokenizers; the other .txt files are notes


class LocalEngine(BatchEngine):
    """One model, loaded when the first answer is asked for."""

    def __init__(
        self,
        model: str = "tiny",
        dtype: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.name = model
        self.dtype = dtype
        self.device_map = device_map or ("cuda" if torch.cuda.is_available() else None)
        self.trust_remote_code = trust_remote_code

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """(model, processor)."""
        return load(self.name, dtype=self.dtype, device_map=self.device_map, trust_remote_code=self.trust_remote_code)

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
            "code": code_digest(),
            "libraries": {name: version(name) for name in ("torch", "transformers", "tokenizers", "pillow")},
        }

    @property
    def device(self) -> str:
        """The kind of device the model runs on."""
        return "cuda" if torch.cuda.is_available() and self.device_map != "cpu" else "cpu"

    def batch_invariant(self, decoding: Decoding) -> bool:
        """True in float32 on a CPU, where rows equal single runs; elsewhere rounding may go by the batch's shape."""
        return self.precision == "float32" and self.device == "cpu"

    def answer(self, method: Any, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Any]]) -> list[Answer]:
        """Rows without a picture are decoded plainly: no method here has anything to say about them."""
        answers: list[Answer | None] = [None] * len(jobs)
        for rows, how in (
            ([i for i, pictures in enumerate(images) if pictures], method),
            ([i for i, pictures in enumerate(images) if not pictures], Plain()),
        ):
            if rows:
                found = self._decode(how, decoding, [jobs[i] for i in rows], [images[i] for i in rows])
                for i, answer in zip(rows, found, strict=True):
                    answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _decode(
        self, method: Any, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Any]]
    ) -> list[Answer]:
        model, processor = self.loaded
        started = time.perf_counter()
        inputs = prepare(processor, [job.prompt for job in jobs], images, model.device)
        return self.decode(method, decoding, jobs, inputs, started)

    def decode(
        self, method: Any, decoding: Decoding, jobs: Sequence[Job], inputs: Any, started: float, **more: Any
    ) -> list[Answer]:
        """The answers to prepared prompts; `more` goes to generate (a cache that holds the prompts, say)."""
        model, processor = self.loaded
        trace = Trace()
        output = self._generate(
            len(jobs),
            model,
            **inputs,
            **more,
            method=method,
            trace=trace,
            do_sample=False,  # draws are made by `processors`, row by row
            temperature=None,
            top_p=None,
            top_k=None,
            num_beams=decoding.num_beams,
            max_new_tokens=decoding.max_new_tokens,
            pad_token_id=processor.tokenizer.pad_token_id,
            logits_processor=processors(decoding, [job.seed for job in jobs]),
        )
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        seconds = (time.perf_counter() - started) / len(jobs)
        tokens = [until_end(row, end_tokens(model)) for row in new]
        texts = processor.batch_decode(tokens, skip_special_tokens=True)
        copies = len(trace.rows) // len(jobs)
        return [
            Answer(
                text.strip(),
                tuple(row),
                counters(trace.rows[number * copies : (number + 1) * copies]),
                seconds,
            )
            for number, (text, row) in enumerate(zip(texts, tokens, strict=True))
        ]

    @staticmethod
    def _generate(rows: int, *args: Any, **kwargs: Any) -> Any:
        try:
            return generate(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            advice = (
                f"run the same command with a smaller --batch-size than {rows}" if rows > 1 else "use a smaller model"
            )
            raise RevisitError(f"The device ran out of memory with {rows} answers at once: {advice}.") from error

    def close(self) -> None:
        """Frees the weights, so that the next model of a grid finds room."""
        self.__dict__.pop("loaded", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ItemDraw(LogitsProcessor):
    """Draws each row's token with a generator of its own, and leaves only that token possible.

    The draw is the inverse of the cumulative distribution at one uniform number per step, so an item's answer is the
    same in any batch.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        chosen = torch.full_like(scores, -torch.inf)  # (rows, vocabulary)
        for row, generator in enumerate(self.generators):
            cumulative = scores[row].double().softmax(-1).cumsum(-1)  # (vocabulary,)
            point = torch.rand((), generator=generator, dtype=torch.float64).to(scores.device) * cumulative[-1]
            chosen[row, torch.searchsorted(cumulative, point, right=True).clamp(max=scores.shape[-1] - 1)] = 0
        return chosen


def processors(decoding: Decoding, seeds: Sequence[int]) -> LogitsProcessorList:
    """What follows the method: nothing for greedy decoding, temperature, top-k, top-p and the draw for sampling."""
    found = LogitsProcessorList()
    if decoding.temperature is None:
        return found
    if decoding.temperature != 1:
        found.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k is not None:
        found.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None and decoding.top_p < 1:
        found.append(TopPLogitsWarper(decoding.top_p))
    found.append(ItemDraw(seeds))
    return found


def end_tokens(model: Any) -> set[int]:
    """The ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {ids}


def until_end(tokens: Sequence[int], end: set[int]) -> list[int]:
    """The tokens up to and with the first that ends the answer; what follows is the batch's padding."""
    for place, token in enumerate(tokens):
        if token in end:
            return list(tokens[: place + 1])
    return list(tokens)


def counters(rows: Sequence[RowTrace]) -> dict[str, float]:
    """One item's counters, its beams added up."""
    sizes = [size for row in rows for size in row.set_sizes]
    found: dict[str, float] = {
        name: sum(getattr(row, name) for row in rows) for name in ("steps", "applied", "changed")
    }
    found["vision_tokens"] = rows[0].vision_tokens
    found["plausible"] = sum(sizes)
    return found


def model_folder(name: str) -> Path:
    """The folder with the model's files: itself, or the hub snapshot in the local cache, fetched if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RevisitError(
            f"There is no model {name!r}: it is neither a local folder nor a hub id that can be reached ({reason})."
        ) from error


def fingerprint(folder: Path) -> str:
    """A hash of every file of a model folder that could change an answer.

    The hub's cache names the files it links to by their own hash, so those need not be read again.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if not path.is_file() or relative.startswith(".") or (path.suffix in _IGNORED and path.name not in _KEPT_TEXT):
            continue
        target = path.resolve()
        hashed = target.parent.name == "blobs" and len(target.name) == 64
        found[relative] = target.name if hashed else file_digest(path)
    if not found:
        raise RevisitError(f"{folder} holds no model files.")
    return digest(found)
