"""The extensions of vLLM's classes against their interfaces. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import numpy as np
import torch
from test_vllm_core import BLOCK, DEPTH, IMAGE, Model, Params, described
from test_vllm_core import scheduled as waiting

from revisit import ReVisiT
from revisit.errors import RevisitError
from revisit.models import families
from revisit.vllm import hooks, models, plan
from revisit.vllm.plan import Plan


def source(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


# -- interfaces ---------------------------------------------------------------------------------------------------


def test_this_version_of_vllm_has_the_interfaces_that_the_plugin_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of both runners exist and are extended once."""
    extended: list[str] = []

    def note(owner: type, name: str, make: Any) -> None:
        probe = type(owner.__name__, (owner,), {})
        extend(probe, name, make)
        method = getattr(probe, name)
        extend(probe, name, make)
        assert getattr(probe, name) is method
        extended.append(f"{owner.__name__}.{name}")

    extend = hooks.extend
    monkeypatch.setattr(hooks, "extend", note)
    hooks.install()
    for v2 in (True, False):
        hooks.follow_runner(v2)
    assert len(extended) == 12
    source_of_subclass = source("vllm.v1.core.sched.async_scheduler")
    for name in ("schedule", "update_from_output", "reset_prefix_cache", "_handle_blocked_waiting_request"):
        assert f"def {name}(" not in source_of_subclass
    assert f"self.{hooks.ENDED}: set[str] = set()" in source("vllm.v1.core.sched.scheduler")


def test_both_runners_refine_before_grammars_biases_and_penalties() -> None:
    """Logits are refined where they are computed, before they are changed otherwise."""
    first, second = source("vllm.v1.worker.gpu_model_runner"), source("vllm.v1.worker.gpu.model_runner")
    sampling = first[first.index("    def execute_model(") : first.index("    def _input_fits_in_drafter(")]
    assert "logits = self.model.compute_logits(sample_hidden_states)" in sampling
    assert "apply_grammar_bitmask" not in sampling
    sample = second[second.index("    def sample(") : second.index("    def postprocess_sampled(")]
    order = ["self.model.compute_logits(", "apply_grammar_bitmask(", "self.sampler(logits, input_batch)"]
    assert [sample.index(part) for part in order] == sorted(sample.index(part) for part in order)


def test_every_architecture_is_one_that_vllm_has() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    for name in families.vllm_architectures():
        module, cls = _VLLM_MODELS[name]
        theirs = getattr(import_module(f"vllm.model_executor.models.{module}"), cls)
        assert issubclass(getattr(models, name), theirs)


# -- the runners --------------------------------------------------------------------------------------------------


def prepare(runner: Any, requests: list[str], computed: list[int], scheduled: list[int], **drafts: list[int]) -> None:
    """Prepare the batch of a step, with the candidates of some requests."""
    batch = SimpleNamespace(req_ids=requests, input_ids=None)
    batch.num_computed_tokens_np, batch.num_scheduled_tokens = np.array(computed), np.array(scheduled)
    assert runner.prepare_inputs(SimpleNamespace(scheduled_spec_decode_tokens=drafts), batch) is batch


def request(name: str, prompt: list[int], settings: Any) -> Any:
    params = Params(None if settings is None else {"revisit": settings})
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=prompt)


class Runner:
    """The extended part of the V2 runner."""

    def __init__(self, worker: Any) -> None:
        self.model = SimpleNamespace(revisit=worker)

    def get_model(self) -> Any:
        return self.model

    def add_requests(self, scheduler_output: Any) -> None:
        pass

    def prepare_inputs(self, scheduler_output: Any, batch: Any) -> Any:
        return batch


hooks.extend(Runner, "add_requests", hooks.wrap_new_requests)
hooks.extend(Runner, "prepare_inputs", hooks.wrap_batches_v2)


def scheduled(*new: Any, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(finished))


