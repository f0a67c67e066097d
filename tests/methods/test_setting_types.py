"""Settings of the wrong type are one sentence, wherever they come from."""

from __future__ import annotations

from typing import Any

import pytest

import families
from revisit import methods
from revisit.decoding.loop import generate
from revisit.errors import RevisitError
from revisit.models.prompts import prepare


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("code", {"request_ids": [0, 1, 2, 3]}),
        ("code", {"request_ids": [[0], [1], [2]]}),
        ("code", {"request_ids": 5}),
        ("code", {"request": [1]}),
        ("code", {"bos": "x"}),
        ("icd", {"sentence_ids": [[1]]}),
        ("icd", {"around": [None]}),
        ("pai", {"alpha": "inf"}),
        ("revisit", {"weight": 1e308}),
        ("revisit", {"weight": float("nan")}),
        ("revisit", {"alpha": True}),
        ("revisit", {"layers": [0.5]}),
        ("revisit", {"normalize": "perhaps"}),
        ("revisit", {"normalize": 1}),
        ("vcd", {"seed": 10**400}),
        ("vcd", {"noise_step": {}}),
        ("chain", {"methods": 5}),
        ("chain", {"methods": {"a": 1}}),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RevisitError):
        methods.get(name, **settings)


def test_lists_become_tuples_and_one_number_a_list_of_one() -> None:
    assert methods.get("code", request_ids=[[1], [2, 3]]).settings()["request_ids"] == [(1,), (2, 3)]
    assert methods.get("revisit", layers=2) == methods.get("revisit", layers="2") == methods.get("revisit", layers=[2])


@pytest.mark.parametrize("token", [600, -5, families.token_id("<image>")])
def test_token_ids_that_the_model_has_not_are_refused(token: int) -> None:
    model, processor = families.build("llava")
    inputs = prepare(processor, ["hi"], [[families.picture(0)]])
    for method in (methods.get("icd", sentence_ids=[token]), methods.get("code", request_ids=[[token], [1]])):
        with pytest.raises(RevisitError, match="no text token"):
            generate(model, **inputs, method=method, max_new_tokens=2)
