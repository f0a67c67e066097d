"""Training of `photo` on a few small images, with random models in the place of the pretrained ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

pytest.importorskip("gguf", reason="needs the extra photo")
pytest.importorskip("onnx", reason="needs the extra photo")
sys.path.insert(0, str(Path(__file__).parents[1] / "embedded"))

import language_files
import tower_files

from revisit.errors import RevisitError
from revisit.eval.benchmarks import chair, pope
from revisit.eval.benchmarks.base import Scores
from revisit.models.photo import read_language
from revisit.words import CATEGORIES
from training.fitting import Stage
from training.photo import benchmark, data, study, texts
from training.photo.rows import UNTRAINED, Writer
from training.photo.train import LOGGED, OWN, STAGES, Recipe, Sources, hidden_states, train
from training.texts import Turn

SHORT = Recipe(
    photos=6,
    captioned=4,
    validation=3,
    first_layer=1,
    rank=2,
    words=Stage(4, 2, 1e-2),
    projector=Stage(3, 2, 2e-3),
    adapter=Stage(4, 2, 1e-2),
)
CAPTIONS = ["A dog runs across a green field today.", "Two people stand next to a large car."]


pytestmark = pytest.mark.usefixtures("nltk_data")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "train2017").mkdir()
    dice = np.random.default_rng(3)
    ids = list(range(1, 15))
    for photo in ids:
        pixels = Image.fromarray(dice.integers(0, 255, (20, 24, 3), np.uint8))
        pixels.save(folder / "train2017" / f"{photo:012}.jpg")
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*name, "commit", "-q", "-m", "photos")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    language_files.write_language(folder / "small.gguf")
    tower_files.write_tower(folder / "tower.onnx")
    objects = {photo: [photo % 5, 10 + photo % 3] for photo in ids}
    lists = data.Lists(captioned=(1, 2, 3, 4), labelled=(5, 6, 8), validation=(9, 10, 11), test=(7, 14))
    return Sources(
        data.Photos(folder / ".git"),
        data.Labels(objects, frozenset(ids)),
        dict.fromkeys((1, 2, 3, 4), CAPTIONS),
        lists,
        folder / "tower.onnx",
        folder / "small.gguf",
    )


@pytest.fixture(scope="module")
def whole(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the short recipe ran to its end."""
    folder = tmp_path_factory.mktemp("whole")
    assert list(train(SHORT, folder, sources, folder / "weights", every=2)) == list(STAGES)
    return folder


def test_nothing_that_is_held_out_is_trained_on() -> None:
    photos = range(1, 9000)
    objects = {photo: [0] for photo in photos if photo % 11}
    val2014 = frozenset(photo for photo in photos if photo % 3 == 0)
    held_out = {5, 10, 4000, 4001}
    made = data.build_lists(photos, data.Labels(objects, val2014), range(0, 9000, 2), held_out, seed=30)
    trained = {*made.captioned, *made.labelled}
    assert trained
    assert not any(photo in val2014 and photo % 7 == 0 for photo in trained | set(made.validation))
    assert not trained & held_out
    assert not trained & set(made.validation)
    assert all(photo in val2014 and photo % 7 == 0 and photo not in held_out for photo in made.test)
    assert len(made.validation) == data.VALIDATION
    assert not set(made.validation) & held_out
    assert all(photo % 2 == 0 for photo in made.captioned)
    assert trained | set(made.validation) | set(made.test) <= objects.keys()


def test_benchmark_files_name_their_photos(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps({"opera": [3, 4], "note": "first 500"}))
    lines = [{"image": "COCO_val2014_000000000012.jpg", "text": "?"}, {"image": "n161313.jpg"}]
    (tmp_path / "pope.json").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "vqa.json").write_text(json.dumps({"questions": [{"image_id": 44, "question_id": 440}]}))
    (tmp_path / "gqa.json").write_text('[{"image": "n161313.jpg"}]')
    paths = [tmp_path / name for name in ("ids.json", "pope.json", "vqa.json")]
    assert data.read_held_out(paths) == {3, 4, 12, 44}
    with pytest.raises(RevisitError, match="names no COCO photo"):
        data.read_held_out([*paths, tmp_path / "gqa.json"])


def test_labels_and_captions_are_read(tmp_path: Path) -> None:
    written = {"categories": ["dog", "person"], "train2014": {"9": [0, 1]}, "val2014": {"12": [1]}}
    (tmp_path / "labels.json").write_text(json.dumps(written))
    labels = data.Labels.read(tmp_path / "labels.json")
    assert [[CATEGORIES[k] for k in labels.objects[photo]] for photo in (9, 12)] == [["person", "dog"], ["person"]]
    assert labels.val2014 == {12}
    records = [{"image": "val2014/COCO_val2014_000000000012.jpg", "caption": [" A dog. "]}]
    records += [{"file_path": "train2014/COCO_train2014_000000000009.jpg", "captions": ["A cat."]}]
    (tmp_path / "captions.json").write_text(json.dumps(records))
    assert data.read_captions([tmp_path / "captions.json"]) == {12: ["A dog."], 9: ["A cat."]}