def forward(model: Model, pieces: list[tuple[dict[int, torch.Tensor], int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = {layer: torch.cat([s[layer][a:b] for s, a, b in pieces]) for layer in (1, DEPTH)}
    model.worker.observe(hidden[DEPTH], [hidden[1]])
    return model.sample([("", s, a, b) for s, a, b in pieces])


def test_requests_are_followed_refined_and_freed() -> None:
    model = Model()
    runner = Runner(model.worker)
    method, prompt, plain = ReVisiT(alpha=0.01), [1, IMAGE, IMAGE, 2], [1, 2]
    a, b = model.sequence(prompt, 1), model.sequence(plain, 2)
    runner.add_requests(scheduled(request("a", prompt, {"alpha": 0.01}), request("b", plain, None)))
    assert list(model.worker.requests) == ["a"]

    prepare(runner, ["b", "a"], [0, 0], [2, 2])
    raw, got = forward(model, [(b, 0, 2), (a, 0, 2)])
    assert torch.equal(got, raw)  # its prompt is not finished
    prepare(runner, ["a", "b"], [2, 2], [2, 1])  # rows are ordered anew every step
    raw, got = forward(model, [(a, 2, 4), (b, 2, 3)])
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 4))
    assert torch.equal(got[1], raw[1])
    assert model.worker.pool.used == 1

    # A decoding step of a replayed graph: no forward is seen, only the sampled states.
    prepare(runner, ["a"], [4], [1])
    _, got = model.sample([("a", a, 4, 5)])
    torch.testing.assert_close(got[0], model.wanted(method, a, prompt, 5))

    # Candidates of a speculation have rows of their own.
    prepare(runner, ["b", "a"], [3, 5], [1, 3], a=[7, 7])
    _, got = model.sample([("b", b, 3, 4), *(("a", a, 5, end) for end in (6, 7, 8))])
    for row, end in enumerate((6, 7, 8), start=1):
        torch.testing.assert_close(got[row], model.wanted(method, a, prompt, end))

    again = request("c", prompt, {"alpha": 0.01})
    setattr(again, hooks.GRANT, ("c", ["a"]))
    runner.add_requests(scheduled(again, finished=("a",)))
    assert list(model.worker.requests) == ["c"]
    assert model.worker.pool.used == 1


def test_earlier_pipeline_stages_have_no_worker() -> None:
    runner = Runner(None)
    runner.add_requests(scheduled(request("a", [IMAGE], {"alpha": 0.01})))
    prepare(runner, ["a"], [0], [1])


# -- what is extended ---------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The extended part of a scheduler with a prefix cache, and with room for four blocks of vision states."""

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config = None
            self.requests: dict[str, Any] = {}
            self.encoder_cache_mismatch_reqs: set[str] = set()

        def schedule(self) -> Any:
            ready = [one for one in self.requests.values() if self._handle_blocked_waiting_request(one)]
            for one in ready:
                one.num_computed_tokens = len(one.prompt_token_ids)
            return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=one.request_id) for one in ready])

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            return not getattr(request, "blocked", False)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> set[str]:
            return self.encoder_cache_mismatch_reqs

        def reset_prefix_cache(self) -> bool:
            return True

    monkeypatch.setattr(hooks, "make_plan", lambda config: replace(Model(blocks=4).plan, caching=True))
    for name, wrap in (
        ("_handle_blocked_waiting_request", hooks.wrap_blocked_waiting),
        ("schedule", hooks.wrap_schedule),
        ("update_from_output", hooks.wrap_update_from_output),
        ("reset_prefix_cache", hooks.wrap_reset),
    ):
        hooks.extend(Scheduler, name, wrap)
        hooks.extend(Scheduler, name, wrap)  # twice is once
    return Scheduler()


def run(scheduler: Any, *requests: Any) -> dict[str, Any]:
    """Schedule a step with these requests only; return the grants of those that are scheduled."""
    scheduler.requests = {one.request_id: one for one in requests}
    return {new.req_id: getattr(new, hooks.GRANT, None) for new in scheduler.schedule().scheduled_new_reqs}


def test_a_request_waits_until_its_vision_states_have_room(scheduler: Any) -> None:
    a, b, d = (
        waiting(name, [IMAGE] * BLOCK * blocks, 1, image=name) for name, blocks in (("a", 3), ("b", 2), ("d", 1))
    )
    plain, imageless = waiting("c", [IMAGE] * BLOCK * 9, None), waiting("f", [1], 1)
    d.blocked = True  # waits for something else of vLLM's, and takes no room meanwhile
    assert run(scheduler, a, b, plain, imageless, d) == {"a": ("a", []), "c": None, "f": None}
    d.blocked = False
    assert run(scheduler, a, b, d) == {"a": ("a", []), "d": ("d", [])}
    assert run(scheduler, b, d) == {"b": ("b", ["a"]), "d": ("d", [])}
    assert not scheduler.encoder_cache_mismatch_reqs
    assert run(scheduler, waiting("e", [IMAGE] * BLOCK * 5, 1)) == {}  # more than there is: it is ended
    assert scheduler.encoder_cache_mismatch_reqs == {"e"}


def test_a_request_reads_the_prefix_cache_if_its_vision_states_are_stored(scheduler: Any) -> None:
    first, second = waiting("a", [IMAGE, 2], 1), waiting("b", [IMAGE, 2, 1], 1)
    run(scheduler, first)
    assert first.skip_reading_prefix_cache
    assert run(scheduler, second) == {"b": ("a", [])}
    assert not second.skip_reading_prefix_cache
    second.num_preemptions = 1
    run(scheduler, second)
    assert second.skip_reading_prefix_cache  # its own tokens may be in the cache
    other, imageless = waiting("c", [IMAGE, 2], 1, image="y"), waiting("d", [2], 1)
    run(scheduler, other, imageless)
    assert (other.skip_reading_prefix_cache, imageless.skip_reading_prefix_cache) == (True, False)
    scheduler.reset_prefix_cache()
    third = waiting("e", [IMAGE, 2], 1)
    assert run(scheduler, third) == {"e": ("e", ["a", "c"])}
    assert third.skip_reading_prefix_cache


