"""A promised rate of mistakes in vLLM: what was calibrated, and whether a request keeps to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from revisit import settings
from revisit.decoding.method import Method, as_method
from revisit.errors import RevisitError, short
from revisit.guard.rates import Rate, find_rate
from revisit.models.loading import load
from revisit.models.prompts import prepare
from revisit.models.types import Processor
from revisit.vllm.plan import EXCLUDING, Plan
from revisit.vllm.request import RISK

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Promise:
    """The rates of one server.

    Args:
        model: vLLM's configuration of the model.
        plan: Of the server.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._differences: dict[
            str, list[str]
        ] = {}  # by the hash of a rate: between what was calibrated and the model here

    def settle(self, asked: Mapping[str, Any], request: Any) -> Method:
        """Return the method with its floor for a request that asks for a risk; raise RevisitError if none is promised.

        Args:
            asked: What the request has under "revisit".
            request: The request, as it will be decoded.
        """
        own = {name: value for name, value in asked.items() if name not in (RISK, "method")}
        rate = find_rate(self.plan.model, number(asked[RISK]), settings.vllm_calibration())
        named = own or asked["method"] == "greedy"
        method = as_method(asked["method"], self.plan.model, **own) if named else None
        chosen = rate.settle(method, None, None)[0]
        params = request.sampling_params
        plain = not params.temperature and not any(getattr(params, name, None) for name in EXCLUDING)
        plain &= all(getattr(params, name) == value for name, value in PENALTIES.items())
        found = rate.call_differences(chosen, None, params.max_tokens, plain=plain)
        if not self._same_prompt(rate.prompt, request):
            found.append(f"the prompt is not {rate.prompt!r} after one image")
        if found := found + self.differences(rate):
            raise RevisitError(f"revisit: the calibration does not hold here: {'; '.join(found)}.")
        return chosen

    def differences(self, rate: Rate) -> list[str]:
        """Say in which ways the model differs from what was calibrated; the first time, it is loaded once more to compare it."""
        if rate.hash not in self._differences:
            code = self.model.trust_remote_code
            pair = load(self.model.model, dtype=self.model.dtype, device_map="cpu", trust_remote_code=code)
            self._differences[rate.hash] = rate.differences(*pair)
        return self._differences[rate.hash]

    @cached_property
    def processor(self) -> Processor:
        from vllm.transformers_utils.processor import cached_processor_from_config

        processor: Processor = cached_processor_from_config(self.model)
        return processor

    def _same_prompt(self, prompt: str, request: Any) -> bool:
        """Return whether a request is this prompt after one image of any size."""
        if len(request.mm_features or ()) != 1:
            return False
        wanted = prepare(self.processor, [prompt], [[Image.new("RGB", (448, 448))]])["input_ids"][0].tolist()
        return self._around_image(request.prompt_token_ids) == self._around_image(wanted)

    def _around_image(self, ids: list[int]) -> tuple[list[int], list[int]]:
        places = self.plan.positions(ids)
        return ids[: np.min(places)], ids[np.max(places) + 1 :]


def number(risk: object) -> float:
    """Return a risk as a number."""
    try:
        value = float(risk)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise RevisitError(f"revisit: risk must be a number from 0 to 1, not {short(risk)}.")
    return value
