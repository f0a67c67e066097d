"""Every bad model folder is one sentence, and none runs code."""

from __future__ import annotations

import shutil
from pathlib import Path

import hostile_checkpoints as hostile
import pytest

import families
import revisit
from revisit import ReVisiT, RevisitError
from revisit.models.prompts import answers

SAMPLE = (
    "config truncated",
    "a tensor missing",
    "nan",
    "index names a pickle",
    "template that raises",
    "settings unknown",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that loads."""
    return families.save("llava", tmp_path_factory.mktemp("whole"))


def use(folder: Path) -> str:
    """What every command does with a model: load it, take its recommendation, ask it something."""
    model, processor = revisit.load(folder)
    method = ReVisiT.recommended(model)
    inputs = revisit.prepare(processor, ["what?"], [[families.picture(0)]])
    return answers(processor, revisit.generate(model, **inputs, method=method, max_new_tokens=3), inputs)[0]


def refused(name: str, whole: Path, folder: Path) -> str:
    """The one sentence that refuses a folder damaged in this way."""
    shutil.copytree(whole, folder)
    hostile.REFUSED[name](folder)
    with pytest.raises(RevisitError) as caught:
        use(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence, sentence
    assert len(sentence) < 700, sentence
    assert not (folder / hostile.BREACH).exists()
    return sentence


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_bad_folders_is_refused_in_one_sentence(name: str, whole: Path, tmp_path: Path) -> None:
    refused(name, whole, tmp_path / "model")


@pytest.mark.faults
@pytest.mark.parametrize("name", [name for name in hostile.REFUSED if name not in SAMPLE])
def test_a_bad_folder_is_refused_in_one_sentence(name: str, whole: Path, tmp_path: Path) -> None:
    refused(name, whole, tmp_path / "model")


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_code_that_comes_with_a_checkpoint_is_not_run(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    hostile.HARMLESS[name](folder)
    assert use(folder) == use(whole)
    assert not list(folder.rglob(hostile.BREACH))


def test_incomplete_weights_are_loaded_when_asked(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    hostile.REFUSED["a tensor missing"](folder)
    model, _ = revisit.load(folder, allow_incomplete=True)
    assert model.get_decoder().layers[0].mlp.up_proj.weight.isfinite().all()