def test_requests_that_failed_in_the_worker_are_ended(scheduler: Any) -> None:
    model = Model(blocks=1)

    class Sampling(Runner):
        def sample_tokens(self, output: Any) -> Any:
            return output

    hooks.extend(Sampling, "sample_tokens", hooks.wrap_sample_tokens)
    runner = Sampling(model.worker)
    model.add("a", [IMAGE] * 2 * BLOCK)
    at_once, on_its_way = SimpleNamespace(), SimpleNamespace(model_runner_output=SimpleNamespace())
    assert runner.sample_tokens(at_once) is at_once
    assert scheduler.update_from_output(None, at_once) == {"a"}
    model.add("b", [IMAGE] * 2 * BLOCK)
    runner.sample_tokens(on_its_way)
    assert scheduler.update_from_output(None, on_its_way.model_runner_output) == {"a", "b"}


def test_a_request_that_can_never_fit_is_rejected_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(VLLMValidationError, match="room for 512"):  # the API server returns status 400
        processor.process_inputs("c", large, Params({"revisit": 1}))
    with pytest.raises(VLLMValidationError, match="Did you mean 'alpha'"):
        processor.process_inputs("d", [1], Params({"revisit": {"alhpa": 1}}))


# -- at start-up --------------------------------------------------------------------------------------------------


def test_an_unsupported_model_raises_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ModelRegistry

    with pytest.raises(RevisitError, match="Phi3VForCausalLM"):
        plan.check_model("Phi3VForCausalLM")
    monkeypatch.setitem(ModelRegistry.models, "LlavaForConditionalGeneration", object())
    with pytest.raises(RevisitError, match="VLLM_PLUGINS=revisit"):
        plan.check_model("LlavaForConditionalGeneration")


def test_what_a_server_stores_is_logged_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class InputProcessor:
        def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
            self.vllm_config = vllm_config

    deep = Plan((IMAGE,), 28, True, 3584, torch.bfloat16, 146, 1024, described("qwen2_5_vl"), "all")
    monkeypatch.setattr(hooks, "make_plan", lambda config: deep)
    monkeypatch.setattr(hooks, "log", logging.getLogger("revisit"))  # vLLM's does not propagate
    hooks.extend(InputProcessor, "__init__", hooks.wrap_start)
    with caplog.at_level(logging.INFO, "revisit"):
        InputProcessor(None, renderer=None)
    assert caplog.messages == [
        "ReVisiT stores vision states of layers 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28 of 28: 1,022 MB in each worker, "
        "room for 10,678 vision tokens at a time."
    ]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, None),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculation other than"),
        ({"speculative_config": SimpleNamespace(method="ngram"), "cudagraph_mode": "FULL_AND_PIECEWISE"}, None),
        (
            {
                "speculative_config": SimpleNamespace(method="ngram"),
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "use_v2_model_runner": False,
            },
            "V1 runner",
        ),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"context": 2}, "context parallelism"),
        ({"fast_prefill": True}, "fast prefills"),
        ({"pipeline_parallel_size": 2}, None),
        ({"pipeline_parallel_size": 2, "layers": "all"}, "pipeline parallelism"),
        ({"pipeline_parallel_size": 2, "layers": "", "model_type": "qwen2_5_vl"}, "pipeline parallelism"),
        ({"breakable": "1"}, "breakable CUDA graphs"),
        ({"breakable": "1", "enforce_eager": True}, None),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode FULL"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, None),
    ],
)
def test_options_with_inexact_results_raise_at_start(
    changes: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    monkeypatch.setenv("REVISIT_VLLM_LAYERS", changes.pop("layers", "last"))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", changes.pop("breakable", "0"))
    parallel = SimpleNamespace(
        pipeline_parallel_size=changes.pop("pipeline_parallel_size", 1),
        enable_dbo=False,
        enable_batch_sharded_sampling=None,
        decode_context_parallel_size=changes.pop("context", 1),
        prefill_context_parallel_size=1,
    )
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
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=changes.pop("fast_prefill", False)),
        **dict.fromkeys(("lora_config", "speculative_config", "kv_transfer_config"))
        | {"use_v2_model_runner": True}
        | changes,
    )
    if part is None:
        models.check_supported(config)  # type: ignore[arg-type]
        return
    with pytest.raises(RevisitError, match=part):
        models.check_supported(config)  # type: ignore[arg-type]
