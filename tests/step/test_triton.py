"""The Triton step equals the reference in Triton's interpreter. Run by `make test-triton`."""

from __future__ import annotations

import math
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import random_cases
import torch
from random_cases import batch, reference_scores

import revisit
from revisit.errors import RevisitError
from revisit.models.head import LinearHead
from revisit.step import choice
from revisit.step.batched import BatchedStep
from revisit.step.choice import choose, refine_logits
from revisit.step.interface import RowStates, StepInput
from revisit.step.rule import Rule
from revisit.vllm.head import ShardedHead
from revisit.vllm.pool import Pool

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by make test-triton, with TRITON_INTERPRET=1", allow_module_level=True)

from revisit.step import triton as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, about inf and NaN
SMALL = kernels.Tiles(16, warps=4, width=16, stages=1, tokens=16, vocabulary=64, projections=2, projected=16)
LARGE = kernels.Tiles(16, warps=4, width=16, stages=1, tokens=512, vocabulary=2048, projections=2, projected=512)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WORKS", {})


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_steps_match_the_reference(first: int) -> None:
    """Shapes, dtypes, settings, ties, NaN, empty rows and beams; `random_cases.py --backend triton` runs more of them."""
    counts, differences = random_cases.run(range(first, first + 20), "triton")
    assert not differences
    assert counts["equal"] > 4


