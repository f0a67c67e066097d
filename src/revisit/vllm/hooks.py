"""Extensions of vLLM's own methods, by the process in which each runs.

    API server   InputProcessor                     checks the model at start, and rejects a request with bad settings
                                                    or images that can never fit (status 400)
    engine core  Scheduler                          lets a request wait until its vision states have room, tells the
                                                    workers whose states it uses, and ends one that failed there, alone
    worker       GPUModelRunner, of V2 or of V1     follows requests and batches, and reports failures

Each extension calls vLLM's method and changes nothing for requests that did not opt in.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from revisit.errors import RevisitError
from revisit.vllm.plan import Plan, make_plan
from revisit.vllm.request import KEY, admit, parse
from revisit.vllm.reservations import Reservations

log = logging.getLogger("vllm.revisit")  # below vLLM's own logger, which prints it
TESTED = ("0.31", "0.32")  # `make test-vllm-previous` and `make test-vllm`
GRANT = "revisit_grant"  # attribute of a request that a scheduler sends to the workers: see `Worker.add`
FAILED = "revisit_failed"  # attribute of a runner's output: ids of requests that must be ended
ENDED = "encoder_cache_mismatch_reqs"  # attribute of a scheduler: ids of requests that it ends with an error


def install() -> None:
    """Extend the API server and the engine core."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    if not vllm.__version__.startswith(TESTED):
        log.warning("ReVisiT's plug-in is tested with vLLM %s, not with %s.", " and ".join(TESTED), vllm.__version__)
    extend(InputProcessor, "__init__", wrap_start)
    extend(InputProcessor, "process_inputs", wrap_process_inputs)
    extend(Scheduler, "_handle_blocked_waiting_request", wrap_blocked_waiting)
    extend(Scheduler, "schedule", wrap_schedule)
    extend(Scheduler, "update_from_output", wrap_update_from_output)
    extend(Scheduler, "reset_prefix_cache", wrap_reset)


def follow_runner(v2: bool) -> None:
    """Extend the model runner; called when the model is built, in its process."""
    runner = import_module(f"vllm.v1.worker.{'gpu.' if v2 else 'gpu_'}model_runner").GPUModelRunner
    if v2:
        extend(runner, "add_requests", wrap_new_requests)
        extend(runner, "prepare_inputs", wrap_batches_v2)
    else:
        extend(runner, "_update_states", wrap_new_requests)
        extend(runner, "_prepare_inputs", wrap_batches_v1)
    extend(runner, "sample_tokens", wrap_sample_tokens)


