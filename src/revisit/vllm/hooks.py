"""Extensions of vLLM's own methods, by the process in which each runs.

    API server   InputProcessor                     checks the model at start, and rejects a request with bad settings
                                                    or images that can never fit (status 400)
    engine core  Scheduler                          makes a request wait until its vision states have room, tells the
                                                    workers whose states it uses, and ends one that failed there, alone
    worker       GPUModelRunner, of V2 or of V1     follows requests and batches, and reports failures

Each extension is called with vLLM's method, which it calls, and changes nothing for requests that did not opt in.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from revisit.errors import RevisitError
from revisit.models.facts import vision_tokens
from revisit.vllm.plan import POOL_SWITCH, make_plan
from revisit.vllm.promise import Promise
from revisit.vllm.request import KEY, LAYERS_SWITCH, RISK, parse, read
from revisit.vllm.reservations import Reservations

log = logging.getLogger("vllm.revisit")  # below vLLM's own logger, which prints it
TESTED = ("0.31", "0.32")  # `make test-vllm-previous` and `make test-vllm`
GRANTS = "revisit_grants"  # attribute of what a scheduler sends to the workers: owners by request, and dropped owners
FAILED = "revisit_failed"  # attribute of a runner's output: ids of requests that must be ended
IMAGE_SIZE = (448, 448)  # pixels of the image for which the startup log states how many requests have room
ENDED = "encoder_cache_mismatch_reqs"  # attribute of a scheduler: ids of requests that it ends with an error


def install() -> None:
    """Extend the API server and the engine core."""
    import vllm
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    if not vllm.__version__.startswith(TESTED):
        log.warning("ReVisiT's plug-in is tested with vLLM %s, not with %s.", " and ".join(TESTED), vllm.__version__)
    extend(InputProcessor, "__init__", start_processor)
    extend(InputProcessor, "process_inputs", process_inputs)
    for request in (ChatCompletionRequest, CompletionRequest):
        extend(request, "to_beam_search_params", to_beam_search_params)
    extend(Scheduler, "_handle_blocked_waiting_request", handle_waiting)
    extend(Scheduler, "schedule", schedule)
    extend(Scheduler, "update_from_output", update_from_output)
    extend(Scheduler, "reset_prefix_cache", reset_prefix_cache)


def follow_runner(v2: bool) -> None:
    """Extend the model runner; called when the model is built, in its process."""
    runner = import_module(f"vllm.v1.worker.{'gpu.' if v2 else 'gpu_'}model_runner").GPUModelRunner
    if v2:
        extend(runner, "add_requests", update_requests)
        extend(runner, "prepare_inputs", prepare_v2)
    else:
        extend(runner, "_update_states", update_requests)
        extend(runner, "_prepare_inputs", prepare_v1)
    extend(runner, "sample_tokens", sample_tokens)


def extend(owner: type, name: str, extension: Callable[..., Any]) -> None:
    """Replace a class's method by `extension(method, self, …)`, once."""
    method = getattr(owner, name)
    if not hasattr(method, "revisit"):

        @functools.wraps(method)
        def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
            return extension(method, self, *args, **kwargs)

        extended.revisit = True  # type: ignore[attr-defined]
        setattr(owner, name, extended)


# -- API server ---------------------------------------------------------------------------------------------------


