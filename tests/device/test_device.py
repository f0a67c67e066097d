"""Decoding on a test device that reports itself as CUDA: the CPU's tokens on one and two devices, and budgets for a step.

Run by `make test-device`, in a separate process: the device cannot be removed from torch.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import fake_cuda
import pytest
import torch

import families
import revisit
from revisit import methods
from revisit.models.head import LinearHead
from revisit.paper import latency
from revisit.step import batched
from revisit.step.interface import RowStates
from revisit.step.rule import Rule

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(fake_cuda.unavailable() is not None, reason=str(fake_cuda.unavailable())),
]
FAMILIES = ("llava", "qwen2_5_vl")
METHODS = [
    *("greedy", "plausible_only", "revisit", "dola", "deco", "vcd", "m3id", "icd", "sid", "avisc", "pai", "ritual"),
    *("flb", "middle_layers", "vaf", f"sadt:words=[{','.join('abcdefghijklmnopqrstuvwxyz0123456789!:;')}]"),
    *("vista", "memvr:threshold=0.8", "only", "opera:beams=2,candidates=2"),
    "code:description_tokens=8",
    "chain:methods=[vcd,revisit]",
]
NEW = 12


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    fake_cuda.load()


@functools.cache
def built(family: str) -> tuple[Any, Any]:
    """Return a model on the CPU, in float32, with its processor."""
    return revisit.load("tiny", device_map="cpu") if family == "embedded" else families.build(family)


@functools.cache
def inputs_of(family: str, items: int, images: int = 1) -> dict[str, Any]:
    prompts = [f"what is number {number}?" for number in range(items)]
    pictures = [[families.image(number + 7 * other) for other in range(images)] for number in range(items)]
    if family == "embedded":
        processor = built(family)[1]
        texts = [processor.image_token * images + prompt for prompt in prompts]
        return dict(processor(text=texts, images=pictures, padding=True, return_tensors="pt"))
    return dict(families.inputs(family, prompts, pictures))


def decode(model: Any, inputs: dict[str, Any], method: Any, new: int = NEW, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": new, "do_sample": False, **options}
    out: torch.Tensor = revisit.generate(model, **inputs, method=method, **options)
    return out.cpu()


def moved(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@functools.cache
def placed(family: str, where: str) -> Any:
    """Return the model on "one" device, or with half of its decoder "layers" or its vision "tower" on the second."""
    twin = copy.deepcopy(built(family)[0])
    if where == "one":
        return twin.to("cuda:0")
    from accelerate import dispatch_model

    text, depth = "model.language_model", len(twin.model.language_model.layers)
    parts = {
        f"{text}.layers.{layer}": f"cuda:{int(where == 'layers' and layer >= depth // 2)}" for layer in range(depth)
    }
    parts |= {f"{text}.{name}": "cuda:0" for name, _ in twin.model.language_model.named_children() if name != "layers"}
    others = [f"model.{name}" for name, _ in twin.model.named_children() if name != "language_model"]
    parts |= dict.fromkeys(others, "cuda:1" if where == "tower" else "cuda:0") | {"lm_head": "cuda:0"}
    return dispatch_model(twin, parts, force_hooks=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_cpus_tokens_on_one_device_and_on_two(family: str, name: str) -> None:
    model, processor = built(family)
    inputs = inputs_of(family, 2)
    method = methods.as_method(name, model)
    expected = decode(model, inputs, method, processor=processor)
    for where in ("one", "layers", "tower"):
        got = decode(placed(family, where), moved(inputs), method, processor=processor)
        assert torch.equal(got, expected), where


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"num_beams": 3}),
    ({"layers": "all"}, {"num_beams": 2, "num_return_sequences": 2}),
    ({}, {"do_sample": True, "num_return_sequences": 2, "top_k": 1}),
    ({"select": "soft"}, {}),
    ({"neighbors": 3, "weight": "agreement"}, {}),
    ({"select": "random", "divergence": "kl"}, {}),
    ({"fusion": "interpolation", "divergence": "cosine"}, {}),
    ({"vocabulary": "full"}, {}),
    ({"divergence": "official", "precision": "model", "normalize": False}, {}),
]


@pytest.mark.parametrize(("settings", "options"), SETTINGS, ids=str)
def test_every_setting_of_revisit_gives_the_cpus_tokens(settings: dict[str, Any], options: dict[str, Any]) -> None:
    inputs, method = inputs_of("qwen2_5_vl", 2), revisit.ReVisiT(**settings)
    expected = decode(built("qwen2_5_vl")[0], inputs, method, **options)
    for where in ("one", "layers"):
        assert torch.equal(decode(placed("qwen2_5_vl", where), moved(inputs), method, **options), expected), where


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["last", "all"])
def test_half_precision_gives_the_references_tokens(family: str, layers: str) -> None:
    """A recorded run uses the reference. Models round differently on the CPU, so both runs are on the device."""
    model, inputs, method = (
        copy.deepcopy(built(family)[0]).bfloat16().to("cuda:0"),
        moved(inputs_of(family, 2)),
        revisit.ReVisiT(layers=layers),
    )
    decoded = [decode(model, inputs, method, trace=revisit.Trace(record=record)) for record in (True, False)]
    assert torch.equal(*decoded)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect, for each step on the device, the bytes of the states, and the number of candidates times states."""
    seen: list[tuple[int, int]] = []
    compare = batched.compare

    def watched(candidates: Any, blocks: Any, head: Any, rule: Any) -> Any:
        if blocks.states.is_cuda:
            seen.append(
                (blocks.states.nbytes, candidates.ids.shape[1] * blocks.states.shape[0] * blocks.states.shape[1])
            )
        return compare(candidates, blocks, head, rule)

    monkeypatch.setattr(batched, "compare", watched)
    return seen