def sets(
    sizes: list[int], vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[torch.Tensor], LinearHead]:
    """Return logits with plausible sets of these sizes at random tokens, states of each row, and a head."""
    logits = torch.full((len(sizes), vocabulary), -100.0)
    for row, size in enumerate(sizes):
        logits[row, torch.randperm(vocabulary, generator=generator)[:size]] = torch.rand(size, generator=generator) * 5
    states = [torch.randn(4, 16, generator=generator) for _ in sizes]
    return logits, states, LinearHead(torch.randn(vocabulary, 16, generator=generator))


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [([1, 2, 15, 16, 17, 33, 65], SMALL), ([1, 511, 513, 1025, 5000], LARGE), ([63, 65], None)],
    ids=["small", "large", "usual"],
)
def test_plausible_sets_of_any_size(sizes: list[int], tiles: kernels.Tiles | None) -> None:
    """Sets below, at and above the sizes of tiles, in one batch."""
    logits, states, head = sets(sizes, max(sizes) + 100, torch.Generator().manual_seed(0))
    rule = Rule(neighbors=2, weight="agreement")
    step, scores = kernels.TritonStep(head, rule), torch.empty_like(logits)
    output = step.launch(logits, RowStates.of_items(states), scores, tiles)
    assert output.sizes.tolist() == sizes
    assert output.applied.tolist() == [size > 1 for size in sizes]
    torch.testing.assert_close(scores, reference_scores(logits, states, head, rule), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("copied", [1 << 28, 0], ids=["fits", "too large"])
def test_the_rows_of_a_split_head_are_summed_over_ranks_once(copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have the halves of the vocabulary; the second row has no image, and one has one plausible token."""
    logits, states, head = sets([40, 5, 1, 70], 200, torch.Generator().manual_seed(0))
    states[1] = states[1][:0]
    rule, summed = Rule(neighbors=2, weight="agreement", once=0.5), []

    def sum_over_ranks(rows: torch.Tensor) -> torch.Tensor:
        summed.append(rows.shape)
        return rows + rest.rows(rest.weight, summed_ids[-1])

    class Half(ShardedHead):
        def rows(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            summed_ids.append(ids)
            return super().rows(values, ids)

    summed_ids: list[torch.Tensor] = []
    rest = ShardedHead(head.weight[100:], start=100, sum_over_ranks=lambda rows: rows)
    half = Half(head.weight[:100].contiguous(), sum_over_ranks=sum_over_ranks)
    written, rows = logits.topk(3).indices, RowStates.of_items(states)
    want = reference_scores(logits, states, head, rule, written)
    step = choose(half, rule, logits.device, "triton")
    assert isinstance(step, kernels.TritonStep)
    monkeypatch.setattr(kernels, "COPIED", copied)
    scores = step.take(StepInput(logits, rows, written=written)).scores
    torch.testing.assert_close(scores, want, atol=2e-5, rtol=2e-5)
    assert summed == ([(40 + 1 + 70, 16)] if copied else [(4, 70, 16)])
    got = logits.repeat(2, 1)
    step.take_in_place(StepInput(got, rows, written=written), torch.arange(4), math.inf)
    assert torch.equal(got[4:], logits)
    torch.testing.assert_close(got[:4], want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 129, 300])
def test_written_tokens_are_found_in_sets_of_any_size(length: int) -> None:
    """The first and the last plausible token, tokens between plausible ones, none (-1), and each of them several times."""
    generator = torch.Generator().manual_seed(length)
    logits, states, head = sets([1, 2, 3, 31, 64, 200], 300, generator)
    written, rule = torch.randint(-1, 300, (len(logits), length), generator=generator), Rule(once=0.6)
    for row, plausible in enumerate(logits > -100):
        tokens = plausible.nonzero()
        written[row, ::40] = tokens.min() if row % 2 else tokens.max()
    want = reference_scores(logits, states, head, rule, written)
    scores = torch.empty_like(logits)
    kernels.TritonStep(head, rule).launch(logits, RowStates.of_items(states), scores, SMALL, written=written)
    torch.testing.assert_close(scores, want, atol=2e-5, rtol=2e-5)


def test_equal_divergences_go_to_the_first_state() -> None:
    """Equal beyond float32, in one tile and in different ones; the second set of states differs by more than 1e-6."""
    head = LinearHead(torch.eye(4))
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    near = torch.tensor([1.0, 0.4, 0.0, -0.5])
    for far, same in ((0, 1), (3, 40), (20, 21)):
        states = torch.zeros(50, 4)
        states[far:] = near
        states[same] = near + 1e-5  # adding a number to all logits changes no distribution
        step = kernels.TritonStep(head, Rule(neighbors=3))
        output = step.launch(logits, RowStates.of_items([states]), logits.clone(), SMALL)
        assert int(output.states[0]) == far
        assert step.buffers["chosen"][:3].tolist() == [far, far + 1, far + 2]


def pooled(states: list[torch.Tensor], size: int) -> RowStates:
    """Put the states of each item into blocks of a pool, taken in turns, with NaN everywhere else."""
    pool = Pool(sum(-(-len(item) // size) for item in states) + 5, size, states[0].shape[1], states[0].dtype, "cpu")
    pool.states.fill_(math.nan)
    owned: list[list[int]] = [[] for _ in states]
    for turn in range(max(-(-len(item) // size) for item in states)):
        for numbers, item in zip(owned, states, strict=True):
            if part := item[turn * size : (turn + 1) * size].tolist():
                (block,) = pool.take(1)
                numbers.append(int(block))
                pool.states[block, : len(part)] = torch.tensor(part)
    return pool.rows([np.array(numbers, dtype=np.int64) for numbers in owned], [len(item) for item in states])


@pytest.mark.parametrize(
    "rule", [Rule(), Rule(select="max", normalize=False), Rule(neighbors=3, weight="both")], ids=str
)
def test_pooled_blocks_match_padded_states(rule: Rule) -> None:
    """Blocks of four states in any order; the second row has no image. Some rows of the logits are replaced in place."""
    logits, states, head = batch(items=4)
    states[1] = states[1][:0]
    want = reference_scores(logits, states, head, rule)
    table = pooled(states, 4)
    rows = torch.tensor([5, 0, 2, 3])
    larger = torch.randn(6, 300)
    larger[rows] = logits
    before = larger.clone()
    step = kernels.TritonStep(head, rule)
    output = step.launch(larger, table, larger, SMALL, rows=rows, gap=1e5)
    assert output.applied.tolist() == [True, False, True, True]
    for row, at in enumerate(rows.tolist()):
        outside = want[row] == -math.inf
        torch.testing.assert_close(larger[at, ~outside], want[row, ~outside], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(larger[at, outside], before[at, outside] - 1e5)
    assert torch.equal(larger[[1, 4]], before[[1, 4]])


class Bytes:
    """Count the bytes that interpreted kernels load and store, by the tensors they belong to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **tensors: torch.Tensor) -> None:
        self.tensors, self.counts = tensors, dict.fromkeys([*tensors, "other"], 0)
        from triton.runtime.interpreter import interpreter_builder

        for name, mask in (("create_masked_load", 1), ("create_masked_store", 2)):
            plain = getattr(interpreter_builder, name)

            def counting(*args: Any, plain: Any = plain, mask: int = mask) -> Any:
                self.add(args[0].data[args[mask].data], args[0].get_element_ty().primitive_bitwidth // 8)
                return plain(*args)

            monkeypatch.setattr(interpreter_builder, name, counting)

    def add(self, addresses: np.ndarray, size: int) -> None:
        rest = addresses.size
        for name, tensor in self.tensors.items():
            start = tensor.data_ptr()
            inside = int(((addresses >= start) & (addresses < start + tensor.nbytes)).sum())
            self.counts[name] += inside * max(1, size)
            rest -= inside
        self.counts["other"] += rest * max(1, size)


def test_rows_that_need_nothing_do_not_read_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch(items=4)
    states[0] = states[0][:0]
    logits[1, 7] = 500  # one plausible token
    ended = torch.tensor([False, False, True, False])
    table, scores = RowStates.of_items(states), torch.empty_like(logits)
    rows = {f"row{row}": table.states[row] for row in range(4)}
    counted = Bytes(monkeypatch, **rows)
    output = kernels.TritonStep(head, Rule()).launch(logits, table, scores, SMALL, ended=ended)
    assert [name for name in rows if counted.counts[name]] == ["row3"]
    assert output.applied.tolist() == [False, False, False, True]
    assert output.sizes.tolist()[:3] == [0, 1, 0]
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])
    assert scores[1].isfinite().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("rule", [Rule(), Rule(weight="agreement", neighbors=2)], ids=["paper", "adaptive"])
