"""The table of model families."""

from __future__ import annotations

from typing import Any

import pytest

import families as tiny_models
from revisit import ReVisiT, RevisitError
from revisit.models import families


def test_families_listed_as_tested_have_a_tiny_model() -> None:
    assert {family.model_type for family in families.tested()} == set(tiny_models.ALL)


def test_unlisted_families_get_an_empty_entry() -> None:
    family = families.of("some_new_model")
    assert (family.layers, family.patch_map, family.vllm) == ("last", None, "")
    assert "some_new_model" in family.no_patch_map


def test_the_paper_recommends_all_layers_for_qwen_and_the_last_for_the_others() -> None:
    assert ReVisiT.recommended("qwen2_5_vl").layers == "all"
    assert ReVisiT.recommended("llava").layers == "last"
    assert {family.layers for name, family in families.FAMILIES.items() if name.startswith("qwen")} == {"all"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"patch_map": "merge"}, "Unknown patch_map 'merge'. Did you mean 'merged'"),
        ({"image_edges": "qwne"}, "Unknown image_edges 'qwne'. Did you mean 'qwen'"),
        ({"layer": "all"}, "Unknown Family setting 'layer'. Did you mean 'layers'"),
        ({"layers": "odd"}, "layers must be 'last', 'all', 'low' or 'high', not 'odd'"),
    ],
)
def test_a_wrong_entry_raises_an_error_that_names_it(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RevisitError, match=r"families\.yaml: new_model: ") as raised:
        families.read_entry("new_model", entry)
    assert message in str(raised.value)


def test_vllm_classes_are_named_once() -> None:
    architectures = families.vllm_architectures()
    assert "LlavaForConditionalGeneration" in architectures
    assert len(architectures) == sum(bool(family.vllm) for family in families.FAMILIES.values())
