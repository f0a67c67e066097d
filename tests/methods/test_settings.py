"""Validation of settings: one sentence for a wrong value, wherever it comes from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import families
from revisit import ReVisiT, RevisitError, methods
from revisit.decoding.generate import generate
from revisit.models.prompts import prepare


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0}, "alpha must be"),
        ({"alpha": 2}, "alpha must be"),
        ({"alpha": "x"}, "alpha must be"),
        ({"layers": "lst"}, "Did you mean 'last'"),
        ({"layers": (-1,)}, "layers must be"),
        ({"layers": ()}, "layers must be"),
        ({"divergence": "jds"}, "Did you mean 'jsd'"),
        ({"select": "median"}, "select must be"),
        ({"fusion": "interpolation", "weight": 1.5}, "weight must be"),
        ({"weight": -1}, "weight must be"),
        ({"norm": "rms"}, "norm must be"),
        ({"vocabulary": "ful"}, "Did you mean 'full'"),
        ({"normalize": "perhaps"}, "normalize must be"),
        ({"normalize": None}, "normalize must be"),
        ({"select": "random", "neighbors": 8}, "neighbors"),
        ({"select": "soft", "neighbors": 2}, "neighbors"),
        ({"select": ["min"]}, "select must be"),
        ({"weight": 1e308}, "weight must be"),
        ({"weight": float("nan")}, "weight must be"),
        ({"layers": [0.5]}, "layers must be"),
        ({"alfa": "1"}, "Did you mean 'alpha'"),
    ],
)
def test_wrong_settings_of_revisit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RevisitError) as raised:
        ReVisiT(**settings)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_defaults_are_the_papers_and_presets_are_named() -> None:
    assert ReVisiT() == ReVisiT(alpha=1e-5, layers="last", divergence="jsd", weight=1.0)
    official = ReVisiT.official(layers="all")
    assert (official.divergence, official.normalize, official.precision) == ("official", False, "model")
    assert ReVisiT(fusion="interpolation").weight == 0.5
    assert ReVisiT.recommended("qwen2_5_vl").layers == "all"
    assert ReVisiT.recommended("llava").layers == ReVisiT.recommended("internvl").layers == "last"


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl", "LLaVA", ""])
def test_a_name_that_is_not_a_model_type_gets_no_layers(name: str) -> None:
    with pytest.raises(RevisitError, match=r"not a model type.*pass the loaded model"):
        ReVisiT.recommended(name)


def test_a_models_own_recommendation_comes_first() -> None:
    config = SimpleNamespace(model_type="llava")
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(revisit={"alpha": 0.01, "layers": "all"}))
    assert ReVisiT.recommended(model) == ReVisiT(alpha=0.01, layers="all")
    assert ReVisiT.recommended(model, alpha=0.1).alpha == 0.1


def test_strings_from_a_command_line() -> None:
    made = methods.get("revisit", alpha="1e-3", layers="0,2,4", weight="0.5", normalize="false", seed="3")
    assert made == ReVisiT(alpha=1e-3, layers=(0, 2, 4), weight=0.5, normalize=False, seed=3)
    assert methods.get("revisit", layers="all").layers == "all"
    assert methods.get("revisit", layers="[1, 3]").layers == methods.get("revisit", layers="1,1,3").layers == (1, 3)
    assert methods.get("revisit", layers=2) == methods.get("revisit", layers="2") == methods.get("revisit", layers=[2])


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
        ("vcd", {"seed": 10**400}),
        ("vcd", {"noise_step": {}}),
        ("chain", {"methods": 5}),
        ("chain", {"methods": {"a": 1}}),
    ],
)
def test_a_value_of_another_type_raises(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RevisitError):
        methods.get(name, **settings)


def test_the_number_of_vision_tokens_that_a_model_recommends_goes_with_a_selection_that_has_one() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(model_type="llava"), generation_config=SimpleNamespace(revisit={"neighbors": 8})
    )
    assert ReVisiT.recommended(model, select="max").neighbors == 8
    assert ReVisiT.recommended(model, select="random").neighbors == 1
    with pytest.raises(RevisitError, match="needs a loaded model"):
        ReVisiT.recommended(None)


def test_words_that_mark_an_image_raise() -> None:
    model, processor = families.build("llava")
    inputs = prepare(processor, ["hi"], [[families.image(0)]])
    method = methods.get("icd", sentence="a <image> there")
    with pytest.raises(RevisitError, match="not a text token"):
        generate(model, **inputs, method=method, processor=processor, max_new_tokens=2)


def test_the_default_weight_follows_the_fusion() -> None:
    mixed = ReVisiT.recommended("llava").replace(fusion="interpolation")
    assert mixed.weight == 0.5  # with the product's default of 1, the language side would be ignored
    assert mixed.replace(fusion="poe").weight == 1.0
    assert mixed.replace(weight=0.25).replace(alpha=0.1).weight == 0.25
    assert ReVisiT(weight=2).replace(alpha=0.1).weight == 2
