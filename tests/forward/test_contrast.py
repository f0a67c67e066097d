"""Merging the inputs of several branches into one batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import families
import revisit
from revisit import M3ID, Trace
from revisit.forward.contrast import merge
from revisit.forward.states import saved_positions


def part(length: int, rows: int = 2, **more: Any) -> dict[str, Any]:
    ids = torch.full((rows, 1), length)
    cache = SimpleNamespace(get_seq_length=lambda: length)
    return {
        "input_ids": ids,
        "position_ids": ids.expand(3, rows, 1),
        "past_key_values": cache,
        "use_cache": True,
        **more,
    }


def test_shorter_rows_are_masked_on_the_left() -> None:
    merged = merge([part(5), part(3)], [0, 2])
    assert merged is not None
    assert merged["input_ids"].flatten().tolist() == [5, 5, 3, 3]
    assert merged["position_ids"].shape == (3, 4, 1)
    assert merged["position_ids"][0].flatten().tolist() == [5, 5, 3, 3]
    assert merged["attention_mask"].tolist() == [[1] * 6] * 2 + [[0, 0, 1, 1, 1, 1]] * 2
    assert merged["use_cache"] is True
    own = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])  # a mask of the caller is kept
    merged = merge([part(3, attention_mask=own), part(5)], [2, 0])
    assert merged is not None
    assert merged["attention_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1] * 6, [1] * 6]
    merged = merge([part(4), part(4)], [0, 0])
    assert merged is not None
    assert merged.get("attention_mask") is None  # equal lengths need none


def test_inputs_that_do_not_match_are_not_merged() -> None:
    four = torch.zeros(2, 1, 1, 4)
    assert merge([part(3, attention_mask=four), part(3, attention_mask=four)], [0, 0]) is None
    assert merge([part(3, extra=torch.zeros(7)), part(3)], [0, 0]) is None
    assert merge([part(3, flag=1), part(3, flag=2)], [0, 0]) is None


def test_position_state_is_restored() -> None:
    model, _ = families.build("qwen2_5_vl")
    kept = model.model.rope_deltas
    with saved_positions(model):
        model.model.rope_deltas = torch.ones(3)
    assert model.model.rope_deltas is kept


def test_sliding_windows_stack_only_at_equal_lengths() -> None:
    """Gemma 3 has sliding-window layers, where a branch with a shorter prompt runs on its own."""
    model, processor = families.build("gemma3")
    inputs = families.inputs("gemma3", ["what is it"], [[families.image(1)]])
    rows: list[int] = []
    hook = model.register_forward_hook(lambda _module, _args, output: rows.append(len(output.logits)))
    trace = Trace()
    method = M3ID(start=1, mode="stacked")
    revisit.generate(
        model, **inputs, method=method, processor=processor, trace=trace, max_new_tokens=3, do_sample=False
    )
    apart, rows[:] = list(rows), []
    revisit.generate(model, **inputs, method=revisit.VCD(mode="stacked"), max_new_tokens=3, do_sample=False)
    hook.remove()
    assert apart == [1] * 6
    assert rows == [1, 1, 2, 2]
    assert trace.summary()["applied"] > 0


def test_a_single_row_on_a_cpu_runs_its_branches_in_turn() -> None:
    model, _ = families.build("llava")
    rows: list[int] = []
    hook = model.register_forward_hook(lambda _module, _args, output: rows.append(len(output.logits)))
    seen = {}
    for count in (1, 2):
        inputs = families.inputs("llava", ["what"] * count, [[families.image(i)] for i in range(count)])
        revisit.generate(model, **inputs, method=revisit.VCD(), max_new_tokens=2, do_sample=False)
        seen[count], rows[:] = list(rows), []
    hook.remove()
    assert seen == {1: [1, 1, 1, 1], 2: [2, 2, 4]}
