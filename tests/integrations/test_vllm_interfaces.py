"""What meets vLLM's own classes, against their interfaces; the V2 runner needs a GPU to run. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import numpy as np
import torch
from test_vllm_core import BLOCK, DEPTH, IMAGE, Model, Params

from revisit import ReVisiT
from revisit.errors import RevisitError
from revisit.integrations.vllm import ARCHITECTURES, hooks, models, v1, v2


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


# -- interfaces ---------------------------------------------------------------------------------------------------


def test_the_processors_have_the_interfaces_of_their_runners() -> None:
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as First
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as Second

    for ours, theirs, methods in (
        (v1.V1, First, ("__init__", "is_argmax_invariant", "update_state", "apply")),
        (v2.V2, Second, ("__init__", "add_request", "apply")),
    ):
        for name in methods:
            assert names(getattr(ours, name)) == names(getattr(theirs, name)), (ours, name)


def test_the_methods_we_extend_are_those_we_read() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert names(InputProcessor.process_inputs)[:4] == ["self", "request_id", "prompt", "params"]
    assert names(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert names(Scheduler._handle_blocked_waiting_request) == ["self", "request"]
    assert not {"update_from_output", "_handle_blocked_waiting_request"} & AsyncScheduler.__dict__.keys()
    assert "self.grammar_compile_error_reqs: set[str] = set()" in source("vllm.v1.core.sched.scheduler")
    assert names(GPUModelRunner._update_states) == ["self", "scheduler_output"]
    assert names(GPUModelRunner._prepare_inputs) == ["self", "scheduler_output", "num_scheduled_tokens"]
    states = source("vllm.v1.worker.gpu.model_states.default")
    for line in (
        "def add_request(self, req_index: int, new_req_data: NewRequestData)",
        "def remove_request(self, req_id: str)",
        "self, input_batch: InputBatch, req_states: RequestState",
    ):
        assert line in states
    batch = source("vllm.v1.worker.gpu.input_batch")
    for field in ("req_ids: list[str]", "num_scheduled_tokens: np.ndarray", "num_computed_tokens_np: np.ndarray"):
        assert field in batch


def test_both_runners_refine_before_grammars_biases_and_penalties() -> None:
    """Logits are computed, and refined, before anything else is done to them."""
    first, second = source("vllm.v1.worker.gpu_model_runner"), source("vllm.v1.worker.gpu.model_runner")
    sampling = first[first.index("    def execute_model(") : first.index("    def _input_fits_in_drafter(")]
    assert "logits = self.model.compute_logits(sample_hidden_states)" in sampling
    assert "apply_grammar_bitmask" not in sampling
    sample = second[second.index("    def sample(") : second.index("    def postprocess_sampled(")]
    order = ["self.model.compute_logits(", "apply_grammar_bitmask(", "self.sampler(logits, input_batch)"]
    assert [sample.index(part) for part in order] == sorted(sample.index(part) for part in order)
    raw = torch.randn(2, 5)
    for processor in (v1.V1.__new__(v1.V1), v2.V2.__new__(v2.V2)):
        assert processor.apply(raw, *[None] * (len(names(processor.apply)) - 1)) is raw  # type: ignore[arg-type]


def test_every_architecture_is_one_that_vllm_has() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    for name, module in ARCHITECTURES.items():
        assert _VLLM_MODELS[name] == (module, name)
        theirs = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
        ours = getattr(models, name)
        assert issubclass(ours, theirs)
        assert hasattr(theirs, "compute_logits")


# -- the V2 runner ------------------------------------------------------------------------------------------------


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


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(v2, "follow_v2", lambda: None)
    return Model()


def follow(model: Model | None) -> Any:
    owner = SimpleNamespace(revisit=None if model is None else model.worker)
    return v2.following(Base)(None, owner, None, None)


def batch(requests: list[str], computed: list[int], scheduled: list[int]) -> Any:
    return SimpleNamespace(
        req_ids=requests, num_computed_tokens_np=np.array(computed), num_scheduled_tokens=np.array(scheduled)
    )


def request(name: str, prompt: list[int], settings: Any) -> Any:
    params = Params(None if settings is None else {"revisit": settings})
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=prompt)


def forward(model: Model, pieces: list[tuple[dict[int, torch.Tensor], int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = {layer: torch.cat([s[layer][a:b] for s, a, b in pieces]) for layer in (1, DEPTH)}
    model.worker.observe(hidden[DEPTH], [hidden[1]])
    return model.sample([("", s, a, b) for s, a, b in pieces])


def test_requests_are_followed_refined_and_freed(model: Model) -> None:
    state = follow(model)
    method, prompt, plain = ReVisiT(alpha=0.01), [1, IMAGE, IMAGE, 2], [1, 2]
    a, b = model.sequence(prompt, 1), model.sequence(plain, 2)
    state.add_request(5, request("a", prompt, {"alpha": 0.01}))
    state.add_request(2, request("b", plain, None))
    assert list(model.worker.requests) == ["a"]

    assert state.prepare_inputs(batch(["b", "a"], [0, 0], [2, 2]), None) == {"positions": 1}
    raw, got = forward(model, [(b, 0, 2), (a, 0, 2)])
    assert torch.equal(got, raw)  # its prompt is not finished
    state.prepare_inputs(batch(["a", "b"], [2, 2], [2, 1]), None)  # rows are ordered anew every step
    raw, got = forward(model, [(a, 2, 4), (b, 2, 3)])
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 4))
    assert torch.equal(got[1], raw[1])
    assert model.worker.pool.used == 1

    # A decoding step of a replayed graph: no forward is seen, only the sampled states.
    state.prepare_inputs(batch(["a"], [4], [1]), None)
    _, got = model.sample([("a", a, 4, 5)])
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 5))

    state.remove_request("a")
    assert model.worker.pool.used == 0
    assert state.log == ["add 5", "add 2", "remove a"]


def test_a_preempted_request_collects_again(model: Model) -> None:
    state, prompt = follow(model), [IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    state.add_request(0, request("a", prompt, {"alpha": 0.01}))
    state.prepare_inputs(batch(["a"], [0], [2]), None)
    forward(model, [(sequence, 0, 2)])
    state.remove_request("a")  # the V2 runner removes preempted requests and adds them again
    state.add_request(3, request("a", prompt, {"alpha": 0.01}))
    state.prepare_inputs(batch(["a"], [0], [5]), None)  # prompt and three tokens of output, all computed again
    assert model.worker._rows[0].token == 3
    _, got = forward(model, [(sequence, 0, 5)])
    torch.testing.assert_close(got[0], model.wanted(ReVisiT(alpha=0.01), sequence, prompt, 5))


def test_earlier_pipeline_stages_have_nothing_to_follow() -> None:
    state = follow(None)
    state.add_request(0, request("a", [IMAGE], {"alpha": 0.01}))
    assert state.prepare_inputs(batch(["a"], [0], [1]), None) == {"positions": 1}
    state.remove_request("a")


# -- what is extended ---------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler, as far as it is extended, with room for four blocks of vision states."""

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config = None
            self.requests: dict[str, Any] = {}
            self.grammar_compile_error_reqs: set[str] = set()

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            return not getattr(request, "blocked", False)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> set[str]:
            return self.grammar_compile_error_reqs

    monkeypatch.setattr(hooks, "make_plan", lambda config: Model(blocks=4).plan)
    hooks.extend(Scheduler, "_handle_blocked_waiting_request", hooks.wrap_blocked_waiting)
    hooks.extend(Scheduler, "update_from_output", hooks.wrap_update_from_output)
    hooks.extend(Scheduler, "_handle_blocked_waiting_request", hooks.wrap_blocked_waiting)  # twice is once
    return Scheduler()


