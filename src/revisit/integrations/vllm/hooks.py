"""Where the plug-in meets vLLM's own classes: the few methods that are extended, in the process where each of them runs.

    API server   InputProcessor.process_inputs          a request whose images can never fit is refused (a 400)
    engine core  Scheduler._handle_blocked_waiting_request  a request waits until its vision states have room
                 Scheduler.update_from_output           a request that failed in the worker is ended, alone
    worker       see `v1` and `v2`                      requests and batches are followed, failures reported

Each extension calls vLLM's method and changes nothing for requests that did not opt in. `check_version` refuses other
versions of vLLM than the one these methods were read in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from revisit.errors import RevisitError
from revisit.integrations.vllm.plan import Plan, Reservations, make_plan
from revisit.integrations.vllm.request import KEY, admit, parse

FAILED = "revisit_failed"  # attribute of a runner's output: ids of requests that must be ended


def extend(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(method)` in the place of a class's method, once."""
    method = getattr(owner, name)
    if not hasattr(method, "revisit"):
        extended = functools.wraps(method)(make(method))
        extended.revisit = True  # type: ignore[attr-defined]
        setattr(owner, name, extended)


def install() -> None:
    """Extend what the API server and the engine core run."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    extend(InputProcessor, "process_inputs", wrap_process_inputs)
    extend(Scheduler, "_handle_blocked_waiting_request", wrap_blocked_waiting)
    extend(Scheduler, "update_from_output", wrap_update_from_output)


def plan_of(owner: Any) -> Plan:
    """The plan of the configuration that one of vLLM's objects was made with."""
    if "revisit_plan" not in owner.__dict__:
        owner.revisit_plan = make_plan(owner.vllm_config)
    plan: Plan = owner.revisit_plan
    return plan


def wrap_process_inputs(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Requests with bad settings, or that could never be held, are refused where they are admitted: a 400."""

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


def wrap_blocked_waiting(handle_blocked: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler that passes over a request, without holding up those behind it, until there is room for its vision states."""

    def ready(self: Any, request: Any) -> bool:
        return bool(handle_blocked(self, request)) and reserve(self, request)

    return ready


def reserve(scheduler: Any, request: Any) -> bool:
    """Whether a request has its blocks of the pool, which are then its own until it has ended."""
    need, name = needed(scheduler, request), request.request_id
    if not need:
        return True
    if "revisit_reservations" not in scheduler.__dict__:
        scheduler.revisit_reservations = Reservations(plan_of(scheduler).blocks)
    reservations: Reservations = scheduler.revisit_reservations
    if need > reservations.blocks:  # was not refused where it came from, and must not wait for ever
        scheduler.grammar_compile_error_reqs.add(name)
        return False
    reservations.forget(scheduler.requests)
    return reservations.take(name, need)


def needed(scheduler: Any, request: Any) -> int:
    """How many blocks of the pool a request needs; 0 if it did not opt in."""
    params = request.sampling_params
    if params is None or KEY not in (params.extra_args or ()):
        return 0
    if not hasattr(request, "revisit_blocks"):
        method = parse(params.extra_args, plan_of(scheduler).model)
        prompt = request.prompt_token_ids or []
        request.revisit_blocks = 0 if method is None else plan_of(scheduler).blocks_of(method, prompt)
    return int(request.revisit_blocks)


def wrap_update_from_output(update_from_output: Callable[..., Any]) -> Callable[..., Any]:
    """Requests that failed in the worker are ended with vLLM's own error status."""

    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.grammar_compile_error_reqs.update(getattr(model_runner_output, FAILED, ()))
        return update_from_output(self, scheduler_output, model_runner_output)

    return update


def wrap_sample_tokens(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """A runner whose output names the requests that failed in this step."""

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(self, *args, **kwargs)
        worker = worker_of(self)
        failed = worker.take_failed() if worker is not None else ()
        if failed:
            # Outputs that are still on their way to the host hold the object that will be sent.
            held = (
                getattr(output, "_model_runner_output", None) or getattr(output, "model_runner_output", None) or output
            )
            setattr(held, FAILED, failed)
        return output

    return sample


def worker_of(runner: Any) -> Any:
    """The `Worker` of a runner's model, None if the model is not ours or on an earlier pipeline stage."""
    model = runner.get_model() if getattr(runner, "model", None) is not None else None
    return getattr(model, "revisit", None)
