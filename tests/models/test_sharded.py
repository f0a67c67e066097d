"""Models with sharded heads: tensor parallel, FSDP2, and DeepSpeed's empty weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import families
import revisit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch.distributed


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensor_parallel(model: Any) -> None:
    """Split the rows of the head over the processes, as `tp_plan="auto"` does."""
    parallelize_module(model.lm_head, init_device_mesh("cpu", (1,)), ColwiseParallel(output_layouts=Replicate()))


def fsdp(model: Any) -> None:
    """Shard every decoder layer, the head, and the rest."""
    for part in (*model.get_decoder().layers, model.lm_head, model):
        fully_shard(part)
    register_fsdp_forward_method(model, "generate")


def empty(model: Any) -> None:
    """Keep the head's weight elsewhere while it does not run, as DeepSpeed's ZeRO-3 does."""
    head, weight = model.lm_head, model.lm_head.weight.detach().clone()
    head.weight = nn.Parameter(torch.empty(0))
    head.register_forward_pre_hook(lambda *_: setattr(head.weight, "data", weight))
    head.register_forward_hook(lambda *_: setattr(head.weight, "data", torch.empty(0)))


@pytest.mark.parametrize("shard", [tensor_parallel, fsdp, empty])
def test_a_sharded_model_writes_the_same_tokens(shard: Callable[[Any], None]) -> None:
    model, _ = families.build("llava")
    sharded = copy.deepcopy(model)
    shard(sharded)
    inputs = families.inputs("llava", ["what is it?"], [[families.image(0)]])
    assert type(sharded.lm_head.weight) is not nn.Parameter or not sharded.lm_head.weight.numel()
    for method in (revisit.ReVisiT(alpha=1e-3, layers="all"), "dola", "deco", "vista", "memvr"):
        plain, got = (
            revisit.generate(m, **inputs, method=method, max_new_tokens=6, do_sample=False) for m in (model, sharded)
        )
        assert torch.equal(plain, got), method
