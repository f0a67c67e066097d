"""The local engine on a tiny random model: batches do not change answers, and fingerprints follow the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import families
from revisit import ReVisiT
from revisit.decoding import decode
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.local import LocalEngine
from revisit.eval.engines.ray import RayWorker
from revisit.eval.log import Answer
from revisit.methods.greedy import Greedy
from revisit.models import identity
from revisit.models.identity import fingerprint


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(str(model_folder))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    path = tmp_path_factory.mktemp("images")
    for i in range(4):
        families.image(i).save(path / f"{i}.png")
    questions = [Item(f"q{i}", "What is this?" + " Look." * i, (path / f"{i}.png",)) for i in range(4)]
    return [*questions, Item("text", "No image here.")]


def answers(
    engine: LocalEngine, method: object, decoding: Decoding, batches: list[list[Item]], seed: int = 0
) -> dict[str, Answer]:
    return {answer.id: answer for batch in engine.stream(method, decoding, seed, batches) for answer in batch}


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(max_new_tokens=12),
        Decoding(max_new_tokens=12, temperature=0.8, top_p=0.9),
        Decoding(max_new_tokens=8, num_beams=2),
    ],
    ids=["greedy", "sampled", "beams"],
)
@pytest.mark.parametrize("method", [Greedy(), ReVisiT(alpha=0.01)], ids=["plain", "revisit"])
def test_an_answer_does_not_depend_on_its_batch(
    engine: LocalEngine, items: list[Item], method: object, decoding: Decoding
) -> None:
    together = answers(engine, method, decoding, [items])
    alone = answers(engine, method, decoding, [[item] for item in reversed(items)])
    assert together.keys() == alone.keys()
    for id, answer in together.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.text == alone[id].text
        assert answer.counters == alone[id].counters
        assert 0 < len(answer.tokens) <= decoding.max_new_tokens


def test_counters_count_what_the_method_did(engine: LocalEngine, items: list[Item]) -> None:
    found = answers(engine, ReVisiT(alpha=0.01), Decoding(max_new_tokens=6), [items])
    assert found["q0"].counters["applied"] > 0
    assert found["q0"].counters["vision_tokens"] == 16
    assert found["text"].counters["applied"] == 0
    assert found["text"].counters["steps"] == len(found["text"].tokens)


def test_sampling_follows_the_seed_and_the_distribution(engine: LocalEngine, items: list[Item]) -> None:
    decoding = Decoding(max_new_tokens=12, temperature=1.5)
    one = answers(engine, Greedy(), decoding, [items[:1]])["q0"]
    other = answers(engine, Greedy(), decoding, [items[:1]], seed=5)["q0"]
    greedy = answers(engine, Greedy(), Decoding(max_new_tokens=12), [items[:1]])["q0"]
    assert len({one.tokens, other.tokens, greedy.tokens}) == 3


def test_the_fingerprint_covers_every_file_that_matters(model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    before = fingerprint(copy)
    assert before == fingerprint(model_folder)
    (copy / "README.md").write_text("notes")
    assert fingerprint(copy) == before
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vision_feature_layer": -1}))
    changed = fingerprint(copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert len({before, changed, fingerprint(copy)}) == 3


def test_a_cached_hub_snapshot_is_identified_by_the_names_of_its_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (blobs / ("a" * 64)).write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(blobs / ("a" * 64))
    monkeypatch.setattr(identity, "file_digest", lambda path: pytest.fail("read a file whose hash is its name"))
    assert len(fingerprint(snapshot)) == 64


def test_a_ray_worker_with_another_device_or_dtype_raises(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec is made on the machine of the command, which may have no GPU while the workers have some."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert RayWorker(str(model_folder), {}, ("cpu", "float32")).ready()
    with pytest.raises(RevisitError, match="loaded on cpu in float32, not on cuda in bfloat16: use --device-map"):
        RayWorker(str(model_folder), {}, ("cuda", "bfloat16")).ready()


def test_running_out_of_memory_advises_a_smaller_batch(
    engine: LocalEngine, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(decode, "generate", fail)
    with pytest.raises(RevisitError, match="smaller --batch-size than 4"):
        answers(engine, Greedy(), Decoding(max_new_tokens=4), [items[:4]])


def test_an_unknown_model_raises() -> None:
    with pytest.raises(RevisitError, match="There is no model 'nobody/nothing'"):
        identity.model_folder("nobody/nothing")
