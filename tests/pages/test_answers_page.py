"""The data of the page of answers: its content and its size."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

import families
import made_up
from revisit.pages import answers
from revisit.pages.answers import AnswerPage


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_512_tokens_over_2000_vision_tokens_stay_under_5_mb() -> None:
    layout = made_up.even_layout((480, 320), 40, 50)
    answer = made_up.answer(512, 2000)
    html = AnswerPage([families.image(1)], "?", "m", layout, [answer]).render()
    assert len(html.encode()) < 5_000_000
    maps = base64.b64decode(data_of(html)["answers"][0]["maps"])
    with_maps = [step for step in answer.steps if step.divergences is not None]
    assert len(maps) == len(with_maps) * 2000


def test_heat_maps_have_the_smallest_divergence_over_layers_in_one_byte() -> None:
    step = made_up.step(0, "x", divergences=torch.tensor([[0.1, 0.4], [0.3, float("nan")]]))
    smallest = answers.heat_map(step)
    assert smallest is not None
    assert smallest.tolist() == pytest.approx([0.1, 0.4])
    heat = np.array([0.2, 0.7, 0.5, np.inf], "float32")
    assert list(answers.quantize(heat)) == [0, 255, 153, 255]  # 0.3 / 0.5 · 255
    assert list(answers.quantize(np.full(3, 0.3, "float32"))) == [0, 0, 0]
    assert list(answers.quantize(heat, 1.0)) == [51, 178, 128, 255]  # the scale of all steps


def test_the_page_contains_the_decode() -> None:
    page = made_up.page()
    assert answers.headline(page) == "ReVisiT changed 3 of 18 tokens"
    data = data_of(page.render())
    first, plain = data["answers"]
    assert [step["t"] for step in first["steps"]] == [step.text for step in page.answers[0].steps]
    step = first["steps"][1]
    assert step["i"] == made_up.selected(1, 96)
    assert step["was"] == " other0"
    assert step["c"][0] == [" small", 0.25, 0.7, 0.8]
    assert step["o"] == 0
    assert plain["steps"][0]["c"] == [["A", 1.0, None, 1.0]]
    grid = data["grids"][0]
    assert (grid["rows"], grid["columns"], grid["gap"]) == (8, 12, 0)
    assert grid["xs"][1] == [40, 80]
    maps = base64.b64decode(first["maps"])
    row = maps[step["m"] * 96 : (step["m"] + 1) * 96]
    assert row[step["i"]] == min(row) == 4  # 0.01 / ln 2 · 255
    assert row.count(4) == 1


@pytest.mark.parametrize(
    ("plain", "ours", "objects", "expected"),
    [
        ("A teddy bear and a cat.", "A cat.", ["cat"], "ReVisiT removed ‘teddy bear’ (not in the image)"),
        ("A dog, two oven and a cat.", "A cat.", ["cat"], "ReVisiT removed ‘dog’, ‘oven’ (not in the image)"),
        ("A dog.", "An oven.", [], "removed ‘dog’ (not in the image) and added ‘oven’ (not in the image)"),
        ("Two dogs.", "A dog.", ["cat"], "ReVisiT changed none of 2 tokens"),
        ("A dog.", "A cat.", None, "ReVisiT changed none of 2 tokens"),  # unknown objects
        (None, "A dog.", ["cat"], "ReVisiT changed none of 2 tokens"),
    ],
)
def test_the_headline_names_removed_and_added_objects(
    plain: str | None, ours: str, objects: list[str] | None, expected: str
) -> None:
    page = made_up.page()
    page.objects = None if objects is None else tuple(objects)
    page.answers = [
        made_up.output(name, [made_up.step(n, f" {word}") for n, word in enumerate(text.split())])
        for name, text in (("revisit", ours), ("greedy", plain))
        if text
    ]
    assert answers.headline(page).endswith(expected)


def test_an_answer_shows_its_promise_and_what_was_withheld() -> None:
    page = made_up.page()
    row = page.answers[0].trace.rows[0]
    row.floor, row.support = 0.1, {"bus": 0.0123, "cat": 0.5, "dog": 0.00001, "cow": 0.02}
    row.prevented = [(3, "bus"), (5, "cat"), (6, "dog"), (7, "bus")]  # the cat was named before, the cow never likely
    page.promise = "At most 0.2 of captions."
    first, plain = data_of(page.render())["answers"]
    withheld = "Withheld, because the image supports it less than 0.1: bus (0.012), dog (below 0.001)."
    assert first["notes"] == ["At most 0.2 of captions.", withheld]
    assert plain["notes"] == []


def test_text_cannot_break_out_of_the_page() -> None:
    bad = "</script><script>alert(1)</script>"
    answer, page = made_up.output("greedy", [made_up.step(0, bad)]), made_up.page()
    html = AnswerPage(page.images, bad, bad, page.layout, [answer]).render()
    assert "<script>alert" not in html
    assert html.count("</script>") == 2
    assert data_of(html)["answers"][0]["steps"][0]["t"] == bad


def test_the_page_refers_to_nothing_outside() -> None:
    html = made_up.page().render()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)[^"'#]""", html)
    assert "http://" not in html
    assert "https://" not in html
    assert "default-src 'none'" in html


def test_large_images_are_scaled_down_but_keep_their_coordinates() -> None:
    big = families.image(1, (4000, 2000))
    page = made_up.page()
    layout = made_up.even_layout(big.size, 4, 8)
    html = AnswerPage([big], "?", "m", layout, page.answers).render()
    image = data_of(html)["images"][0]
    assert (image["w"], image["h"]) == (4000, 2000)
    assert len(image["src"]) < 200_000
    assert data_of(html)["grids"][0]["xs"][-1] == [3500, 4000]


def test_a_step_contains_its_weight_and_all_neighbors() -> None:
    heat = torch.linspace(1, 0, 12)[None]  # (layers, vision tokens)
    step = made_up.step(0, "a", vision_token=11, layer=6, divergence=0.0, weight=0.4567, divergences=heat)
    entry, _ = answers.step_payload(step, {"neighbors": 8})
    assert entry["g"] == 0.457
    assert [token for token, _ in entry["p"]] == [11, 10, 9, 8, 7, 6, 5, 4]
    assert len(answers.step_payload(step, {})[0]["p"]) == answers.MOST_PATCHES


def test_the_chosen_token_and_both_favorites_are_always_shown() -> None:
    step = made_up.step(
        335,
        "x",
        ids=list(range(300, 340)),
        base=[0.01] * 39 + [0.6],
        vision=[0.02] * 38 + [0.22, 0.02],
        final=[0.5 * 0.6**k for k in range(40)],
        texts=[str(token) for token in range(300, 340)],
        plausible_tokens=40,
    )
    shown = [step.ids[k] for k in answers.shown_candidates(step)]
    assert len(shown) == answers.SHOWN_CANDIDATES
    assert {335, 339, 338, 300} <= set(shown)
    entry, _ = answers.step_payload(step, {})
    assert entry["was"] == "339"
    assert entry["c"][entry["o"]][0] == "335"
