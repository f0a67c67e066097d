"""The extensions of vLLM's classes against their interfaces. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import torch
from test_vllm_core import BLOCK, IMAGE, Model, described, make_plan, params
from test_vllm_core import scheduled as waiting

from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
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
    assert len(extended) == 14
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


# -- what is extended ---------------------------------------------------------------------------------------------


class Runner:
    """The extended part of the V2 runner."""

    def __init__(self, worker: Any) -> None:
        self.model = SimpleNamespace(revisit=worker)

    def get_model(self) -> Any:
        return self.model

    def add_requests(self, scheduler_output: Any) -> Any:
        return scheduler_output

    def prepare_inputs(self, scheduler_output: Any, batch: Any) -> Any:
        return batch

    def sample_tokens(self, output: Any) -> Any:
        return output


hooks.extend(Runner, "add_requests", hooks.update_requests)
hooks.extend(Runner, "prepare_inputs", hooks.prepare_v2)
hooks.extend(Runner, "sample_tokens", hooks.sample_tokens)


def test_earlier_pipeline_stages_have_no_worker() -> None:
    runner, output = Runner(None), object()
    batch = SimpleNamespace(req_ids=["a"], input_ids=None, num_computed_tokens_np=[0], num_scheduled_tokens=[1])
    assert runner.add_requests(output) is output
    assert runner.prepare_inputs(output, batch) is batch
    assert runner.sample_tokens(output) is output


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The extended part of a scheduler with a prefix cache, and with room for four blocks of vision states."""

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config = None
            self.requests: dict[str, Any] = {}
            self.finished_req_ids: set[str] = set()
            self.encoder_cache_mismatch_reqs: set[str] = set()

        def schedule(self) -> Any:
            ready = [one for one in self.requests.values() if self._handle_blocked_waiting_request(one)]
            for one in ready:
                one.num_computed_tokens = len(one.prompt_token_ids)
            new = [SimpleNamespace(req_id=one.request_id) for one in ready]
            resumed = SimpleNamespace(resumed_req_ids=set())
            return SimpleNamespace(
                scheduled_new_reqs=new, scheduled_cached_reqs=resumed, finished_req_ids=self.finished_req_ids
            )

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            return not getattr(request, "blocked", False)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> set[str]:
            return self.encoder_cache_mismatch_reqs

        def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
            return reset_running_requests

    monkeypatch.setattr(hooks, "make_plan", lambda config: make_plan(blocks=4, caching=True))
    hooks.extend(Scheduler, "_handle_blocked_waiting_request", hooks.handle_waiting)
    for name in ("schedule", "update_from_output", "reset_prefix_cache"):
        hooks.extend(Scheduler, name, getattr(hooks, name))
    return Scheduler()


def run(scheduler: Any, *requests: Any) -> tuple[dict[str, str], list[str]]:
    """Schedule a step with these requests only; return the owners of their states, and the owners that are dropped."""
    before, scheduler.requests = scheduler.requests, {one.request_id: one for one in requests}
    scheduler.finished_req_ids = before.keys() - scheduler.requests.keys()
    return getattr(scheduler.schedule(), hooks.GRANTS, ({}, []))


def test_a_request_waits_until_its_vision_states_have_room(scheduler: Any) -> None:
    a, b, d = (
        waiting(name, [IMAGE] * BLOCK * blocks, 1, image=name) for name, blocks in (("a", 3), ("b", 2), ("d", 1))
    )
    plain, imageless = waiting("c", [IMAGE] * BLOCK * 9, None), waiting("f", [1], 1)
    d.blocked = True  # waits for something else of vLLM's, and takes no room meanwhile
    assert run(scheduler, a, b, plain, imageless, d) == ({"a": "a"}, [])
    d.blocked = False
    assert run(scheduler, a, b, d) == ({"a": "a", "d": "d"}, [])
    assert run(scheduler, b, d) == ({"b": "b", "d": "d"}, ["a"])
    assert not scheduler.encoder_cache_mismatch_reqs
    large, bad = waiting("e", [IMAGE] * BLOCK * 5, 1), waiting("g", [IMAGE], {"alpha": 9})
    assert run(scheduler, large, bad, d) == ({"d": "d"}, [])
    assert scheduler.encoder_cache_mismatch_reqs == {"e", "g"}  # which are ended


