"""The adapter for vLLM's V2 model runner, the default on GPUs, whose requests live in slots.

Written against the interfaces of 0.32 and tested against them; it has not been run on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from revisit.integrations.vllm import check_model, check_version
from revisit.integrations.vllm.request import admit, parse
from revisit.integrations.vllm.states import RequestStates
from revisit.integrations.vllm.tap import Layout, Row, Tap, tap_of


class Slots:
    """The opted-in requests of one worker, by slot."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.states: dict[int, RequestStates] = {}
        self._slot_of: dict[str, int] = {}

    def add(self, slot: int, request: str, params: Any, prompt_ids: list[int] | None) -> None:
        """A request enters (or re-enters, after a preemption: then its prefill is computed again)."""
        self.states.pop(slot, None)
        method = None if params is None else parse(params.extra_args)
        if method is not None:
            self.states[slot] = self.tap.open(method, prompt_ids or [])
            self._slot_of[request] = slot
        self.tap.listening = bool(self.states)

    def remove(self, request: str) -> None:
        """A request ended or was preempted: its states go with it."""
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self.states.pop(slot, None)
        self.tap.listening = bool(self.states)


@functools.cache
def following(base: type | None) -> type:
    """A model-state class that tells the tap about requests and about the layout of every batch."""
    if base is None:
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState as base  # type: ignore[no-redef]

    class Following(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, model, *args, **kwargs)
            model.revisit_tap.slots = self.revisit_slots = Slots(model.revisit_tap)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            self.revisit_slots.add(
                req_index, new_req_data.req_id, new_req_data.sampling_params, new_req_data.prompt_token_ids
            )

        def remove_request(self, req_id: str) -> None:
            self.revisit_slots.remove(req_id)
            super().remove_request(req_id)

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            if self.revisit_slots.states:
                self.revisit_slots.tap.layout = Layout(
                    input_batch.query_start_loc_np.tolist(), input_batch.num_computed_tokens_np.tolist()
                )
            return super().prepare_inputs(input_batch, req_states)

    return Following


class V2(LogitsProcessor):
    """`--logits-processors revisit.integrations.vllm:V2`, with REVISIT_VLLM=1 in the environment."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        check_version()
        check_model(vllm_config)
        self.tap = tap_of(vllm_config)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        admit(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return parse(sampling_params.extra_args) is not None

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        slots = self.tap.slots
        if slots is None or not slots.states:
            return logits
        batch_of = {int(slot): number for number, slot in enumerate(ctx.idx_mapping_np)}
        rows = [
            Row(number, batch_of[slot], slots.states[slot], position)
            for number, (slot, position) in enumerate(
                zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)
            )
            if slot in slots.states
        ]
        return self.tap.refine(logits, rows)
