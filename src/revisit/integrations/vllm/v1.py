"""vLLM's V1 model runner: how a `Worker` follows its requests and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from revisit.integrations.vllm import check_model, check_version
from revisit.integrations.vllm.hooks import extend, worker_of, wrap_sample_tokens


def follow_v1() -> None:
    """Extend the runner; called when the model is made, in the process that runs it."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    extend(GPUModelRunner, "_update_states", following_requests)
    extend(GPUModelRunner, "_prepare_inputs", following_batches)
    extend(GPUModelRunner, "sample_tokens", wrap_sample_tokens)


def following_requests(update_states: Callable[..., Any]) -> Callable[..., Any]:
    """Ended requests give their blocks back before new ones take theirs."""

    def update(self: Any, scheduler_output: Any) -> Any:
        worker = worker_of(self)
        if worker is not None:
            for name in scheduler_output.finished_req_ids:
                worker.remove(name)
            for new in scheduler_output.scheduled_new_reqs:
                worker.add(new.req_id, new.sampling_params, new.prompt_token_ids)
        return update_states(self, scheduler_output)

    return update


def following_batches(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Before every forward: which positions of which requests it computes, in the order of the batch's rows."""

    def prepare(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = prepare_inputs(self, scheduler_output, num_scheduled_tokens)
        worker = worker_of(self)
        if worker is not None:
            batch = self.input_batch
            count = batch.num_reqs
            worker.begin(batch.req_ids[:count], batch.num_computed_tokens_cpu[:count], num_scheduled_tokens[:count])
        return result

    return prepare


class V1(LogitsProcessor):
    """`--logits-processors revisit.integrations.vllm:V1`: refuses models at start-up; changes no logits."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        check_version()
        check_model(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        return None

    def apply(self, logits: Tensor) -> Tensor:
        return logits