def later_steps(family: str, items: int, images: int, method: Any, **options: Any) -> tuple[float, float, float, Any]:
    """Return our kernels, waits and bytes in a step after the third, and the log of a whole run with the CPU's tokens."""
    device, inputs, logs = placed(family, "one"), moved(inputs_of(family, items, images)), []
    options = {"eos_token_id": None, **options}  # every row decodes to the end
    for new in (3, NEW):
        with fake_cuda.Log() as log:
            tokens = decode(device, inputs, method, new, **options)
        logs.append(log)
    assert torch.equal(tokens, decode(built(family)[0], inputs_of(family, items, images), method, **options))
    few, many = logs
    differences = (getattr(many, name) - getattr(few, name) for name in ("kernels", "waits", "bytes"))
    kernels, waits, moved_bytes = (difference / (NEW - 3) for difference in differences)
    return kernels, waits, moved_bytes, many


@pytest.mark.parametrize("family", [*FAMILIES, "embedded"])
@pytest.mark.parametrize("layers", ["last", "all", (0, 2, 4)])
def test_a_step_of_revisit_stays_within_its_budget(family: str, layers: Any, shapes: list[tuple[int, int]]) -> None:
    """Kernels do not depend on the batch, the host waits once, and the states are read once."""
    vocabulary = built(family)[0].config.get_text_config().vocab_size
    counts = []
    for items, images in ((8, 3), (1, 1), (8, 1), (32, 1)):
        shapes.clear()
        kernels, waits, moved_bytes, log = later_steps(family, items, images, revisit.ReVisiT(layers=layers))
        later = shapes[-(NEW - 3) :]  # a step that was taken again is among them twice
        states, compared = (sum(parts) / len(later) for parts in zip(*later, strict=True))
        budget = 2 * states + 8 * 4 * items * vocabulary + 160 * compared
        assert kernels <= 60, log.places("kernel").most_common(70)
        assert waits <= 1, log.places("wait")
        assert moved_bytes <= budget, (items, images, moved_bytes / budget)
        counts.append(kernels)
    assert max(counts[-2:]) <= 1.1 * min(counts[-2:])


