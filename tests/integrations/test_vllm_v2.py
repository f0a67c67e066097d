"""The V2 adapter against the interfaces of vLLM's V2 runner, which needs a GPU to run. Run by `make test-vllm`."""

from __future__ import annotations

import gc
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import numpy as np
import torch
from test_vllm_core import DEPTH, IMAGE, Model
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from revisit import ReVisiT
from revisit.errors import RevisitError
from revisit.integrations.vllm import tap as taps
from revisit.integrations.vllm import v2
from revisit.integrations.vllm.states import held


class Base:
    """What a model-state class of vLLM has, as far as it is extended."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        self.log: list[str] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self.log.append(f"add {req_index}")

    def remove_request(self, req_id: str) -> None:
        self.log.append(f"remove {req_id}")

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        return {"positions": 1}


def test_the_interfaces_are_those_we_were_written_for() -> None:
    """Parameter names of every method that vLLM calls on us or that we override."""

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    for name in ("__init__", "validate_params", "add_request", "apply"):
        assert names(getattr(v2.V2, name)) == names(getattr(LogitsProcessor, name)), name
    source = importlib.util.find_spec("vllm.v1.worker.gpu.model_states.default")
    assert source is not None
    assert source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    for line in (
        "def add_request(self, req_index: int, new_req_data: NewRequestData)",
        "def remove_request(self, req_id: str)",
    ):
        assert line in text
    fields = {"expanded_idx_mapping", "idx_mapping_np", "pos"}
    assert fields <= set(LogitsContext.__dataclass_fields__)


def context(slots: list[int], positions: list[int]) -> LogitsContext:
    mapping = torch.tensor(slots)
    nothing = torch.zeros(len(slots))
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=nothing,
        input_ids=nothing,
        pos=torch.tensor(positions),
        seq_lens_upper_bound_np=np.array(positions) + 1,
    )


def batch(starts: list[int], computed: list[int]) -> Any:
    return SimpleNamespace(query_start_loc_np=np.array(starts), num_computed_tokens_np=np.array(computed))


def request(name: str, prompt: list[int], settings: Any) -> Any:
    params = SimpleNamespace(extra_args=None if settings is None else {"revisit": settings})
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=prompt)


def test_requests_in_slots_are_refined_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2, "check_model", lambda config: None)
    model = Model()
    config = SimpleNamespace(compilation_config=object())
    taps.publish(config, model.tap)
    owner = SimpleNamespace(revisit_tap=model.tap)
    state = v2.following(Base)(config, owner, None, None)
    processor = v2.V2(config, None)
    method, prompt, plain = ReVisiT(alpha=0.01), [1, IMAGE, IMAGE, 2], [1, 2]
    ours, theirs = request("a", prompt, {"alpha": 0.01}), request("b", plain, None)
    a, b = model.sequence(prompt, 1), model.sequence(plain, 2)
    gc.collect()
    before = held().requests  # an idle engine of another test lets go of its last requests at its next step

    assert not model.tap.listening
    for slot, one in ((5, ours), (2, theirs)):
        state.add_request(slot, one)
    assert processor.add_request(5, ours.sampling_params) is True
    assert processor.add_request(2, theirs.sampling_params) is False
    assert model.tap.listening

    state.prepare_inputs(batch([0, 2, 4], [0, 0]), None)  # b first: rows are ordered anew every step
    raw = model.forward([(b, 0, 2), (a, 0, 2)])
    assert torch.equal(processor.apply(raw.clone(), context([2, 5], [1, 1])), raw)  # its prompt is not finished
    state.prepare_inputs(batch([0, 2, 3], [2, 2]), None)
    raw = model.forward([(a, 2, 4), (b, 2, 3)])
    got = processor.apply(raw.clone(), context([5, 2], [3, 2]))
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 4))
    assert torch.equal(got[1], raw[1])
    assert held().requests == before + 1

    # A decoding step of a replayed graph: no forward is seen, only the sampled states.
    state.prepare_inputs(batch([0, 1], [4]), None)
    model.tap.observe_sampled(a[DEPTH][4:5])
    got = processor.apply(a[DEPTH][4:5] @ model.weight.T, context([5], [4]))
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 5))

    state.remove_request("a")
    gc.collect()
    assert held().requests == before
    assert not model.tap.listening
    assert state.log == ["add 5", "add 2", "remove a"]


def test_a_preempted_request_collects_again_in_its_new_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2, "check_model", lambda config: None)
    model = Model()
    config = SimpleNamespace(compilation_config=object())
    taps.publish(config, model.tap)
    state = v2.following(Base)(config, SimpleNamespace(revisit_tap=model.tap), None, None)
    processor = v2.V2(config, None)
    prompt = [IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    state.add_request(0, request("a", prompt, {"alpha": 0.01}))
    state.prepare_inputs(batch([0, 2], [0]), None)
    processor.apply(model.forward([(sequence, 0, 2)]), context([0], [1]))
    state.remove_request("a")  # the V2 runner removes preempted requests and adds them again
    state.add_request(3, request("a", prompt, {"alpha": 0.01}))
    state.prepare_inputs(batch([0, 5], [0]), None)  # prompt and three tokens of output, all computed again
    got = processor.apply(model.forward([(sequence, 0, 5)]), context([3], [4]))
    torch.testing.assert_close(got[0], model.wanted(ReVisiT(alpha=0.01), sequence, prompt, 5))
    assert state.revisit_slots.states[3].index == 3


def test_a_model_of_somebody_else_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        compilation_config=object(), model_config=SimpleNamespace(architecture="LlavaForConditionalGeneration")
    )
    from vllm import ModelRegistry

    monkeypatch.setitem(ModelRegistry.models, "LlavaForConditionalGeneration", object())
    with pytest.raises(RevisitError, match="REVISIT_VLLM=1"):
        v2.V2(config, None)
    config.model_config.architecture = "Phi3VForCausalLM"
    with pytest.raises(RevisitError, match="not Phi3VForCausalLM"):
        v2.V2(config, None)


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    from revisit.integrations.vllm import check_version

    check_version()
    monkeypatch.setattr(vllm.version, "__version__", "0.40.1")
    with pytest.raises(RevisitError, match=r"0\.40\.1"):
        check_version()
