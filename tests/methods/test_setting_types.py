"""Settings of the wrong type are one sentence, wherever they come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import families
from revisit import DeCo, DoLa, ReVisiT, methods
from revisit.decoding.generate import generate
from revisit.errors import RevisitError
from revisit.models.prompts import prepare

NO_LAYERS: list[Any] = [None, 1.5, object(), b"last", []]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("code", {"request": [1]}),
        ("code", {"bos": "x"}),
        ("pai", {"alpha": "inf"}),
        ("pai", {"alpha": 0, "gamma": None}),
        ("sid", {"layer": 0}),
        ("sid", {"layer": 1.5}),
        ("vcd", {"noise_step": 1000}),
        ("vcd", {"mode": "both"}),
        ("dola", {"layers": "lower"}),
        ("revisit", {"weight": 1e308}),
        ("revisit", {"weight": float("nan")}),
        ("revisit", {"layers": [0.5]}),
        ("revisit", {"normalize": "perhaps"}),
        ("vcd", {"seed": 10**400}),
        ("vcd", {"noise_step": {}}),
        ("chain", {"methods": 5}),
        ("chain", {"methods": {"a": 1}}),
    ],
)
def test_a_value_of_another_type_raises(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RevisitError):
        methods.get(name, **settings)


@pytest.mark.parametrize(
    ("cls", "settings", "field"),
    [
        (ReVisiT, {"normalize": "perhaps"}, "normalize"),
        (ReVisiT, {"normalize": None}, "normalize"),
        *((cls, {"layers": bad}, "layers") for cls in (ReVisiT, DoLa, DeCo) for bad in NO_LAYERS),
        (ReVisiT, {"select": "random", "neighbors": 8}, "neighbors"),
        (ReVisiT, {"select": "soft", "neighbors": 2}, "neighbors"),
        (ReVisiT, {"select": ["min"]}, "select"),
    ],
)
def test_objects_check_their_settings_too(cls: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(RevisitError, match=rf"\b{field}\b"):
        cls(**settings)


def test_a_layer_counts_once() -> None:
    assert methods.get("revisit", layers="0,0,2,0") == ReVisiT(layers=(0, 2))
    assert DoLa(layers=(1, 1)) == DoLa(layers=(1,))


def test_the_number_of_vision_tokens_that_a_model_recommends_goes_with_a_selection_that_has_one() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(model_type="llava"), generation_config=SimpleNamespace(revisit={"neighbors": 8})
    )
    assert ReVisiT.recommended(model, select="max").neighbors == 8
    assert ReVisiT.recommended(model, select="random").neighbors == 1
    with pytest.raises(RevisitError, match="needs a loaded model"):
        ReVisiT.recommended(None)


def test_lists_become_tuples_and_one_number_a_list_of_one() -> None:
    assert methods.get("revisit", layers=2) == methods.get("revisit", layers="2") == methods.get("revisit", layers=[2])


def test_words_that_mark_an_image_raise() -> None:
    model, processor = families.build("llava")
    inputs = prepare(processor, ["hi"], [[families.image(0)]])
    method = methods.get("icd", sentence="a <image> there")
    with pytest.raises(RevisitError, match="not a text token"):
        generate(model, **inputs, method=method, processor=processor, max_new_tokens=2)