def test_a_request_reads_the_prefix_cache_if_its_vision_states_are_stored(scheduler: Any) -> None:
    first, second = waiting("a", [IMAGE, 2], 1), waiting("b", [IMAGE, 2, 1], 1)
    run(scheduler, first)
    assert first.skip_reading_prefix_cache
    assert run(scheduler, second) == ({"b": "a"}, [])
    assert not second.skip_reading_prefix_cache
    second.num_preemptions = 1
    run(scheduler, second)
    assert second.skip_reading_prefix_cache  # its own tokens may be in the cache
    other, imageless = waiting("c", [IMAGE, 2], 1, image="y"), waiting("d", [2], 1)
    run(scheduler, other, imageless)
    assert (other.skip_reading_prefix_cache, imageless.skip_reading_prefix_cache) == (True, False)
    scheduler.reset_prefix_cache()
    third = waiting("e", [IMAGE, 2], 1)
    assert run(scheduler, third) == ({"e": "e"}, ["a", "c"])
    assert third.skip_reading_prefix_cache


def test_requests_that_begin_again_after_a_reset_compute_their_states_again(scheduler: Any) -> None:
    """The weights or the memory may have changed: what they used, and shared, is dropped in the workers too."""
    first, second, prompt = waiting("a", [IMAGE, 2], 1), waiting("b", [IMAGE, 2, 1], 1), [IMAGE, 2]
    run(scheduler, first)
    assert run(scheduler, first, second) == ({"a": "a", "b": "a"}, [])
    scheduler.reset_prefix_cache(reset_running_requests=True)
    owners, dropped = run(scheduler, second, first)
    assert (owners, dropped) == ({"b": "b", "a": "a"}, ["a"])
    assert second.skip_reading_prefix_cache
    model = Model()
    runner, old = Runner(model.worker), model.sequence(prompt, 1)
    for name in "ab":
        model.worker.add(name, params({"alpha": 0.01}), prompt, "a")
        model.step([("a", old, 0, 2)])
    resumed = SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=(), revisit_grants=(owners, dropped))
    runner.add_requests(resumed)
    new = model.sequence(prompt, 2)
    _, got = model.step([("a", new, 0, 2), ("b", new, 0, 2)])
    wanted = model.wanted(ReVisiT(alpha=0.01), new, prompt, 2)
    torch.testing.assert_close(got, wanted.expand(2, -1))
    assert not model.worker.take_failed()


def test_requests_that_failed_in_the_worker_are_ended(scheduler: Any) -> None:
    model = Model(blocks=1)
    runner = Runner(model.worker)
    model.add("a", [IMAGE] * 2 * BLOCK)
    at_once, on_its_way = SimpleNamespace(), SimpleNamespace(model_runner_output=SimpleNamespace())
    assert runner.sample_tokens(at_once) is at_once
    assert scheduler.update_from_output(None, at_once) == {"a"}
    model.add("b", [IMAGE] * 2 * BLOCK)
    runner.sample_tokens(on_its_way)
    assert scheduler.update_from_output(None, on_its_way.model_runner_output) == {"a", "b"}


def test_bad_requests_are_rejected_on_arrival() -> None:
    from vllm.exceptions import VLLMValidationError

    class InputProcessor:
        revisit_plan = make_plan(blocks=4)

        def process_inputs(self, request_id: str, prompt: Any, params: Any) -> Any:
            return waiting(request_id, prompt, None)

    hooks.extend(InputProcessor, "process_inputs", hooks.process_inputs)
    large, processor = [IMAGE] * (4 * BLOCK + 1), InputProcessor()
    assert processor.process_inputs("a", large, params(None)).prompt_token_ids == large
    assert processor.process_inputs("b", large[1:], params(1)).prompt_token_ids == large[1:]
    with pytest.raises(VLLMValidationError, match="room for 512"):  # the API server returns status 400
        processor.process_inputs("c", large, params(1))
    with pytest.raises(VLLMValidationError, match="Did you mean 'alpha'"):
        processor.process_inputs("d", [1], params({"alhpa": 1}))


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

    deep = Plan((IMAGE,), 28, True, 3584, torch.bfloat16, 146, 1024, described("qwen2_5_vl"), "all", most_rows=256)
    monkeypatch.setattr(hooks, "make_plan", lambda config: deep)
    monkeypatch.setattr(hooks, "image_tokens", lambda model: 256)
    monkeypatch.setattr(hooks, "log", logging.getLogger("revisit"))  # vLLM's does not propagate
    hooks.extend(InputProcessor, "__init__", hooks.start_processor)
    with caplog.at_level(logging.INFO, "revisit"):
        InputProcessor(SimpleNamespace(model_config=None), renderer=None)
    assert caplog.messages == [
        "ReVisiT stores vision states of layers 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28 of 28: 1,022 MB in each worker, "
        "room for 10,678 vision tokens at a time.",
        "36 requests have room at a time with an image of 448 × 448 pixels (256 vision tokens) each.",
        "At most 36 requests of the 256 that the server decodes at a time can use ReVisiT: set a larger REVISIT_VLLM_POOL_MB, or fewer "
        "layers with REVISIT_VLLM_LAYERS.",
    ]


