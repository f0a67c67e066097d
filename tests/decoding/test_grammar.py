"""Methods and their settings in text: one grammar for the command line, YAML, ablations and requests."""

from __future__ import annotations

from typing import Any

import pytest

import revisit
from revisit.errors import RevisitError
from revisit.eval.config import EvalConfig
from revisit.methods import as_method, parse_methods
from revisit.registry import parse_assignments, parse_entry


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("vcd", "vcd", {}),
        ("revisit:alpha=1e-3", "revisit", {"alpha": "1e-3"}),
        ("revisit:alpha=1e-3,layers=all", "revisit", {"alpha": "1e-3", "layers": "all"}),
        ("revisit: layers = 0,2,4 , alpha = 0.1", "revisit", {"layers": "0,2,4", "alpha": "0.1"}),
        ("icd:sentence=Look: nothing, really.", "icd", {"sentence": "Look: nothing, really."}),
        ("chain:methods=[vcd:alpha=2,beta=0;revisit]", "chain", {"methods": "[vcd:alpha=2,beta=0;revisit]"}),
        ("my/file.py:Mine:alpha=2", "my/file.py:Mine", {"alpha": "2"}),
        ({"name": "vcd", "alpha": 2.0}, "vcd", {"alpha": 2.0}),
    ],
)
def test_one_entry(text: Any, name: str, settings: dict[str, Any]) -> None:
    assert parse_entry(text) == (name, settings)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("greedy,revisit", ["greedy", "revisit"]),
        ("revisit:alpha=0.01,layers=0,2,4", ["revisit"]),
        ("chain:methods=vcd,revisit", ["chain"]),
        (["greedy", "chain:methods=vcd,revisit", "dola"], ["greedy", "chain", "dola"]),
        (["greedy", {"name": "revisit", "alpha": 0.01}], ["greedy", "revisit"]),
    ],
)
def test_a_list_of_methods(text: Any, names: list[str]) -> None:
    assert [name for name, _ in parse_methods(text)] == names


def test_a_chain_is_one_method_for_every_reader() -> None:
    text = "chain:methods=vcd,revisit"
    chain = revisit.Chain([revisit.VCD(), revisit.ReVisiT()])
    assert as_method(text) == chain
    (planned,) = EvalConfig(method=[text]).methods_for("tiny")
    assert [link.name for link in planned.methods] == ["vcd", "revisit"]
    assert as_method("chain:methods=[vcd:alpha=2;revisit:layers=0,2]") == revisit.Chain(
        [revisit.VCD(alpha=2.0), revisit.ReVisiT(layers=(0, 2))]
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("revisit:alpha=1e-5,alpha=1e-2", "alpha"),
        ("greedy,revisit:alpha=1", "separately"),
        ("chain:methods=[greedy,vcd:alpha=2]", "semicolons"),
        ("chain:methods=[revisit", "[revisit"),
        ("revisit:layers=(0,2]", "layers"),
        ("revisit:all", "all"),
    ],
)
def test_ambiguous_text_is_an_error(text: str, word: str) -> None:
    with pytest.raises(RevisitError) as raised:
        as_method(text)
    assert word in str(raised.value)


@pytest.mark.parametrize("text", ["pope:settings=coco_random,LLaVA-Bench", "LLaVA-Bench,pope:settings=coco_random"])
def test_a_benchmark_with_settings_is_listed_alone_in_either_order(text: str) -> None:
    with pytest.raises(RevisitError):
        _ = EvalConfig(benchmark=text).benchmarks


def test_a_link_that_is_named_takes_what_is_recommended_and_an_object_stays() -> None:
    wanted = revisit.ReVisiT.recommended("qwen2_5_vl")
    assert wanted != revisit.ReVisiT()
    for named in ("chain:methods=vcd,revisit", "chain:methods=[vcd,revisit]", revisit.Chain(["vcd", "revisit"])):
        assert as_method(named, "qwen2_5_vl") == revisit.Chain([revisit.VCD(), wanted])
    assert as_method(revisit.Chain([revisit.VCD, revisit.ReVisiT]), "qwen2_5_vl") == revisit.Chain(["vcd", wanted])
    fixed = revisit.Chain([revisit.VCD(), revisit.ReVisiT()])
    assert as_method(fixed, "qwen2_5_vl") == fixed
    assert as_method({"name": "chain", **fixed.settings()}, "qwen2_5_vl") == fixed  # as a trace keeps it
    assert as_method("chain:methods=[revisit:layers=low]", "qwen2_5_vl").methods[0].layers == "low"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["alpha", "=3", " = 3"])
def test_an_assignment_needs_a_key_and_a_value(text: str) -> None:
    with pytest.raises(RevisitError):
        parse_assignments([text])


def test_a_mapping_needs_a_name() -> None:
    with pytest.raises(RevisitError):
        parse_entry({"alpha": 1})
    with pytest.raises(RevisitError):
        parse_entry(":alpha=1")
