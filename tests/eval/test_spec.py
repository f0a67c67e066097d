"""What identifies answers beside their settings: code from outside, a loaded model's device, dtype and weights."""

from __future__ import annotations

import copy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from families import build
from revisit import ReVisiT, methods
from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.local import LocalEngine
from revisit.eval.engines.vllm import VllmEngine
from revisit.eval.spec import foreign_code, label, loaded_fingerprint
from revisit.methods.chain import Chain


def test_labels_name_what_is_not_default() -> None:
    from fake_grid import Letters, Shift

    assert [label(Shift()), label(Shift(by=2))] == ["shift", "shift(by=2)"]
    assert label(Letters(suffix="x")) == "letters(suffix=x)"


def test_a_method_outside_the_package_is_identified_by_its_file(tmp_path: Path) -> None:
    text = (
        "from revisit.methods.greedy import Greedy\n\n\nclass Own(Greedy):\n    '''Doc.'''\n    factor: float = 1.0\n"
    )

    def load(name: str, source: str) -> Any:
        path = tmp_path / name / "own.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = spec_from_file_location(f"own_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module.Own()

    own = load("a", text)
    first = foreign_code(own)
    assert list(first) == ["own.py"]
    assert foreign_code(load("b", text)) == first
    assert foreign_code(load("c", text.replace("1.0", "2.0"))) != first
    assert foreign_code(Chain(methods=(own, methods.get("revisit")))) == first
    assert foreign_code(methods.get("chain", methods="vcd,revisit")) == {}


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({}, ("cpu", "float32")),
        ({"dtype": "fp32"}, ("cpu", "float32")),
        ({"dtype": "bf16"}, ("cpu", "bfloat16")),
        ({"dtype": "float32", "device_map": "mps"}, ("mps", "float32")),
        ({"dtype": "float32", "device_map": "cuda:1"}, ("cuda", "float32")),
        ({"device_map": "cpu"}, ("cpu", "float32")),  # the checkpoint's own
    ],
)
def test_device_and_dtype_have_canonical_names(options: dict[str, Any], placement: tuple[str, str]) -> None:
    engine = LocalEngine("tiny", **options)
    assert engine.placement == placement
    assert (engine.identity(8, [])["batching"] is None) == (placement == ("cpu", "float32"))
    assert "loaded" not in vars(engine)


def test_a_loaded_model_is_identified_by_its_weights() -> None:
    pair = copy.deepcopy(build("llava"))
    engine = LocalEngine(pair)
    assert engine.placement == ("cpu", "float32")
    before = loaded_fingerprint(pair[0])
    assert engine.identity(8, [])["fingerprint"] == before
    with torch.no_grad():
        next(pair[0].parameters()).view(-1)[0] += 1
    assert loaded_fingerprint(pair[0]) != before


@pytest.mark.parametrize(
    ("device", "dtype", "invariant"), [("cpu", "float32", True), ("cuda", "float32", False), ("cpu", "bfloat16", False)]
)
def test_vllm_answers_depend_on_its_schedule_but_for_float32_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, invariant: bool
) -> None:
    """The batch size, which vLLM ignores, is not part of the spec."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr("revisit.eval.engines.vllm.need", lambda *_: None)
    engine = VllmEngine("tiny", dtype="fp32")
    assert engine.dtype == "float32"
    engine.__dict__["placement"] = (device, dtype)
    items = [Item("q0", "What?")]
    assert (engine.identity(8, items)["batching"] is None) == invariant
    assert engine.identity(8, items) == engine.identity(16, items * 2)


def test_a_phase_is_part_of_a_methods_label() -> None:
    assert label(ReVisiT(phase="answer")) == "revisit(phase=answer)"
    assert label(ReVisiT()) == "revisit"


def test_a_changed_benchmark_outside_the_package_has_another_spec(tmp_path: Path) -> None:
    text = "from revisit.eval.benchmarks.pope import Pope\n\nclass Mine(Pope):\n    name = 'mine-{}'\n"
    codes = []
    for number in (1, 2):
        place = tmp_path / str(number) / "mine.py"
        place.parent.mkdir()
        place.write_text(text.format(number))
        codes.append(foreign_code(benchmarks.get(f"{place}:Mine")))
    assert [list(code) for code in codes] == [["mine.py"], ["mine.py"]]
    assert codes[0] != codes[1]
