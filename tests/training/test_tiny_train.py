"""A short run of the whole recipe, and stages that resume to the same state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.tiny.data import Mixture, Writer
from training.tiny.model import SLOTS, Shape
from training.tiny.train import STAGES, Recipe, Stage, Trainer, train

SHORT = Recipe(
    shape=Shape(text_width=64, text_layers=2, text_inner=64, vision_width=64, vision_layers=1, vision_inner=64),
    mixture=Mixture(scenes=48),
    vision=Stage(4, 8, 1e-3),
    language=Stage(4, 4, 1e-3),
    projector=Stage(4, 6, 1e-3),
    tune=Stage(4, 4, 1e-4),
    first_steps=2,
    tokenizer_scenes=1500,
)


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert list(train(SHORT, folder, folder / "model", every=2)) == list(STAGES)
    return folder


def test_the_recipe_gives_a_model_that_loads(whole: Path) -> None:
    from revisit import load

    model, processor = load(whole / "model")
    assert model.dtype == torch.float32
    stored = load_file(whole / "model" / "model.safetensors")
    assert {value.dtype for name, value in stored.items() if "embed_tokens" in name} == {torch.float16}
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert processor.tokenizer.padding_side == "left"
    logged = [json.loads(line) for line in (whole / "model" / "training.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in logged] == [(stage, 4) for stage in STAGES]
    assert json.loads((whole / "model" / "recipe.json").read_text())["mixture"]["scenes"] == 48


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_ends_in_the_same_state(whole: Path, tmp_path: Path, stage: str) -> None:
    (tmp_path / "tokenizer").symlink_to(whole / "tokenizer")
    (tmp_path / "images").symlink_to(whole / "images")
    for done in STAGES[: STAGES.index(stage)]:
        (tmp_path / f"{done}.safetensors").symlink_to(whole / f"{done}.safetensors")

    def kill(name: str, step: int, total: int, loss: float) -> None:
        if step == 3:  # a checkpoint exists for step 2
            raise Killed

    with pytest.raises(Killed):
        list(train(SHORT, tmp_path, stages=(stage,), progress=kill, every=2))
    assert json.loads((tmp_path / f"{stage}.json").read_text())["step"] == 2
    list(train(SHORT, tmp_path, stages=(stage,), every=2))
    expected, found = (load_file(f / f"{stage}.safetensors") for f in (whole, tmp_path))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[k], found[k]) for k in expected)


def test_sequences_contain_the_scene_in_words(whole: Path) -> None:
    from revisit.embedded.scenes import patches
    from training.tiny.data import training_scene

    tokenizer = Trainer(SHORT, whole).tokenizer()
    writer = Writer(tokenizer, replace(SHORT.mixture, noise=0.0), 0)
    batch = writer.batch([3, 4], "key")
    for row, index in enumerate((3, 4)):
        written = tokenizer.decode(batch.ids[row][batch.slot[row]]).split()
        assert written == patches(training_scene(writer.mixture, 0, index))[0]
        assert int(batch.slot[row].sum()) == SLOTS
    assert bool((batch.weight[batch.slot] > 0).all())  # every position is predicted, the slots too
    assert float(batch.weight[~batch.mask].sum()) == 0
