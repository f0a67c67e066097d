"""The page's data: what goes in, how small it stays."""

from __future__ import annotations

import base64
import json
import re

import made_up
import numpy as np
import pytest

from revisit.cli.tables import steps_table
from revisit.explain import page
from revisit.explain.record import Candidate, Decode, MethodOutput, TokenStep


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_512_tokens_over_2000_vision_tokens_stay_under_5_mb() -> None:
    layout = made_up.even_layout((480, 320), 40, 50)
    answers = [made_up.answer(512, 2000), made_up.answer(512, 2000, seed=1)]
    html = page.render(Decode([made_up.scene()], "?", "m", layout, answers[:1]))
    assert len(html.encode()) < 5_000_000
    data = data_of(html)
    maps = base64.b64decode(data["answers"][0]["maps"])
    with_maps = [step for step in answers[0].steps if step.heat is not None]
    assert len(maps) == len(with_maps) * 2000


def test_a_heat_map_comes_back_within_a_byte() -> None:
    heat = np.array([0.2, 0.7, 0.5, np.inf], "float32")
    assert list(page.quantize(heat)) == [0, 255, 153, 255]  # 0.3 / 0.5 · 255
    assert list(page.quantize(np.full(3, 0.3, "float32"))) == [0, 0, 0]


def test_the_page_holds_the_decode() -> None:
    decode = made_up.decode()
    data = data_of(page.render(decode))
    first, plain = data["answers"]
    assert [step["t"] for step in first["steps"]] == [step.text for step in decode.answers[0].steps]
    step = first["steps"][1]
    assert step["i"] == made_up.speaker(1, 96)
    assert step["was"] == " other0"
    assert step["c"][0] == [" small", 0.25, 0.7, 0.8]
    assert step["o"] == 0
    assert "c" not in plain["steps"][0]
    grid = data["grids"][0]
    assert (grid["rows"], grid["columns"], grid["gap"]) == (8, 12, 0)
    assert grid["xs"][1] == [40, 80]
    maps = base64.b64decode(first["maps"])
    row = maps[step["m"] * 96 : (step["m"] + 1) * 96]
    assert row[step["i"]] == 0
    assert row.count(0) == 1


def test_differences_are_marked_on_both_sides() -> None:
    data = data_of(page.render(made_up.decode()))
    marked = [[n for n, step in enumerate(answer["steps"]) if step.get("x")] for answer in data["answers"]]
    assert marked == [[2, 14], [2, 14]]


def test_text_cannot_break_out_of_the_page() -> None:
    bad = "</script><script>alert(1)</script>"
    step = TokenStep(bad, 1, plausible_tokens=1, candidates=[Candidate(1, bad, 1.0, None, 1.0)])
    decode = made_up.decode()
    html = page.render(Decode(decode.images, bad, bad, decode.layout, [MethodOutput({"name": "greedy"}, [step], bad)]))
    assert "<script>alert" not in html
    assert html.count("</script>") == 2
    assert data_of(html)["answers"][0]["steps"][0]["t"] == bad


def test_nothing_outside_is_named() -> None:
    html = page.render(made_up.decode())
    assert not re.findall(r"""(?:src|href)=["'](?!data:)[^"'#]""", html)
    assert "http://" not in html
    assert "https://" not in html
    assert "default-src 'none'" in html


def test_large_images_are_made_smaller_but_keep_their_coordinates() -> None:
    big = made_up.scene((4000, 2000))
    decode = made_up.decode()
    layout = made_up.even_layout(big.size, 4, 8)
    html = page.render(Decode([big], "?", "m", layout, decode.answers))
    image = data_of(html)["images"][0]
    assert (image["w"], image["h"]) == (4000, 2000)
    assert len(image["src"]) < 200_000
    assert data_of(html)["grids"][0]["xs"][-1] == [3500, 4000]


@pytest.mark.parametrize("select", ["min", "max"])
def test_a_method_that_seeks_disagreement_says_so(select: str) -> None:
    answer = made_up.answer(3, 8)
    answer.method["select"] = select
    assert page.answer_payload(answer)["far"] is (select == "max")


def test_a_step_tells_its_weight_and_every_vision_token_that_was_asked() -> None:
    heat = np.linspace(0, 1, 12, dtype="float32")[::-1]
    step = TokenStep("a", 0, vision_token=11, layer=6, divergence=0.0, weight=0.4567, heat=heat)
    entry, _ = page.step_payload(step, {"neighbors": 8})
    assert entry["g"] == 0.457
    assert [token for token, _ in entry["p"]] == [11, 10, 9, 8, 7, 6, 5, 4]
    assert len(page.step_payload(step, {})[0]["p"]) == page.MOST_PATCHES


def test_the_terminal_tells_weights_that_differ_from_step_to_step() -> None:
    answer = made_up.answer(6, 96)
    for step in answer.steps:
        step.weight = 0.25
    fixed = steps_table(answer, None).heads
    answer.method["weight"] = "agreement"
    adaptive = steps_table(answer, None)
    assert adaptive.heads == (*fixed, "weight")
    assert {row[-1] for row in adaptive.rows} == {"0.25"}