def extend(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a class's method by `make(method)`, once."""
    method = getattr(owner, name)
    if not hasattr(method, "revisit"):
        extended: Any = functools.wraps(method)(make(method))
        extended.revisit = True
        setattr(owner, name, extended)


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
            method = admit(params.extra_args, plan_of(self))
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
    """Reserve a request's room in the pool until it ends; return whether it has it.

    Unless its vision states are stored already, it must not read the prefix cache, which would skip its images; nor after a
    preemption, when its own tokens may be in it. A request that cannot be parsed or can never fit passed the check on arrival
    by mistake: it is ended, and the engine goes on.
    """
    if KEY not in (getattr(request.sampling_params, "extra_args", None) or ()):
        return True
    name, plan, reservations = request.request_id, plan_of(scheduler), reservations_of(scheduler)
    try:
        if not hasattr(request, "revisit_need"):
            method = parse(request.sampling_params.extra_args, plan.model)
            request.revisit_need = None if method is None else plan.need(method, request)
    except Exception as error:
        log.error("ReVisiT ends request %s: %s", name, error)
        getattr(scheduler, ENDED).add(name)
        return False
    need = request.revisit_need
    if need is None:
        return True
    if need.blocks > reservations.blocks:
        getattr(scheduler, ENDED).add(name)
        return False
    if not reservations.take(name, need):
        return False
    request.skip_reading_prefix_cache |= reservations.owner(name) == name or request.num_preemptions > 0
    return True


def reservations_of(scheduler: Any) -> Reservations:
    """Return the reservations of a scheduler."""
    if "revisit_reservations" not in scheduler.__dict__:
        plan = plan_of(scheduler)
        scheduler.revisit_reservations = Reservations(plan.blocks, keep=plan.caching)
    reservations: Reservations = scheduler.revisit_reservations
    return reservations


def wrap_schedule(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Send the workers the grants of new requests."""

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        reservations = reservations_of(self)
        reservations.update(self.requests)
        output = schedule(self, *args, **kwargs)
        reservations.update(self.requests)
        for new in output.scheduled_new_reqs:
            owner = reservations.owner(new.req_id)
            if owner is not None:
                setattr(new, GRANT, (owner, reservations.take_dropped()))
        return output

    return scheduled


def wrap_update_from_output(update_from_output: Callable[..., Any]) -> Callable[..., Any]:
    """End requests that failed in the worker with vLLM's own error status."""

    def update(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        failed = getattr(model_runner_output, FAILED, ())
        if failed:
            getattr(self, ENDED).update(failed)
            reservations_of(self).invalidate(failed)
        return update_from_output(self, scheduler_output, model_runner_output, *args, **kwargs)

    return update


def wrap_reset(reset_prefix_cache: Callable[..., Any]) -> Callable[..., Any]:
    """Share no stored states any more when the prefix cache is reset, as after new weights."""

    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        reservations_of(self).invalidate()
        return reset_prefix_cache(self, *args, **kwargs)

    return reset


# -- worker -------------------------------------------------------------------------------------------------------


def worker_of(runner: Any) -> Any:
    """Return the `Worker` of a runner's model; None if the model is not ours or on an earlier pipeline stage."""
    model = runner.get_model() if getattr(runner, "model", None) is not None else None
    return getattr(model, "revisit", None)


def wrap_new_requests(update: Callable[..., Any]) -> Callable[..., Any]:
    """Remove ended requests, then add new ones."""

    def updated(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        worker = worker_of(self)
        if worker is not None:
            for name in scheduler_output.finished_req_ids:
                worker.remove(name)
            for new in scheduler_output.scheduled_new_reqs:
                worker.add(new.req_id, new.sampling_params, new.prompt_token_ids, getattr(new, GRANT, None))
        return update(self, scheduler_output, *args, **kwargs)

    return updated


def wrap_batches_v2(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the worker, before every forward, which positions of which requests it computes, by row of the batch."""

    def prepare(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare_inputs(self, scheduler_output, *args, **kwargs)
        positions = (batch.num_computed_tokens_np, batch.num_scheduled_tokens)
        begin(self, scheduler_output, batch.req_ids, *positions, batch.input_ids)
        return batch

    return prepare


def wrap_batches_v1(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Do the same in the V1 runner, which keeps its batch."""

    def prepare(self: Any, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_inputs(self, scheduler_output, num_scheduled_tokens, *args, **kwargs)
        batch, rows = self.input_batch, slice(self.input_batch.num_reqs)
        positions = (batch.num_computed_tokens_cpu[rows], num_scheduled_tokens[rows])
        begin(self, scheduler_output, batch.req_ids[rows], *positions, self.input_ids.gpu)
        return result

    return prepare


def begin(runner: Any, scheduler_output: Any, names: Any, firsts: Any, counts: Any, inputs: Any) -> None:
    """Begin a step of the runner's worker; see `Worker.begin`."""
    worker = worker_of(runner)
    if worker is not None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        worker.begin(names, firsts, counts, [len(drafts.get(name, ())) for name in names], inputs)


def wrap_sample_tokens(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Attach the requests that failed in this step to the runner's output."""

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        worker = worker_of(self)
        failed = worker.take_failed() if worker is not None else ()
        if failed:
            # Asynchronous outputs wrap the object that will be sent.
            names = ("_model_runner_output", "model_runner_output")
            held = next((found for name in names if (found := getattr(output, name, None)) is not None), output)
            setattr(held, FAILED, failed)
        return output

    return sample