def test_an_adaptive_weight_and_several_vision_tokens_stay_within_the_budget_of_kernels() -> None:
    """The embedded model's recommended settings; images of several sizes, a row without one, and one that has ended."""
    rule, generator, counts = Rule(weight="agreement", neighbors=8), torch.Generator().manual_seed(0), []
    head = LinearHead(torch.randn(500, 32, generator=generator).to("cuda:0"))
    for rows in (3, 8, 32):
        items = [torch.randn(0 if row == 1 else 20 + row % 3, 32, generator=generator) for row in range(rows)]
        states = RowStates.of_items([item.to("cuda:0") for item in items])
        logits = torch.randn(rows, 500, generator=generator).mul(4).to("cuda:0")
        ended = torch.arange(rows, device="cuda:0") == 2
        for _ in range(2):  # the first step makes the mask of the padding
            with fake_cuda.Log() as log:
                batched.refine_batch(logits, states, head, rule, capacity=64, ended=ended)
        assert log.waits == 0, log.places("wait")
        counts.append(log.kernels)
    assert max(counts) <= 59
    assert len(set(counts)) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("greedy", "dola", "vcd", "sid", "revisit", "flb", "middle_layers", "vaf", *METHODS[15:16]),
        *("vista", "memvr", "only", "opera"),
    ],
)
def test_no_method_waits_more_than_once_a_step(name: str) -> None:
    method = methods.as_method(name, built("llava")[0])
    _, waits, _, log = later_steps("llava", 8, 1, method, processor=built("llava")[1])
    assert waits <= 1, log.places("wait")


@pytest.mark.parametrize("options", [{"bad_words_ids": [[5], [6, 7]]}, {"min_new_tokens": 3}, {"suppress_tokens": [9]}])
def test_processors_that_ban_tokens_add_no_wait(options: dict[str, Any]) -> None:
    ended = {"eos_token_id": 2} if "min_new_tokens" in options else {}  # else there is no end to put off
    _, waits, _, log = later_steps("llava", 2, 1, revisit.ReVisiT(), **options, **ended)
    assert waits <= 1, log.places("wait")


class NaN(revisit.Method):
    """Returns NaN for the first row at every step."""

    name = "nan"

    def begin(self, prompt: Any, passes: Any) -> Any:
        return lambda _input_ids, logits: logits.index_fill(
            0, torch.zeros(1, dtype=torch.long, device=logits.device), torch.nan
        )


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0}], ids=str)
def test_nan_is_reported_when_the_call_ends_and_without_a_wait(options: dict[str, Any]) -> None:
    device, inputs = placed("llava", "one"), moved(inputs_of("llava", 2))
    with fake_cuda.Log() as log, pytest.raises(revisit.RevisitError, match="for row 0 of the batch"):
        decode(device, inputs, NaN(), eos_token_id=None, **options)
    places = log.places("wait")
    assert not any("recorder" in str(place) and count >= NEW for (_, place), count in places.items()), places


def test_the_bench_times_a_gpu_by_events_and_waits_for_none_of_them_before_the_end() -> None:
    chosen: dict[str, Any] = {"greedy": methods.get("greedy"), "revisit": revisit.ReVisiT()}
    with fake_cuda.Log() as log:
        timings = latency.measure(
            placed("llava", "one"), moved(inputs_of("llava", 4)), chosen, new_tokens=4, repeats=1, eos_token_id=None
        )
    rows = latency.table(timings)
    assert all(row["tokens_per_second"] > 100 for row in rows)  # a few milliseconds by the device's clock
    assert len(latency.bench_table(rows, "").rows) == 2
    assert {
        place.split(":")[0] for (name, place), _ in log.places("wait").items() if name == "synchronize" and place
    } == {"paper/latency.py"}
    assert sum(count for (name, _), count in log.places("wait").items() if name == "synchronize") == 2 * 4  # calls


def test_the_device_raises_where_a_gpu_would_and_logs_waits() -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)
    with fake_cuda.Log() as log:
        (here * 2).sum().item()
        torch.nonzero(here)
        torch.zeros(3).copy_(here, non_blocking=True)
    kinds = [event.kind for event in log.events]
    assert kinds.count("wait") == 2
    assert kinds.count("asynchronous copy") == 1
    assert [event.name for event in log.events if event.kind == "kernel"][:2] == ["aten::mul", "aten::sum"]
