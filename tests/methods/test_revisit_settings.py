"""Validation of ReVisiT's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from revisit import ReVisiT, RevisitError, methods


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
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RevisitError) as caught:
        ReVisiT(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_model_type_that_only_transformers_knows_gets_the_papers_default() -> None:
    assert ReVisiT.recommended("gpt2").layers == "last"


def test_a_models_own_recommendation_comes_first() -> None:
    config = SimpleNamespace(model_type="llava")
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(revisit={"alpha": 0.01, "layers": "all"}))
    assert ReVisiT.recommended(model) == ReVisiT(alpha=0.01, layers="all")
    assert ReVisiT.recommended(model, alpha=0.1).alpha == 0.1


def test_settings_are_frozen() -> None:
    for name in ("alpha", "strength"):
        with pytest.raises(ValueError, match="ReVisiT"):
            setattr(ReVisiT(), name, 0.5)


def test_strings_from_a_command_line() -> None:
    made = methods.get("revisit", alpha="1e-3", layers="0,2,4", weight="0.5", normalize="false", seed="3")
    assert made == ReVisiT(alpha=1e-3, layers=(0, 2, 4), weight=0.5, normalize=False, seed=3)
    assert methods.get("revisit", layers="all").layers == "all"
    assert methods.get("revisit", layers="[1, 3]").layers == (1, 3)
    with pytest.raises(RevisitError, match="Did you mean 'alpha'"):
        methods.get("revisit", alfa="1")
