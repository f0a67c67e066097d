"""Vision states are kept once, whatever shares them, and seen by hooks even in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
import revisit
from revisit import ReVisiT
from revisit.taps import states
from revisit.taps.states import Capture

METHOD = ReVisiT(alpha=1e-3, layers="all")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def two_pictures() -> Any:
    return families.inputs("llava", ["hi", "what is it?"], [[families.picture(0)], [families.picture(1)]])


def test_static_cache() -> None:
    model, _ = families.build("llava")
    inputs = two_pictures()
    expected = revisit.generate(model, **inputs, method=METHOD, **OPTIONS)
    assert torch.equal(
        expected, revisit.generate(model, **inputs, method=METHOD, cache_implementation="static", **OPTIONS)
    )


def test_states_are_kept_once_and_shared_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Capture] = []
    make = Capture.__init__

    def spy(self: Capture, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(Capture, "__init__", spy)
    model, _ = families.build("llava")
    revisit.generate(model, **two_pictures(), method=METHOD, num_beams=4, **OPTIONS)
    (capture,) = seen
    assert capture.store is not None
    assert len(capture.items) == 2  # two items, eight rows
    states, mask = capture.padded()
    assert states.untyped_storage().data_ptr() == capture.store.untyped_storage().data_ptr()
    assert states.untyped_storage().nbytes() == 4 * states.numel()  # no position of the prompt beyond these
    assert bool(mask.all())
    for number, item in enumerate(capture.items):
        assert torch.equal(item.stacked(), states[number])
        assert {x.untyped_storage().data_ptr() for x in item.by_layer.values()} == {states.untyped_storage().data_ptr()}


def test_a_compiled_prefill_runs_as_written() -> None:
    """Code compiled before the hooks were there would not call them."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    run = torch.compile(lambda x: module(x), backend="eager")
    run(torch.ones(1, 2))
    calls: list[int] = []
    handle = module[0].register_forward_hook(lambda *_: calls.append(1))
    run(torch.ones(1, 2))
    unseen = len(calls)
    states._FORCE_EAGER.begin()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 1
    states._FORCE_EAGER.begin()  # a second decode in another thread begins before the first has its prefill
    states._FORCE_EAGER.end()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 2
    states._FORCE_EAGER.end()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    handle.remove()
