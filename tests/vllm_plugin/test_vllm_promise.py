"""A promised rate of mistakes in vLLM: requests that keep to what was calibrated, and those that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import revisit
from revisit.embedded.samples import SAMPLES
from revisit.errors import RevisitError
from revisit.guard.rates import find_rate
from revisit.models.config import embedded_folder
from revisit.models.parts import vision_token_ids
from revisit.models.prompts import prepare
from revisit.vllm import promise
from revisit.vllm.plan import Plan
from revisit.vllm.promise import Promise
from revisit.vllm.request import parse, read

PROMPT = "Please describe this image in detail."


@pytest.fixture(scope="module")
def promised() -> Promise:
    model, processor = revisit.load("tiny")
    plan = Plan(vision_token_ids(model.config), 5, False, 64, model.dtype, 8, 64, model, tokenizer=processor.tokenizer)
    configured = SimpleNamespace(model=str(embedded_folder()), dtype=model.dtype, trust_remote_code=False)
    found = Promise(configured, plan)
    found.processor = processor
    return found


def request(promised: Promise, prompt: str = PROMPT, images: int = 1, **options: Any) -> Any:
    """Make a request as vLLM has it when its prompt and its parameters are known."""
    shown = [sample.image().resize((96, 96)) for sample in list(SAMPLES.values())[:images]]
    ids = prepare(promised.processor, [prompt], [shown])["input_ids"][0].tolist()
    usual = {"temperature": 0, "max_tokens": 96, **promise.PENALTIES}
    return SimpleNamespace(
        prompt_token_ids=ids, mm_features=[None] * images, sampling_params=SimpleNamespace(**{**usual, **options})
    )


def settle(promised: Promise, value: Any, one: Any) -> Any:
    asked = read({"revisit": value})
    assert asked is not None
    return promised.settle(asked, one)


@pytest.mark.parametrize("value", [{"risk": 0.2}, "revisit:risk=0.2", '{"risk": 0.25, "neighbors": 8}'])
def test_a_request_gets_the_certified_floor(promised: Promise, value: Any) -> None:
    rate = find_rate(promised.plan.model, 0.2, None)
    assert settle(promised, value, request(promised)) == rate.decoding_method()


@pytest.mark.parametrize(
    ("value", "changes", "part"),
    [
        ({"risk": 0.1}, {}, "A risk of 0.1 was not certified, but 0.2 was"),
        ({"risk": 2}, {}, "from 0 to 1"),
        ({"risk": "x"}, {}, "from 0 to 1"),
        ({"risk": 0.2, "floor": 0.1}, {}, "leave out floor=0.1"),
        ({"risk": 0.2, "alpha": 0.5}, {}, "the method is"),
        ("greedy:risk=0.2", {}, "the method is"),
        ({"risk": 0.2}, {"prompt": "What is this?"}, "the prompt is not"),
        ({"risk": 0.2}, {"images": 2}, "the prompt is not"),
        ({"risk": 0.2}, {"images": 0}, "the prompt is not"),
        ({"risk": 0.2}, {"max_tokens": 16}, "the max_new_tokens is 16, not 96"),
        ({"risk": 0.2}, {"temperature": 0.5}, "sampled"),
        ({"risk": 0.2}, {"repetition_penalty": 1.2}, "sampled"),
        ({"risk": 0.2}, {"structured_outputs": {"choice": ["a"]}}, "schema"),
    ],
)
def test_a_request_that_differs_raises(promised: Promise, value: Any, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(RevisitError, match=part):
        settle(promised, value, request(promised, **changes))


def test_a_changed_model_raises(promised: Promise, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = revisit.load("tiny")
    model.lm_head.weight.data += 1
    changed = Promise(promised.model, promised.plan)
    changed.processor = processor
    monkeypatch.setattr(promise, "load", lambda *_, **__: (model, processor))
    with pytest.raises(RevisitError, match="not the one that was calibrated"):
        settle(changed, {"risk": 0.2}, request(promised))


def test_a_file_replaces_the_models_entry(promised: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISIT_VLLM_CALIBRATION", str(tmp_path / "missing.json"))
    with pytest.raises(RevisitError, match=r"missing\.json"):
        settle(promised, {"risk": 0.2}, request(promised))
    find_rate(promised.plan.model, 0.2, None).write(tmp_path / "guard.json")
    monkeypatch.setenv("REVISIT_VLLM_CALIBRATION", str(tmp_path / "guard.json"))
    assert settle(promised, {"risk": 0.2}, request(promised)).floor == 0.7


def test_a_risk_never_reaches_the_worker() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="llava"), generation_config=None)
    with pytest.raises(RevisitError, match="settled"):
        parse({"revisit": {"risk": 0.2}}, model)