def start_processor(original: Any, processor: Any, /, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Raise for unsupported models when the server starts, and log what is stored."""
    original(processor, vllm_config, *args, **kwargs)
    processor.revisit_plan = plan = make_plan(vllm_config)
    processor.revisit_promise = Promise(vllm_config.model_config, plan)
    log.info(plan.summary)
    try:
        tokens = image_tokens(vllm_config.model_config)
    except RevisitError:  # a prompt of this model needs more than an image
        return
    images = plan.images(tokens)
    log.info(
        "%s have room at a time with an image of %d × %d pixels (%d vision tokens) each.",
        requests(images),
        *IMAGE_SIZE,
        tokens,
    )
    if 4 * images < plan.most_rows:
        log.warning(
            "At most %s of the %d that the server decodes at a time can use ReVisiT: set a larger %s, or fewer layers with %s.",
            requests(images),
            plan.most_rows,
            POOL_SWITCH,
            LAYERS_SWITCH,
        )


def requests(count: int) -> str:
    return f"{count:,} request{'s' * (count != 1)}"


def image_tokens(model: Any) -> int:
    """Count the vision tokens of an image of `IMAGE_SIZE`."""
    from vllm.transformers_utils.processor import cached_processor_from_config

    return vision_tokens(cached_processor_from_config(model), model.hf_config, IMAGE_SIZE)


def process_inputs(
    original: Any, processor: Any, /, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Reject requests with bad settings, or that can never fit, on arrival (status 400)."""
    from vllm.exceptions import VLLMValidationError

    if not getattr(params, "extra_args", None):
        return original(processor, request_id, prompt, params, *args, **kwargs)
    plan = processor.revisit_plan
    try:
        asked = read(params.extra_args) or {}
        method = None if RISK in asked else plan.admit(params.extra_args)
        request = original(processor, request_id, prompt, params, *args, **kwargs)
        if RISK in asked:
            method = processor.revisit_promise.settle(asked, request)
            settled = {KEY: {"method": method.name, **method.settings()}}
            request.sampling_params.extra_args = {**params.extra_args, **settled}
            plan.admit(settled)
        if method is not None:
            plan.need(method, request)
    except RevisitError as error:
        raise VLLMValidationError(str(error)) from error
    return request


def to_beam_search_params(original: Any, request: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Reject beam search with ReVisiT (status 400): vLLM would drop the request's extra arguments, and decode it plainly."""
    from vllm.exceptions import VLLMValidationError

    if KEY in (request.vllm_xargs or ()):
        raise VLLMValidationError(
            'revisit: vLLM\'s beam search has no such argument; leave out use_beam_search or "revisit".'
        )
    return original(request, *args, **kwargs)


# -- engine core --------------------------------------------------------------------------------------------------


def reservations_of(scheduler: Any) -> Reservations:
    """Return the reservations of a scheduler, created at the first call."""
    if not hasattr(scheduler, "revisit_reservations"):
        scheduler.revisit_plan = plan = make_plan(scheduler.vllm_config)
        scheduler.revisit_reservations = Reservations(plan.blocks, keep=plan.caching)
    reservations: Reservations = scheduler.revisit_reservations
    return reservations


def handle_waiting(original: Any, scheduler: Any, /, request: Any, *args: Any, **kwargs: Any) -> bool:
    """Skip a request, without blocking those behind it, until there is room for its vision states."""
    return bool(original(scheduler, request, *args, **kwargs)) and reserve(scheduler, request)


def reserve(scheduler: Any, request: Any) -> bool:
    """Reserve room in the pool for a request until it ends, and return whether there was room.

    A request whose vision states are not stored yet must not read the prefix cache, which would skip its images. The same holds
    after a preemption, when its own tokens may be cached. A request that passed the check on arrival by mistake is ended, and
    the engine goes on.
    """
    if KEY not in (getattr(request.sampling_params, "extra_args", None) or ()):
        return True
    name, reservations, plan = request.request_id, reservations_of(scheduler), scheduler.revisit_plan
    try:
        if not hasattr(request, "revisit_need"):
            method = parse(request.sampling_params.extra_args, plan.model)
            request.revisit_need = None if method is None else plan.need(method, request)
    except Exception as error:
        log.error("ReVisiT ends request %s: %s", name, error)
        getattr(scheduler, ENDED).add(name)
        return False
    if request.revisit_need is None:
        return True
    if not reservations.take(name, request.revisit_need):
        return False
    request.skip_reading_prefix_cache |= reservations.owner(name) == name or request.num_preemptions > 0
    return True


def schedule(original: Any, scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Send the workers the owners of the states of requests that begin, or begin again."""
    reservations = reservations_of(scheduler)
    reservations.update(scheduler.requests, scheduler.finished_req_ids)
    output = original(scheduler, *args, **kwargs)
    reservations.update(scheduler.requests, output.finished_req_ids)  # with those that ended in this call
    names = [*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids]
    owners = {name: owner for name in names if (owner := reservations.owner(name)) is not None}
    if owners:
        setattr(output, GRANTS, (owners, reservations.take_dropped()))
    return output


def update_from_output(
    original: Any, scheduler: Any, /, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """End requests that failed in the worker with vLLM's own error status."""
    failed = getattr(model_runner_output, FAILED, ())
    getattr(scheduler, ENDED).update(failed)
    reservations_of(scheduler).invalidate(failed)
    return original(scheduler, scheduler_output, model_runner_output, *args, **kwargs)


def reset_prefix_cache(
    original: Any, scheduler: Any, /, reset_running_requests: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Stop sharing stored states when the prefix cache is reset, for example after an update of the weights.

    If running requests begin again, because the weights or the memory have changed, they compute their states again too.
    """
    reservations = reservations_of(scheduler)
    if reset_running_requests:
        reservations.forget()
    else:
        reservations.invalidate()
    return original(scheduler, reset_running_requests, *args, **kwargs)


# -- worker -------------------------------------------------------------------------------------------------------


def worker_of(runner: Any) -> Any:
    """Return the `Worker` of a runner's model; None for other models and on earlier pipeline stages."""
    model = runner.get_model() if getattr(runner, "model", None) is not None else None
    return getattr(model, "revisit", None)


def update_requests(original: Any, runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Remove ended requests, then add new ones."""
    worker = worker_of(runner)
    if worker is not None:
        for name in scheduler_output.finished_req_ids:
            worker.remove(name)
        owners, dropped = getattr(scheduler_output, GRANTS, ({}, ()))
        worker.drop(dropped)
        for new in scheduler_output.scheduled_new_reqs:
            worker.add(new.req_id, new.sampling_params, new.prompt_token_ids, owners.pop(new.req_id, None))
        for name, owner in owners.items():
            worker.resume(name, owner)
    return original(runner, scheduler_output, *args, **kwargs)


def prepare_v2(original: Any, runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a step of the worker before every forward, with the batch that the V2 runner has prepared."""
    batch = original(runner, scheduler_output, *args, **kwargs)
    positions = (batch.num_computed_tokens_np, batch.num_scheduled_tokens)
    begin(runner, scheduler_output, batch.req_ids, *positions, batch.input_ids)
    return batch


def prepare_v1(
    original: Any, runner: Any, /, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    """Begin a step of the worker before every forward, with the batch that the V1 runner keeps."""
    result = original(runner, scheduler_output, num_scheduled_tokens, *args, **kwargs)
    batch, rows = runner.input_batch, slice(runner.input_batch.num_reqs)
    positions = (batch.num_computed_tokens_cpu[rows], num_scheduled_tokens[rows])
    begin(runner, scheduler_output, batch.req_ids[rows], *positions, runner.input_ids.gpu)
    return result


def begin(runner: Any, scheduler_output: Any, names: Any, firsts: Any, counts: Any, inputs: Any) -> None:
    """Begin a step of the runner's worker; see `Worker.begin`."""
    worker = worker_of(runner)
    if worker is not None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        worker.begin(names, firsts, counts, [len(drafts.get(name, ())) for name in names], inputs)


def sample_tokens(original: Any, runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Attach the requests that failed in this step to the runner's output."""
    output = original(runner, *args, **kwargs)
    worker = worker_of(runner)
    failed = worker.take_failed() if worker is not None else ()
    if failed:
        # Asynchronous outputs wrap the object that will be sent.
        names = ("_model_runner_output", "model_runner_output")
        sent = next((inner for name in names if (inner := getattr(output, name, None)) is not None), output)
        setattr(sent, FAILED, failed)
    return output
