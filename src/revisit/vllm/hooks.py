"""Extensions of vLLM's own methods, by the process in which each runs.

    API server   InputProcessor                     checks the model at start, and rejects a request with bad settings
                                                    or images that can never fit (status 400)
    engine core  Scheduler                          lets a request wait until its vision states have room, and ends one
                                                    that failed in the worker, alone
    worker       GPUModelRunner, of V2 or of V1     follows requests and batches, and reports failures

Each extension calls vLLM's method and changes nothing for requests that did not opt in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from revisit.errors import RevisitError
from revisit.vllm.interfaces import extend, vllm_class
from revisit.vllm.plan import Plan, Reservations, make_plan
from revisit.vllm.request import KEY, admit, parse

log = logging.getLogger("vllm.revisit")  # below vLLM's own logger, which prints it
FAILED = "revisit_failed"  # attribute of a runner's output: ids of requests that must be ended
ENDED = "encoder_cache_mismatch_reqs"  # attribute of a scheduler: ids of requests that it ends with an error


def install() -> None:
    """Extend the API server and the engine core."""
    vllm_class("v1.request.Request", "request_id", "sampling_params", "prompt_token_ids")
    processor = vllm_class("v1.engine.input_processor.InputProcessor", "vllm_config")
    extend(processor, "__init__", wrap_start)
    extend(processor, "process_inputs", wrap_process_inputs)
    scheduler = vllm_class("v1.core.sched.scheduler.Scheduler", "vllm_config", "requests", ENDED)
    extend(scheduler, "_handle_blocked_waiting_request", wrap_blocked_waiting)
    extend(scheduler, "update_from_output", wrap_update_from_output)


def follow_runner(v2: bool) -> None:
    """Extend the model runner; called when the model is built, in its process."""
    vllm_class("v1.core.sched.output.SchedulerOutput", "finished_req_ids", "scheduled_new_reqs")
    vllm_class("v1.core.sched.output.NewRequestData", "req_id", "sampling_params", "prompt_token_ids")
    if v2:
        vllm_class(
            "v1.worker.gpu.input_batch.InputBatch",
            "req_ids",
            "num_computed_tokens_np",
            "num_scheduled_tokens",
            "input_ids",
        )
        runner = vllm_class("v1.worker.gpu.model_runner.GPUModelRunner", "get_model")
        extend(runner, "add_requests", wrap_new_requests)
        extend(runner, "prepare_inputs", wrap_batches_v2)
    else:
        vllm_class("v1.worker.gpu_input_batch.InputBatch", "req_ids", "num_reqs", "num_computed_tokens_cpu")
        runner = vllm_class("v1.worker.gpu_model_runner.GPUModelRunner", "get_model", "input_batch", "input_ids")
        extend(runner, "_update_states", wrap_new_requests)
        extend(runner, "_prepare_inputs", wrap_batches_v1)
    extend(runner, "sample_tokens", wrap_sample_tokens)


# -- API server ---------------------------------------------------------------------------------------------------


def plan_of(owner: Any) -> Plan:
    """Return the plan for the configuration of one of vLLM's objects."""
    if "revisit_plan" not in owner.__dict__:
        owner.revisit_plan = make_plan(owner.vllm_config)
    plan: Plan = owner.revisit_plan
    return plan


