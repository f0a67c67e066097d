"""The identity of answers: labels, code from outside this package, and a model's device, dtype and weights."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_grid import Letters

import revisit
from families import build
from revisit import ReVisiT
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.pope import Pope
from revisit.eval.engines.local import LocalEngine
from revisit.eval.engines.vllm import VllmEngine
from revisit.eval.spec import command_line, environment, foreign_code, label, loaded_fingerprint
from revisit.methods.chain import Chain
from revisit.methods.greedy import Greedy
from revisit.models.loading import load
from revisit.registry import class_from_file


def test_labels_have_the_settings_that_are_not_default() -> None:
    assert [label(ReVisiT()), label(ReVisiT(phase="answer"))] == ["revisit", "revisit(phase=answer)"]
    assert label(Letters(suffix="x")) == "letters(suffix=x)"


@pytest.mark.parametrize("base", [Greedy, Pope])
def test_code_from_outside_is_identified_by_its_file(tmp_path: Path, base: type[Any]) -> None:
    source = f"from {base.__module__} import {base.__name__}\n\n\nclass Own({base.__name__}):\n    name = 'own'\n"
    parts = []
    for folder, text in (("a", source), ("b", source), ("c", source + "# changed\n")):
        path = tmp_path / folder / "own.py"
        path.parent.mkdir()
        path.write_text(text)
        parts.append(class_from_file(path, "Own", "class")())
    first, same, changed = map(foreign_code, parts)
    assert [text.split()[0] for text in first] == ["own.py"]
    assert first == same != changed
    assert foreign_code(type("Derived", (type(parts[0]),), {"__module__": "revisit.derived"})()) == first
    if base is Greedy:
        assert foreign_code(Chain(methods=(parts[0], parts[2]))) == first | changed  # two files with one name
        assert foreign_code(Chain(methods=("vcd", "revisit"))) == set()


def test_code_from_outside_includes_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_formula.py").write_text("import json\n\n\ndef weight():\n    return 1\n")
    path = tmp_path / "own.py"
    path.write_text(
        "from own_formula import weight\nfrom revisit import Greedy\n\n\nclass Own(Greedy):\n    name = 'own'\n"
    )
    code = foreign_code(class_from_file(path, "Own", "class")())
    assert {text.split()[0] for text in code} == {"own.py", "own_formula.py"}


def test_code_without_a_file_is_identified_by_its_functions() -> None:
    found = []
    for power in (1, 1, 2):
        scope: dict[str, Any] = {"__name__": "typed"}
        exec(f"import revisit\nclass Own(revisit.Greedy):\n name = 'own'\n def begin(self, run): return {power}", scope)
        found.append(foreign_code(scope["Own"]()))
    assert found[0] == found[1] != found[2]


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


def test_a_loaded_model_is_identified_by_its_weights_and_settings() -> None:
    model, processor = copy.deepcopy(build("llava"))
    engine = LocalEngine((model, processor))
    assert engine.placement == ("cpu", "float32")
    prints = [engine.identity(8, [])["fingerprint"]]
    processor.chat_template = "{{ messages }}"
    prints.append(loaded_fingerprint(model, processor))
    processor.image_processor.do_normalize = False
    prints.append(loaded_fingerprint(model, processor))
    model.generation_config.repetition_penalty = 1.5
    prints.append(loaded_fingerprint(model, processor))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    prints.append(loaded_fingerprint(model, processor))
    assert len(set(prints)) == 5


def test_a_loaded_model_is_the_same_from_any_folder(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    first, second = (loaded_fingerprint(*load(path)) for path in (model_folder, folder))
    assert first == second


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


def test_the_environment_has_no_commit_of_another_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may be inside the user's repository; git would report that one's commit."""
    start, started = subprocess.Popen, []

    def record(command: Any, *args: Any, **kwargs: Any) -> Any:
        started.append(command)
        return start(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", record)
    assert environment()["revisit"] == revisit.__version__
    assert [command for command in started if "git" in command] == []


@pytest.mark.parametrize(
    ("program", "name"),
    [("/bin/revisit", "revisit"), ("/lib/revisit/__main__.py", "revisit"), ("/lib/pytest/__main__.py", "pytest")],
)
def test_the_command_line_starts_with_the_program(monkeypatch: pytest.MonkeyPatch, program: str, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "eval"])
    assert command_line() == [name, "eval"]
