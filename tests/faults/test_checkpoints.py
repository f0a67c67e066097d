"""Bad model folders raise one sentence, and none of their code runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import hostile_checkpoints as hostile
import pytest

import families
import revisit
from revisit import ReVisiT, RevisitError
from revisit.models.outputs import generated_text

# The other folders are tested by `make test-faults` only.
SAMPLE = {
    "config truncated",
    "a tensor missing",
    "nan",
    "index names a pickle",
    "template that raises",
    "settings unknown",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a folder that loads."""
    return families.save("llava", tmp_path_factory.mktemp("whole"))


def use(folder: Path) -> str:
    """Use a model as every command does: load it, take its recommended settings, decode an answer."""
    model, processor = revisit.load(folder)
    method = ReVisiT.recommended(model)
    inputs = revisit.prepare(processor, ["what?"], [[families.image(0)]])
    return generated_text(processor, revisit.generate(model, **inputs, method=method, max_new_tokens=3), inputs)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.faults) for name in hostile.REJECTED]
)
def test_bad_folders_raise_one_sentence(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    hostile.REJECTED[name](folder)
    with pytest.raises(RevisitError) as caught:
        use(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence, sentence
    assert len(sentence) < 700, sentence
    assert not (folder / hostile.BREACH).exists()


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_code_in_a_checkpoint_does_not_run(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    hostile.HARMLESS[name](folder)
    assert use(folder) == use(whole)
    assert not list(folder.rglob(hostile.BREACH))


def test_incomplete_weights_load_if_allowed(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    hostile.REJECTED["a tensor missing"](folder)
    model, _ = revisit.load(folder, allow_incomplete=True)
    assert model.get_decoder().layers[0].mlp.up_proj.weight.isfinite().all()
