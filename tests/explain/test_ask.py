"""`revisit.ask`: the same answer for every kind of image and model argument, and its displays."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import families
import revisit
from revisit.embedded.samples import sample
from revisit.pages.answers import wrong_steps


@pytest.fixture(scope="module")
def answer() -> revisit.ExplainedAnswer:
    shown = sample("demo")
    return revisit.ask("tiny", shown.path, compare_with="greedy", objects=shown.nouns)


def test_the_demo_image_shows_a_correction(answer: revisit.ExplainedAnswer) -> None:
    """tools/samples.py chose it because plain decoding names absent objects and ReVisiT none."""
    refined, plain = answer.page.answers
    assert not wrong_steps(refined, sample("demo").nouns)
    assert wrong_steps(plain, sample("demo").nouns)
    assert answer.text != answer.compared["greedy"]
    corrected = [(new.strip(), old.strip()) for _, new, old in answer.changed]
    assert any(new in sample("demo").nouns and old not in sample("demo").nouns for new, old in corrected)


def test_all_kinds_of_image_arguments_give_the_same_answer() -> None:
    pair = families.llava()
    image = families.image(2, (40, 40))
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
def test_a_batch_gives_the_answers_of_each_image_alone(family: str, method: str) -> None:
    pair = families.build(family)
    images = [families.image(n, size) for n, size in enumerate([(40, 40), (30, 60), (56, 28)])]
    options: dict[str, Any] = {"method": method, "compare_with": "greedy", "max_new_tokens": 4}
    together: Any = revisit.ask_many(pair, images, "What is it?", **options, batch_size=2)
    for image, answer in zip(images, together, strict=True):
        alone = revisit.ask(pair, image, "What is it?", **options)
        for mine, own in zip(answer.page.answers, alone.page.answers, strict=True):
            assert [step.token for step in mine.steps] == [step.token for step in own.steps]
            assert [step.vision_token for step in mine.steps] == [step.vision_token for step in own.steps]
        assert answer.page.layout == alone.page.layout
        assert len(answer.trace.rows) == 1
        assert [[word for word, _ in best] for best in answer.page.patch_words or ()] == [
            [word for word, _ in best] for best in alone.page.patch_words or ()
        ]
        assert [word.text for word in answer.check().words] == [word.text for word in alone.check().words]


def test_wrong_methods_fail_before_the_model_is_loaded() -> None:
    with pytest.raises(revisit.RevisitError, match="gredy"):
        revisit.ask("no/such/model", families.image(1), compare_with="gredy")


def test_images_of_a_list_share_a_prompt() -> None:
    pair, images = families.llava(), [families.image(n, (40, 40)) for n in range(2)]
    assert len(revisit.ask(pair, images, "What is it?", max_new_tokens=2).images) == 2
    apart: Any = revisit.ask_many(pair, images, max_new_tokens=2)
    assert [len(one.images) for one in apart] == [1, 1]


def test_all_displays_count_steps_from_1(answer: revisit.ExplainedAnswer) -> None:
    table = answer.trace.to_pandas()
    assert table["step"].tolist() == list(range(1, len(table) + 1))
    assert table.loc[table["changed"], "step"].tolist() == [step for step, _, _ in answer.changed]
    assert [record.step for record in answer.trace.rows[0].records] == table["step"].tolist()


class Counts:
    """Count the vision passes and prefills of a model."""

    def __init__(self, model: Any) -> None:
        self.vision = self.prefills = 0
        model.model.vision_tower.register_forward_hook(self.count_vision)
        model.model.language_model.register_forward_pre_hook(self.count_prefill, with_kwargs=True)

    def count_vision(self, *_: Any) -> None:
        self.vision += 1

    def count_prefill(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.prefills += kwargs["inputs_embeds"].shape[1] > 1


def test_one_vision_pass_and_one_prefill_for_each_method(tmp_path: Path) -> None:
    pair = revisit.load("tiny")
    counts = Counts(pair[0])
    answer = revisit.ask(pair, sample("demo").path, max_new_tokens=4)
    page = answer.save(tmp_path / "page.html").read_text("utf-8")
    assert (counts.vision, counts.prefills) == (1, 1)
    assert '"predictions":[[' in page
    revisit.ask(pair, sample("demo").path, compare_with=["greedy", "dola"], max_new_tokens=4)
    assert (counts.vision, counts.prefills) == (4, 4)


def test_an_answer_does_not_keep_the_model_alive(tmp_path: Path) -> None:
    model, processor = revisit.load("tiny")
    answer = revisit.ask((model, processor), sample("demo").path, compare_with="greedy", max_new_tokens=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert '"predictions":[[' in answer.save(tmp_path / "page.html").read_text("utf-8")