def test_a_request_waits_until_its_vision_states_have_room(scheduler: Any) -> None:
    def ready(name: str, blocks: int, settings: Any = 1, blocked: bool = False) -> bool:
        one = SimpleNamespace(
            request_id=name,
            sampling_params=Params({"revisit": settings} if settings else None),
            prompt_token_ids=[IMAGE] * BLOCK * blocks,
            blocked=blocked,
        )
        scheduler.requests[name] = one
        answer: bool = scheduler._handle_blocked_waiting_request(one)
        return answer

    assert ready("a", 3)
    assert not ready("b", 2)
    assert ready("c", 9, settings=None)  # did not opt in
    assert ready("f", 0)  # has no image
    assert ready("a", 3)  # has its place
    assert not ready("d", 1, blocked=True)  # waits for something else of vLLM's, and takes no room meanwhile
    assert ready("d", 1)
    assert not ready("b", 2)
    del scheduler.requests["a"]
    assert ready("b", 2)
    assert not scheduler.grammar_compile_error_reqs
    assert not ready("e", 5)  # more than there is: it is ended, and holds up nobody
    assert scheduler.grammar_compile_error_reqs == {"e"}


def test_requests_that_failed_in_the_worker_are_ended(scheduler: Any) -> None:
    model = Model(blocks=1)

    class Runner:
        model = SimpleNamespace(revisit=None)

        def get_model(self) -> Any:
            return self.model

        def sample_tokens(self, output: Any) -> Any:
            return output

    Runner.model.revisit = model.worker
    hooks.extend(Runner, "sample_tokens", hooks.wrap_sample_tokens)
    model.add("a", [IMAGE] * 2 * BLOCK)
    at_once, on_its_way = SimpleNamespace(), SimpleNamespace(model_runner_output=SimpleNamespace())
    assert Runner().sample_tokens(at_once) is at_once
    assert scheduler.update_from_output(None, at_once) == {"a"}
    model.add("b", [IMAGE] * 2 * BLOCK)
    Runner().sample_tokens(on_its_way)
    assert scheduler.update_from_output(None, on_its_way.model_runner_output) == {"a", "b"}


