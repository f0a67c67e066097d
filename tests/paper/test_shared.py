"""Many settings from one prefill: the same tokens as each setting alone."""

from __future__ import annotations

from typing import Any

import pytest

import families
import revisit
from revisit import ReVisiT, Trace
from revisit.methods.greedy import Greedy
from revisit.paper.shared import SharedPrefill, shares

METHODS = [
    Greedy(),
    ReVisiT(alpha=1e-2),
    ReVisiT(alpha=1e-2, layers="all"),
    ReVisiT(alpha=1e-1, layers="all", norm="final"),
    ReVisiT(alpha=1e-3, select="max"),
    ReVisiT(vocabulary="full", layers="low"),
    ReVisiT(alpha=1e-2, layers="all"),  # after others: nothing of them is left in the cache
]
SHARING = ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl", "idefics3"]


def options(inputs: Any) -> dict[str, Any]:
    return {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("family", SHARING)
def test_every_method_decodes_as_it_would_alone(family: str) -> None:
    model, _ = families.build(family)
    pictures = [[families.picture(i, size)] for i, size in enumerate([(40, 32), (28, 60)])]
    inputs = families.inputs(family, ["what is it?", "describe the image"], pictures)
    prefill = SharedPrefill(model, inputs, METHODS)
    assert prefill.usable
    tower_runs = []
    tower = next(m for n, m in model.named_modules() if n.endswith(("vision_tower", "visual", "vision_model")))
    for method in METHODS:
        alone = revisit.generate(model, **inputs, method=method, **options(inputs))
        handle = tower.register_forward_hook(lambda *_: tower_runs.append(1))
        trace = Trace()
        shared = revisit.generate(
            model, **prefill.inputs, method=method, trace=trace, **prefill.arguments(method), **options(inputs)
        )
        handle.remove()
        assert shared.tolist() == alone.tolist(), method
        assert (trace.summary()["applied"] > 0) == isinstance(method, ReVisiT)
    assert tower_runs == []


def test_only_methods_that_leave_the_prefill_alone_share_it() -> None:
    from revisit.methods.dola import DoLa

    assert shares(Greedy())
    assert shares(ReVisiT())
    assert not shares(DoLa())


def test_a_cache_that_cannot_be_cut_back_is_not_shared() -> None:
    model, _ = families.build("gemma3")  # sliding-window layers
    inputs = families.inputs("gemma3", ["a"], [[families.picture(0)]])
    assert not SharedPrefill(model, inputs, METHODS).usable
