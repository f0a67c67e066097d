"""The model `revisit` of lmms-eval: any decoding method, with the engine of `revisit eval`.

    lmms-eval --model revisit --model_args pretrained=llava-hf/llava-1.5-7b-hf,method=revisit,alpha=1e-5 --tasks pope

Settings of the method are model arguments, not `--gen_kwargs`: lmms-eval's cache of answers only depends on the former. The entry point
`lmms_eval.models` loads this module.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.local import LocalEngine
from revisit.io.images import open_image
from revisit.io.records import Fields
from revisit.models.config import describe_model
from revisit.models.prompts import vision_texts
from revisit.settings import world_size

Requests: TypeAlias = Sequence[Any]  # of lmms-eval: `Instance` objects

logger = logging.getLogger(__name__)

# The arguments of `generate_until` requests that are used; any other is logged once.
USED = {"max_new_tokens", "temperature", "top_p", "num_beams", "do_sample", "until"}


def manifests() -> ModelManifest:
    """Return the entry that lmms-eval registers."""
    return ModelManifest(model_id="revisit", simple_class_path="revisit.eval.lmms_eval.Revisit")


class Revisit(lmms):
    """A vision-language model of transformers with any method; other keyword arguments are settings of the method."""

    def __init__(
        self,
        pretrained: str = "tiny",
        method: str = "revisit",
        batch_size: int | str = 1,
        dtype: str | None = None,
        device: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        draw_seed: int = 0,
        max_batch_size: int | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        if world_size() > 1:
            raise RevisitError(
                "The lmms-eval model `revisit` runs in one process: start it without torchrun or accelerate launch and "
                "spread a large model with device_map=auto."
            )
        self.method = methods.as_method(method, describe_model(pretrained, trust_remote_code), **settings)
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 1  # "auto" is not supported
        self.draw_seed = draw_seed
        self.engine = LocalEngine(pretrained, dtype, device_map or device, trust_remote_code)
        self._warned: set[str] = set()

    @property
    def device(self) -> Any:
        """The model's device."""
        return self.engine.loaded[0].device

    def generate_until(self, requests: Requests) -> list[str]:
        """Return one text per request, in their order."""
        answers: dict[int, str] = {}
        for numbers, arguments in self._batches(requests):
            items, images = [], []
            for number in numbers:
                context, _, doc_to_visual, doc_id, task, split = requests[number].args
                visuals = doc_to_visual(self.task_dict[task][split][doc_id]) if doc_to_visual else []
                images.append([open_image(image) for image in visuals or []])
                for token in vision_texts(self.engine.loaded[1]):  # some tasks add one
                    context = context.replace(token, "")
                items.append(Item(f"{task}/{split}/{doc_id}", context))
            found = self.engine.answer(self.method, self._decoding(arguments), self.draw_seed, items, images)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = cut(answer.text, arguments.get("until"))
                self.cache_hook.add_partial("generate_until", (requests[number].args[0], arguments), answers[number])
        return [answers[number] for number in range(len(requests))]

    def loglikelihood(self, requests: Requests) -> list[tuple[float, bool]]:
        """Raise RevisitError: a decoding method does not change the likelihood of a text."""
        raise RevisitError("The lmms-eval model `revisit` does not support likelihood tasks.")

    def generate_until_multi_round(self, requests: Requests) -> list[str]:
        """Raise RevisitError: conversations are not supported."""
        raise RevisitError("The lmms-eval model `revisit` does not support multi-round tasks.")

    def _batches(self, requests: Requests) -> Iterator[tuple[list[int], Fields]]:
        """Yield (request numbers, their generation arguments): equal arguments, similar prompt length, longest first."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=repr), []).append(number)
        for numbers in groups.values():
            numbers.sort(key=lambda n: -len(requests[n].args[0]))
            for start in range(0, len(numbers), self.batch_size):
                yield numbers[start : start + self.batch_size], dict(requests[numbers[0]].args[1])

    def _decoding(self, arguments: Fields) -> Decoding:
        """Read a request's generation arguments; each argument that is not used is logged once."""
        for name in sorted(arguments.keys() - USED - self._warned):
            self._warned.add(name)
            logger.warning("generation argument %r is not used by the model `revisit`", name)
        temperature = float(arguments.get("temperature") or 0)
        sampling = temperature > 0 and arguments.get("do_sample", True)
        top_p = arguments.get("top_p")
        return Decoding(
            max_new_tokens=int(arguments.get("max_new_tokens", 1024)),
            temperature=temperature if sampling else None,
            top_p=float(top_p) if sampling and top_p else None,
            num_beams=int(arguments.get("num_beams") or 1),
        )


def cut(text: str, until: str | Sequence[str] | None) -> str:
    """Cut a text at the first stop string. An empty line, lmms-eval's default, is ignored: answers may have paragraphs."""
    for stop in [until] if isinstance(until, str) else until or []:
        if stop and stop != "\n\n":
            text = text.split(stop, 1)[0]
    return text.strip()