def test_a_step_moves_the_bytes_that_the_roofline_counts(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are read from memory once, and what is neither states, logits nor head is small."""
    from perf.roofline import traffic

    generator = torch.Generator().manual_seed(0)
    rows, vocabulary, count, width, candidates = 2, 300, 40, 48, 11
    logits = torch.full((rows, vocabulary), -100.0)
    for row in range(rows):
        logits[row, torch.randperm(vocabulary, generator=generator)[:candidates]] = torch.rand(candidates)
    states = torch.randn(rows, count, width, generator=generator)
    head, scores = LinearHead(torch.randn(vocabulary, width, generator=generator)), torch.empty_like(logits)
    table = RowStates.of_items(list(states))
    tiles = kernels.Tiles(16, warps=4, width=16, stages=1, tokens=16, vocabulary=64, projected=4)
    counted = Bytes(monkeypatch, logits=logits, scores=scores, states=table.states, head=head.weight)
    kernels.TritonStep(head, rule).launch(logits, table, scores, tiles)
    want = traffic(rows, vocabulary, count, width, candidates, rule, tiles, 4)
    assert counted.counts["states"] == want.states + want.states_again
    assert counted.counts["head"] == want.head + want.head_again
    assert counted.counts["logits"] + counted.counts["scores"] == want.logits
    assert counted.counts["other"] == pytest.approx(want.other, rel=0.1)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, states, head = batch()
    whole = kernels.TritonStep(head, Rule()).take(StepInput(logits, RowStates.of_items(states)))
    for row, item in enumerate(states):
        alone = kernels.TritonStep(head, Rule()).take(StepInput(logits[row : row + 1], RowStates.of_items([item])))
        assert torch.equal(alone.scores[0], whole.scores[row])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_is_seven_kernels_and_the_host_reads_no_value(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch(items=rows)
    step, padded = kernels.TritonStep(head, Rule(weight="agreement", neighbors=2)), RowStates.of_items(states)
    want = step.take(StepInput(logits, padded))
    launched: list[str] = []
    monkeypatch.setattr(kernels.Launch, "run", lambda launch: launched.append(launch.kernel.__name__))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host read a value"))
    output = step.take(StepInput(logits, padded))
    assert launched == ["maxima", "count", "pack", "compare", "select", "project", "fuse"]
    assert output.scores.shape == want.scores.shape
    launched.clear()
    written = torch.zeros(rows, 5, dtype=torch.long)
    kernels.TritonStep(head, Rule(once=1.0)).launch(logits, padded, logits.clone(), written=written)
    assert launched == ["maxima", "count", "pack", "mark", "compare", "select", "project", "fuse"]


# -- first use and choice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["wrong", "fails"])
def test_torch_is_chosen_if_the_kernels_fail_their_check(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, head = batch()
    run = kernels.Launch.run

    def wrong(launch: Any) -> None:
        if broken == "fails":
            raise RuntimeError("no such instruction")
        run(launch)
        if launch.kernel is kernels.project:
            launch.arguments["log_q"].mul_(0.5)

    monkeypatch.setattr(kernels.Launch, "run", wrong)
    reason = "the scores of small tiles differ" if broken == "wrong" else "no such instruction"
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    on_cpu(monkeypatch)
    with pytest.warns(UserWarning, match=rf"(?s)a GPU with triton 3.*{reason}"):
        assert isinstance(choose(head, Rule(), gpu), BatchedStep)
    assert isinstance(choose(head, Rule(), gpu), BatchedStep)  # no second warning
    with pytest.raises(RevisitError, match="triton"):
        choose(head, Rule(), gpu, "triton")


def test_running_out_of_memory_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, head = batch()
    on_cpu(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.Launch, "run", mock.Mock(side_effect=torch.OutOfMemoryError))
        assert isinstance(choose(head, Rule(), torch.device("cuda")), BatchedStep)
    assert isinstance(choose(head, Rule(), torch.device("cuda")), kernels.TritonStep)


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the kernels on the CPU, in Triton's interpreter, where a CUDA device is asked for."""
    check = kernels.find_problem
    monkeypatch.setattr(kernels, "find_problem", lambda *arguments: check(*arguments[:3], torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_variant_passes_its_check(dtype: torch.dtype) -> None:
    rules = (Rule(), Rule(select="max", normalize=False), Rule(weight="both", neighbors=3), Rule(once=1.0))
    for rule in rules:
        assert kernels.find_problem(300, dtype, rule, torch.device("cpu")) is None


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, head = batch()
    on_cpu(monkeypatch)
    gpu = torch.device("cuda")
    assert choose(head, Rule(), gpu).name == "triton"
    assert choose(head, Rule(weight="both", neighbors=9, normalize=False, select="max"), gpu).name == "triton"
    for rare in ({"divergence": "kl"}, {"select": "soft"}, {"fusion": "interpolation"}, {"precision": "model"}):
        assert choose(head, Rule(**rare), gpu).name == "reference"
    assert choose(LinearHead(head.weight, torch.zeros(300)), Rule(), gpu).name == "torch"
    assert choose(head, Rule(), torch.device("cpu")).name != "triton"
    monkeypatch.setenv("REVISIT_KERNEL", "0")
    assert choose(head, Rule(), gpu).name == "torch"
    assert choice.without_triton(gpu) == "turned off by REVISIT_KERNEL"


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "it needs compute capability 8.0"), ((8, 0), None)])
def test_older_gpus_use_torch(capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choice.without_triton(torch.device("cuda")) == reason


def test_doctor_names_the_step_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.cli.doctor import machine_rows

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "in Triton" in dict(machine_rows())["ReVisiT's step on GPUs"]
    monkeypatch.setenv("REVISIT_KERNEL", "0")
    assert "REVISIT_KERNEL" in dict(machine_rows())["ReVisiT's step on GPUs"]


def test_a_function_for_other_loops() -> None:
    logits, states, head = batch(items=1)
    got = refine_logits(states, head, logits, implementation="triton")
    torch.testing.assert_close(got, reference_scores(logits, states, head, Rule()), atol=1e-5, rtol=1e-5)


# -- whole decodes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("items", "beams"), [(2, 1), (1, 2)])
def test_the_embedded_model_decodes_the_same_tokens(items: int, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padded states, and on the same logits with the states in a pool of blocks, as in vLLM."""
    from PIL import Image

    from revisit.models.prompts import prepare

    model, processor = revisit.load("tiny")
    images = [[Image.linear_gradient("L").rotate(90 * number).convert("RGB")] for number in range(items)]
    inputs = prepare(processor, ["What is in the image?"] * items, images, device=model.device)
    options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": beams, "do_sample": False}
    want = revisit.generate(model, **inputs, **options)
    taken = []

    class Both(kernels.TritonStep):
        def take(self, inputs: StepInput) -> Any:
            output = super().take(inputs)
            logits, states, _, ended, written = inputs
            items = [states.row(row) for row in range(len(logits))]
            table = pooled(items, 32)
            in_place = logits.clone()
            kernels.TritonStep(self.head, self.rule).launch(in_place, table, in_place, gap=1e5, written=written)
            active = torch.ones(len(logits), dtype=torch.bool) if ended is None else ~ended
            assert torch.equal(in_place.argmax(-1)[active], output.scores.argmax(-1)[active])
            taken.append(int(output.applied.sum()))
            return output

    monkeypatch.setattr("revisit.methods.revisit.choose", lambda head, rule, *_: Both(head, rule))
    got = revisit.generate(model, **inputs, **options)
    assert torch.equal(got, want)
    assert sum(taken) >= 3
