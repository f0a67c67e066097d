"""vLLM's V2 model runner, the default on GPUs: how a `Worker` follows its requests and batches.

Written against the interfaces of 0.32 and tested against them; it has not been run on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from revisit.integrations.vllm import check_model, check_version
from revisit.integrations.vllm.hooks import extend, wrap_sample_tokens


@functools.cache
def following(base: type | None) -> type:
    """A model-state class that passes requests and batches on to the model's `Worker`."""
    if base is None:
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState as base  # type: ignore[no-redef]

    class Following(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, model, *args, **kwargs)
            self.revisit = model.revisit  # None on earlier pipeline stages
            follow_v2()

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            if self.revisit is not None:
                self.revisit.add(new_req_data.req_id, new_req_data.sampling_params, new_req_data.prompt_token_ids)

        def remove_request(self, req_id: str) -> None:
            if self.revisit is not None:
                self.revisit.remove(req_id)
            super().remove_request(req_id)

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            if self.revisit is not None:
                self.revisit.begin(
                    input_batch.req_ids, input_batch.num_computed_tokens_np, input_batch.num_scheduled_tokens
                )
            return super().prepare_inputs(input_batch, req_states)

    return Following


def follow_v2() -> None:
    """Extend the runner; called when it has made its model state."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    extend(GPUModelRunner, "sample_tokens", wrap_sample_tokens)


class V2(LogitsProcessor):
    """`--logits-processors revisit.integrations.vllm:V2`: refuses models at start-up; changes no logits."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        check_version()
        check_model(vllm_config)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        return logits
