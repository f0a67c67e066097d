"""Facts about a model without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import families
from revisit.errors import RevisitError
from revisit.models.facts import model_facts
from revisit.models.families import resolve_layers


def test_facts_of_the_embedded_model() -> None:
    facts = model_facts("tiny")
    assert facts.vision_tokens == 64
    assert facts.recommended == {"alpha": 1e-5, "layers": "last", "weight": "agreement", "neighbors": 8}
    assert facts.layers["last"] == (facts.depth,)
    assert facts.state_bytes("last") == 64 * facts.width * 4
    assert facts.problems == ()


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl", "internvl", "idefics3"])
@pytest.mark.parametrize("size", [(40, 32), (90, 30)])
def test_vision_tokens_are_those_of_a_prompt_and_no_weights_are_needed(
    family: str, size: tuple[int, int], tmp_path: Path
) -> None:
    folder = families.save(family, tmp_path)
    (folder / "model.safetensors").unlink()
    facts = model_facts(folder, image_size=size)
    model, _ = families.build(family)
    ids = families.inputs(family, ["x"], [[families.image(0, size)]])["input_ids"]
    assert facts.vision_tokens == int((ids == model.config.image_token_id).sum())
    assert facts.layers["all"] == resolve_layers("all", len(model.get_decoder().layers), facts.tied)
    assert facts.state_bytes("all") == facts.vision_tokens * 32 * 4 * len(facts.layers["all"])
    assert facts.recommended == {"layers": "all" if family.startswith("qwen") else "last"}


def test_a_text_model_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    facts = model_facts(tmp_path)
    assert facts.vision_tokens is None
    assert facts.state_bytes("last") is None
    assert "text-only model" in facts.problems[0]


def test_a_damaged_processor_is_a_problem(tmp_path: Path) -> None:
    folder = families.save("llava", tmp_path)
    (folder / "tokenizer.json").write_text("{")
    facts = model_facts(folder)
    assert facts.vision_tokens is None
    assert facts.depth == 4
    assert "processor" in facts.problems[0]


def test_sizes_are_checked() -> None:
    with pytest.raises(RevisitError, match="0×5"):
        model_facts("tiny", image_size=(0, 5))
