"""The batched step, step after step of one run: room for the candidates follows the sizes of the plausible sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revisit.models.head import Projection
from revisit.step.batched import Step, find_candidates, finish, refine
from revisit.step.rule import Rule
from revisit.step.states import StateBlocks

CAPACITIES: tuple[int, ...] = (*(size << power for power in range(4, 12) for size in (2, 3)), 8192)  # 32, 48, 64, 96, …


def host_sync_is_cheap(device: torch.device) -> bool:
    """Whether values can be read without stopping a queue of work: true of the CPU only."""
    return device.type == "cpu"


class HostCopy:
    """Numbers copied asynchronously from the device to the host, before later kernels are queued."""

    def __init__(self, values: Tensor) -> None:
        self.event: Any = None
        self.values = values
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> Any:
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()


class BatchedStep:
    """Takes the steps of one run, with a capacity that follows the sizes of the plausible sets."""

    def __init__(self, blocks: StateBlocks, head: Projection, rule: Rule) -> None:
        self.blocks, self.head, self.rule = blocks, head, rule
        self.expected = 0.0  # plausible tokens that the next step should have room for; 0 before the first step

    def capacity(self) -> int | None:
        """Places for candidates in the next step; None where the size of the largest set is read first."""
        if not self.expected or self.rule.full_vocabulary:
            return None
        return next((capacity for capacity in CAPACITIES if capacity > self.expected), None)

    @torch.no_grad()
    def __call__(self, logits: Tensor, uniform: float | Tensor = 0.0, ended: Tensor | None = None) -> Step:
        """One step of all rows; on a GPU the host waits once, for sizes that were copied before most of the work."""
        if host_sync_is_cheap(logits.device):
            return refine(logits, self.blocks, self.head, self.rule, uniform=uniform, ended=ended)
        capacity = self.capacity()
        candidates = find_candidates(logits, self.rule, capacity, ended)
        sizes = HostCopy(candidates.sizes)
        step = finish(logits, candidates, self.blocks, self.head, self.rule, uniform)
        largest = max(sizes.read())
        if capacity is not None and largest > capacity:  # rare, and the host knows by now how large the sets are
            step = refine(logits, self.blocks, self.head, self.rule, uniform=uniform, capacity=largest, ended=ended)
        self.expected = max(1.5 * largest, 0.9 * self.expected)
        return step
