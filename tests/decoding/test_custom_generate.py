"""The `custom_generate` folder for transformers and the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

import families
from revisit.decoding.generate import generate
from revisit.methods.revisit import ReVisiT

HUB = Path(__file__).parents[2] / "hub"


@pytest.mark.parametrize(("method", "same"), [("revisit:alpha=1e-3", ReVisiT(alpha=1e-3)), ("greedy", "greedy")])
def test_the_hub_folder_decodes_like_the_library(method: str, same: ReVisiT | str) -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is this?"], [[families.image(1)]])
    options = {"max_new_tokens": 8, "do_sample": False}
    loaded = model.generate(**inputs, custom_generate=str(HUB), trust_remote_code=True, method=method, **options)
    assert loaded.tolist() == generate(model, **inputs, method=same, **options).tolist()