def test_what_is_said_about_a_photo_is_true() -> None:
    objects = {1: [0, 16, 30], 2: [2], 3: []}
    said = texts.Texts(objects, {1: CAPTIONS})
    scores = np.zeros(180, np.float32)
    scores[30] = texts.VISIBLE - 1  # not seen by the tower
    for number in range(40):
        for photo, present in objects.items():
            names = {CATEGORIES[k] for k in present}
            turns = said.turns(photo, scores, f"{number}")
            assert [turn.kind for turn in turns].count("presence") == texts.PRESENCE_QUESTIONS
            for turn in turns:
                if turn.kind == "presence":
                    asked = next(name for name in CATEGORIES if turn.question == texts.presence_question(name))
                    assert turn.answer == ("Yes." if asked in names else "No.")
                elif turn.kind == "checklist":
                    for entry in turn.answer.rstrip(".").split(", "):
                        name, _, verdict = entry.rpartition(" ")
                        assert verdict == ("yes" if name in names else "no")
                else:
                    assert turn.answer.startswith(tuple(CAPTIONS))
                    assert CATEGORIES[30] not in turn.answer
                    assert turn.question != chair.PROMPT or "person" in turn.answer or "eople" in turn.answer
    assert said.turns(1, scores, "a") == said.turns(1, scores, "a")
    assert texts.also(["skis", "oven", "cat"]) == " There are also skis, an oven and a cat."
    assert texts.sentence(' a man  on a horse . "') == "A man on a horse."


def test_a_branch_is_predicted_as_if_it_were_alone(sources: Sources) -> None:
    model, tokenizer = read_language(sources.language)
    assert isinstance(model, LlamaForCausalLM)
    writer = Writer(tokenizer, slots=5)
    row = writer.row([Turn("caption", "Describe.", "A dog and a cat."), Turn("presence", "A dog?", "Yes.")])
    assert [w > 0 for w in row.weights] == [label != UNTRAINED for label in row.labels]
    longer = writer.row([Turn("caption", "Describe this image.", "A dog, a cat, a car and a person.")])
    projected = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    together = hidden_states(model, writer, writer.batch([row, longer]), projected)[0]
    embedded = model.get_input_embeddings()(torch.tensor([row.ids]))
    embedded = embedded.masked_scatter((torch.tensor([row.ids]) == writer.image)[..., None], projected[:1])
    for branch in (1, 2):
        places = [place for place, owner in enumerate(row.branches) if owner in (0, branch)]
        alone = model.model(inputs_embeds=embedded[:, places], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[places], alone, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_ends_as_an_unbroken_one(whole: Path, sources: Sources, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    stops = {("features", 9), ("words", 3), ("projector", 2), ("adapter", 3)}

    def kill(name: str, step: int, total: int, loss: float) -> None:
        if (name, step) in stops:
            stops.remove((name, step))
            raise Killed

    while stops:
        with pytest.raises(Killed):
            list(train(SHORT, tmp_path, sources, every=2, progress=kill))
    list(train(SHORT, tmp_path, sources, tmp_path / "weights", every=2))
    resumed, unbroken = (load_file(folder / "weights" / OWN) for folder in (tmp_path, whole))
    assert resumed.keys() == unbroken.keys()
    for name, value in unbroken.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


def test_only_what_is_ours_is_written(whole: Path) -> None:
    own = load_file(whole / "weights" / OWN)
    assert {name.partition(".")[0] for name in own} == {"multi_modal_projector", "adapter"}
    assert {value.dtype for value in own.values()} == {torch.float16}
    assert all(bool(value.any()) for name, value in own.items() if name.endswith("up"))
    stages = [json.loads(line)["stage"] for line in (whole / "weights" / "training.jsonl").read_text().splitlines()]
    assert stages == list(LOGGED)
    assert "validation photos" in (whole / "words.txt").read_text()


def test_another_recipe_raises(whole: Path, sources: Sources) -> None:
    with pytest.raises(RevisitError, match="written by another recipe"):
        list(train(replace(SHORT, rank=3), whole, sources, stages=("adapter",)))


def test_a_benchmark_folder_has_what_the_benchmarks_read(sources: Sources, tmp_path: Path) -> None:
    benchmark.write_benchmark(tmp_path, sources.photos, sources.labels, [7, 14], seed=1)
    items = chair.Chair().load(tmp_path)
    assert [(item.id, set(item.meta["ground_truth"])) for item in items] == [
        (str(photo), {CATEGORIES[k] for k in sources.labels.objects[photo]}) for photo in (7, 14)
    ]
    with sources.photos as photos:
        assert Path(items[0].images[0]).read_bytes() == photos.data(7)
    asked = pope.Pope().load(tmp_path)
    assert [item.meta["label"] for item in asked] == ["yes", "no"] * 4
    for item in asked:
        photo = data.photo_id(Path(item.images[0]).name)
        name = next(name for name in CATEGORIES if texts.presence_question(name) == item.prompt)
        assert (CATEGORIES.index(name) in sources.labels.objects[photo]) == (item.meta["label"] == "yes")


def test_the_rule_reads_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def logs(label: str, distinct_f1: float, repeats: float, accuracy: float) -> list[SimpleNamespace]:
        captions = dict.fromkeys(study.METRICS, 0.5) | {"DistinctF1": distinct_f1, "Rep": repeats}
        scores = {"chair": Scores(captions), "pope": Scores({"accuracy": accuracy})}
        return [
            SimpleNamespace(path=label, spec=SimpleNamespace(method=label, benchmark_name=name), scores=found)
            for name, found in scores.items()
        ]

    written = [
        *logs("greedy", 0.50, 0.02, 0.8),
        *logs(study.PAPER, 0.51, 0.12, 0.8),
        *logs("no candidate", 0.60, 0.02, 0.8),
        *logs("once=repeats", 0.57, 0.04, 0.8),
        *logs("once=answers worse", 0.56, 0.02, 0.79),
        *logs("once=simple", 0.549, 0.03, 0.8),
        *logs("once=best", 0.55, 0.02, 0.8),
    ]
    monkeypatch.setattr(study, "read_logs", lambda run: written)
    assert study.report([tmp_path]).endswith("Chosen: once=simple.")
    assert study.pick({k: v for k, v in study.outcomes([tmp_path]).items() if k in ("greedy", study.PAPER)}) is None