def wrap_start(start: Callable[..., None]) -> Callable[..., None]:
    """Raise for unsupported models when the server starts, and log what is stored."""

    def started(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        start(self, vllm_config, *args, **kwargs)
        log.info(plan_of(self).summary)

    return started


def wrap_process_inputs(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Reject requests with bad settings, or that can never fit, on arrival (status 400)."""

    def process(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.exceptions import VLLMValidationError

        if not getattr(params, "extra_args", None):
            return process_inputs(self, request_id, prompt, params, *args, **kwargs)
        try:
            method = admit(params, plan_of(self).model) if KEY in params.extra_args else None
            request = process_inputs(self, request_id, prompt, params, *args, **kwargs)
            if method is not None:
                plan_of(self).check_fit(method, request.prompt_token_ids or [])
        except RevisitError as error:
            raise VLLMValidationError(str(error)) from error
        return request

    return process


# -- engine core --------------------------------------------------------------------------------------------------


def wrap_blocked_waiting(handle_blocked: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a request, without blocking those behind it, until there is room for its vision states."""

    def ready(self: Any, request: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(handle_blocked(self, request, *args, **kwargs)) and reserve(self, request)

    return ready


def reserve(scheduler: Any, request: Any) -> bool:
    """Reserve a request's blocks of the pool until it ends; return whether it has them.

    A request that cannot be parsed or can never fit passed the check on arrival by mistake: it is ended, and the engine goes on.
    """
    name = request.request_id
    try:
        need = needed(scheduler, request)
    except Exception as error:
        log.error("ReVisiT ends request %s: %s", name, error)
        getattr(scheduler, ENDED).add(name)
        return False
    if not need:
        return True
    if "revisit_reservations" not in scheduler.__dict__:
        scheduler.revisit_reservations = Reservations(plan_of(scheduler).blocks)
    reservations: Reservations = scheduler.revisit_reservations
    if need > reservations.blocks:
        getattr(scheduler, ENDED).add(name)
        return False
    reservations.forget(scheduler.requests)
    return reservations.take(name, need)


def needed(scheduler: Any, request: Any) -> int:
    """Return the number of pool blocks that a request needs; 0 if it did not opt in."""
    params = request.sampling_params
    if params is None or KEY not in (params.extra_args or ()):
        return 0
    if not hasattr(request, "revisit_blocks"):
        method = parse(params.extra_args, plan_of(scheduler).model)
        prompt = request.prompt_token_ids or []
        request.revisit_blocks = 0 if method is None else plan_of(scheduler).blocks_of(method, prompt)
    return int(request.revisit_blocks)


def wrap_update_from_output(update_from_output: Callable[..., Any]) -> Callable[..., Any]:
    """End requests that failed in the worker with vLLM's own error status."""

    def update(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, ENDED).update(getattr(model_runner_output, FAILED, ()))
        return update_from_output(self, scheduler_output, model_runner_output, *args, **kwargs)

    return update


# -- worker -------------------------------------------------------------------------------------------------------


def worker_of(runner: Any) -> Any:
    """Return the `Worker` of a runner's model; None if the model is not ours or on an earlier pipeline stage."""
    model = runner.get_model() if getattr(runner, "model", None) is not None else None
    return getattr(model, "revisit", None)


def wrap_new_requests(update: Callable[..., Any]) -> Callable[..., Any]:
    """Remove ended requests, which frees their blocks, then add new ones."""

    def updated(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(self)
        if worker is not None:
            for name in scheduler_output.finished_req_ids:
                worker.remove(name)
            for new in scheduler_output.scheduled_new_reqs:
                worker.add(new.req_id, new.sampling_params, new.prompt_token_ids)
        return update(self, scheduler_output, *args, **kwargs)

    return updated


def wrap_batches_v2(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the worker, before every forward, which positions of which requests it computes, by row of the batch."""

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare_inputs(self, *args, **kwargs)
        worker = worker_of(self)
        if worker is not None:
            worker.begin(batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens, batch.input_ids)
        return batch

    return prepare


def wrap_batches_v1(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Do the same in the V1 runner, which keeps its batch."""

    def prepare(self: Any, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_inputs(self, scheduler_output, num_scheduled_tokens, *args, **kwargs)
        worker = worker_of(self)
        if worker is not None:
            batch, rows = self.input_batch, slice(self.input_batch.num_reqs)
            computed = batch.num_computed_tokens_cpu[rows]
            worker.begin(batch.req_ids[rows], computed, num_scheduled_tokens[rows], self.input_ids.gpu)
        return result

    return prepare


def wrap_sample_tokens(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Attach the requests that failed in this step to the runner's output."""

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        worker = worker_of(self)
        failed = worker.take_failed() if worker is not None else ()
        if failed:
            # Asynchronous outputs wrap the object that will be sent.
            held = (
                getattr(output, "_model_runner_output", None) or getattr(output, "model_runner_output", None) or output
            )
            setattr(held, FAILED, failed)
        return output

    return sample
