"""Device calls of one step of many opted-in vLLM requests. Run by `make test-device`."""

from __future__ import annotations

from types import SimpleNamespace

import fake_cuda
import pytest
import torch

from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import Plan
from revisit.vllm.worker import Worker

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(fake_cuda.unavailable() is not None, reason=str(fake_cuda.unavailable())),
]
IMAGE, WIDTH, VOCABULARY, DEPTH = 9, 256, 1000, 3


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    fake_cuda.load()


class Server:
    """Requests with images of different sizes, and the states and logits of their steps, on one device."""

    def __init__(self, requests: int, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        weight = (torch.randn(VOCABULARY, WIDTH, generator=self.generator) * 0.75).to(device)
        described = SimpleNamespace(config=SimpleNamespace(model_type="llava"))
        plan = Plan((IMAGE,), DEPTH, False, WIDTH, torch.float32, 400, 128, described)
        self.worker = Worker(plan, device, lambda: ShardedHead(weight))
        self.weight = weight
        self.prompts = {str(i): [1, *[IMAGE] * (100 + 7 * i), 2] for i in range(requests)}
        for name, prompt in self.prompts.items():
            self.worker.add(name, SimpleNamespace(extra_args={"revisit": 1}), prompt)
        self.step([0] * requests, [len(prompt) for prompt in self.prompts.values()])

    def step(self, firsts: list[int], counts: list[int], drafts: int = 0) -> torch.Tensor:
        """Take one step of all requests, with as many candidates of each, and return its logits."""
        hidden = torch.randn(sum(counts), WIDTH, generator=self.generator).to(self.device)
        ends = torch.tensor(counts).cumsum(0)[:, None] - 1 + torch.arange(-drafts, 1)
        sampled = hidden[ends.flatten().to(self.device)]
        logits = sampled @ self.weight.T
        with fake_cuda.Log() as self.log:
            self.worker.begin(list(self.prompts), firsts, counts, [drafts] * len(counts))
            self.worker.observe(hidden, [])
            return self.worker.refine(logits, sampled)

    def decode(self, number: int, drafts: int = 0) -> torch.Tensor:
        firsts = [len(prompt) + number for prompt in self.prompts.values()]
        return self.step(firsts, [1 + drafts] * len(self.prompts), drafts)


@pytest.mark.parametrize(("requests", "drafts"), [(8, 0), (64, 0), (8, 3)])
def test_a_step_of_many_requests_is_few_kernels_and_one_wait(requests: int, drafts: int) -> None:
    there, here = Server(requests, "cuda:0"), Server(requests, "cpu")
    for number in range(3):
        got = there.decode(number, drafts)
        assert there.log.kernels <= 80, there.log.places("kernel")
        assert there.log.waits <= 1, there.log.places("wait")
        torch.testing.assert_close(got.cpu(), here.decode(number, drafts), rtol=1e-4, atol=1e-4)
    name = next(iter(there.prompts))
    there.worker.remove(name)
    del there.prompts[name]
    there.decode(3, drafts)  # the batch has changed, so its block table is sent again
    assert there.log.kernels <= 80
    assert there.log.waits <= 2
    assert not there.worker.take_failed()
