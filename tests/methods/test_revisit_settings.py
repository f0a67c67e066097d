"""Settings validate themselves, and say what is wrong in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from revisit import ReVisiT, RevisitError, methods


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0}, "alpha must be a number above 0 and at most 1, not 0"),
        ({"alpha": 2}, "alpha must be a number above 0 and at most 1, not 2"),
        ({"alpha": "x"}, "alpha must be a number above 0 and at most 1, not 'x'"),
        ({"layers": "lst"}, "Did you mean 'last'"),
        ({"layers": (-1,)}, "a list, each a whole number of at least 0, not (-1,)"),
        ({"layers": ()}, "a list, each a whole number of at least 0, not ()"),
        ({"divergence": "jds"}, "Did you mean 'jsd'"),
        ({"select": "median"}, "Known: max, min, random"),
        ({"fusion": "interpolation", "weight": 1.5}, "weight must be a number from 0 to 1 with"),
        ({"weight": -1}, "weight must be a number from 0 to 1,000"),
        ({"norm": "rms"}, "Known: final, none"),
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
    with pytest.raises(RevisitError, match=r"settings of a ReVisiT are fixed: replace\(alpha=\.\.\.\)"):
        ReVisiT().alpha = 0.5  # type: ignore[misc]
    with pytest.raises(
        RevisitError, match="ReVisiT has no setting 'strength': declare it in the class, as in strength: int"
    ):
        ReVisiT().strength = 1  # type: ignore[attr-defined]


def test_strings_from_a_command_line() -> None:
    made = methods.get("revisit", alpha="1e-3", layers="0,2,4", weight="0.5", normalize="false", seed="3")
    assert made == ReVisiT(alpha=1e-3, layers=(0, 2, 4), weight=0.5, normalize=False, seed=3)
    assert methods.get("revisit", layers="all").layers == "all"
    assert methods.get("revisit", layers="[1, 3]").layers == (1, 3)
    with pytest.raises(RevisitError, match="alpha must be a number above 0 and at most 1, not 'x'"):
        methods.get("revisit", alpha="x")
    with pytest.raises(RevisitError, match="Did you mean 'alpha'"):
        methods.get("revisit", alfa="1")
    with pytest.raises(RevisitError, match="Did you mean 'revisit'"):
        methods.get("revisitt")