def test_a_request_that_can_never_fit_is_refused_where_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.exceptions import VLLMValidationError

    class InputProcessor:
        vllm_config = None

        def process_inputs(self, request_id: str, prompt: Any, params: Any) -> Any:
            return SimpleNamespace(prompt_token_ids=prompt)

    monkeypatch.setattr(hooks, "make_plan", lambda config: Model(blocks=4).plan)
    hooks.extend(InputProcessor, "process_inputs", hooks.wrap_process_inputs)
    large, processor = [IMAGE] * (4 * BLOCK + 1), InputProcessor()
    assert processor.process_inputs("a", large, Params()).prompt_token_ids == large
    assert processor.process_inputs("b", large[1:], Params({"revisit": 1})).prompt_token_ids == large[1:]
    with pytest.raises(VLLMValidationError, match="room for 512"):  # the API server makes a 400 of it
        processor.process_inputs("c", large, Params({"revisit": 1}))
    with pytest.raises(VLLMValidationError, match="Did you mean 'alpha'"):
        processor.process_inputs("d", [1], Params({"revisit": {"alhpa": 1}}))


# -- at start-up --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"pipeline_parallel_size": 2}, None),
        ({"pipeline_parallel_size": 2, "layers": "all"}, "pipeline parallelism"),
        ({"pipeline_parallel_size": 2, "layers": "", "model_type": "qwen2_5_vl"}, "pipeline parallelism"),
        ({"breakable": "1"}, "breakable CUDA graphs"),
        ({"breakable": "1", "enforce_eager": True}, None),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode FULL"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, None),
    ],
)
def test_what_cannot_be_done_exactly_is_refused_at_start_up(
    changes: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    monkeypatch.setenv("REVISIT_VLLM_LAYERS", changes.pop("layers", "last"))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", changes.pop("breakable", "0"))
    parallel = SimpleNamespace(pipeline_parallel_size=changes.pop("pipeline_parallel_size", 1))
    mode = CUDAGraphMode[changes.pop("cudagraph_mode", "NONE")]
    eager = changes.pop("enforce_eager", False)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(
            enable_prompt_embeds=False,
            enforce_eager=eager,
            hf_config=SimpleNamespace(model_type=changes.pop("model_type", "llava")),
            try_get_generation_config=dict,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        **{"lora_config": None, "speculative_config": None, "kv_transfer_config": None, **changes},
    )
    if part is None:
        models.refuse(config)  # type: ignore[arg-type]
        return
    with pytest.raises(RevisitError, match=part):
        models.refuse(config)  # type: ignore[arg-type]