@pytest.mark.parametrize(("gigabytes", "images"), [(24, 87), (40, 146), (80, 292)])
def test_the_pool_has_a_share_of_the_devices_memory_by_default(
    gigabytes: int, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Qwen2.5-VL-7B, states of all recommended layers and images of 256 vision tokens."""
    from vllm.platforms import current_platform

    monkeypatch.delenv(plan.POOL_SWITCH, raising=False)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "get_device_total_memory", classmethod(lambda cls: gigabytes << 30))
    monkeypatch.setattr(plan, "check_model", lambda architecture: None)
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda model: None)
    text = SimpleNamespace(num_hidden_layers=28)
    model = SimpleNamespace(
        architecture="Qwen2_5_VLForConditionalGeneration",
        hf_text_config=text,
        hf_config=SimpleNamespace(model_type="qwen2_5_vl", image_token_id=IMAGE),
        get_hidden_size=lambda: 3584,
        dtype=torch.bfloat16,
        max_model_len=128_000,
        try_get_generation_config=dict,
        logits_processors=None,
    )
    config = SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        num_speculative_tokens=0,
    )
    assert plan.make_plan(config).images(256) == images


def test_beam_search_with_revisit_is_rejected() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    hooks.extend(ChatCompletionRequest, "to_beam_search_params", hooks.to_beam_search_params)
    request = ChatCompletionRequest(messages=[], model="m", use_beam_search=True, n=2)
    assert request.to_beam_search_params(8, {}).beam_width == 2
    request.vllm_xargs = {"revisit": 1}
    with pytest.raises(VLLMValidationError, match="beam search"):
        request.to_beam_search_params(8, {})


NGRAMS = SimpleNamespace(method="ngram")


@pytest.mark.parametrize("option", [{"ubatch_size": 2}, {"enable_dbo": True}, {}])
def test_vllm_names_micro_batches_of_both_kinds(option: dict[str, Any]) -> None:
    from vllm.config import ParallelConfig

    assert ParallelConfig(**option).use_ubatching == bool(option)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": NGRAMS}, None),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculation other than"),
        ({"speculative_config": NGRAMS, "graphs": "FULL_AND_PIECEWISE"}, None),
        ({"speculative_config": NGRAMS, "graphs": "FULL_AND_PIECEWISE", "use_v2_model_runner": False}, "V1 runner"),
        ({"speculative_config": SimpleNamespace(method="ngram", enable_adaptive_verification=True)}, "adaptive verif"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"context": 2}, "context parallelism"),
        ({"micro_batches": True}, "micro-batches"),
        ({"fast_prefill": True}, "fast prefills"),
        ({"stages": 2}, None),
        ({"stages": 2, "layers": (1, 3)}, "pipeline parallelism"),
        ({"breakable": "1"}, "breakable CUDA graphs"),
        ({"breakable": "1", "eager": True}, None),
        ({"graphs": "FULL"}, "cudagraph_mode FULL"),
        ({"graphs": "FULL_AND_PIECEWISE"}, None),
    ],
)
def test_options_with_inexact_results_raise_at_start(
    changes: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    names = ("lora_config", "speculative_config", "kv_transfer_config")
    options: dict[str, Any] = {**dict.fromkeys(names), "use_v2_model_runner": True, **changes}
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", options.get("breakable", "0"))
    parallel = SimpleNamespace(
        pipeline_parallel_size=options.get("stages", 1),
        use_ubatching=options.get("micro_batches", False),
        enable_batch_sharded_sampling=None,
        decode_context_parallel_size=options.get("context", 1),
        prefill_context_parallel_size=1,
    )
    config: Any = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(enable_prompt_embeds=False, enforce_eager=options.get("eager", False)),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[options.get("graphs", "NONE")]),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=options.get("fast_prefill", False)),
        **{name: options[name] for name in (*names, "use_v2_model_runner")},
    )
    with pytest.raises(RevisitError, match=part) if part else nullcontext():
        models.check_supported(config, options.get("layers", (3,)))
