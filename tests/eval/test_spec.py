"""The identity of answers: labels, code from outside this package, and a model's device, dtype and weights."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_grid import Letters

import revisit
from families import build, image
from revisit import ReVisiT
from revisit.decoding.method_id import MethodId
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.pope import Pope
from revisit.eval.engines.local import LocalEngine
from revisit.eval.engines.vllm import VllmEngine
from revisit.eval.spec import label
from revisit.methods.chain import Chain
from revisit.methods.greedy import Greedy
from revisit.models.identity import foreign_code, loaded_fingerprint
from revisit.models.loading import load
from revisit.models.prompts import prepare
from revisit.registry import class_from_file


def test_labels_have_the_settings_that_are_not_default() -> None:
    assert [MethodId.of(ReVisiT()), MethodId.of(ReVisiT(phase="answer"))] == ["revisit", "revisit(phase=answer)"]
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


TYPED = """
import functools, threading, typing, numpy, revisit, torch
GLOBAL, TABLE, LOCK = [0, {"a": {1, 2}}], torch.ones(2), threading.Lock()
@functools.cache
def table(x): return [x, 5]
@torch.no_grad()
def shift(x): return x + 7
class Meta(type): size = property(lambda cls: 11)
class Sized(metaclass=Meta): pass
def helper(x, k=1): return Sized.size + x * k + GLOBAL[0] + table(x)[1] + shift(x)
def decorate(function): return functools.wraps(function)(lambda *values: function(*values))
class Base(revisit.Greedy):
    constant: typing.ClassVar = 3
    size: int = 2
    @property
    def scale(self): return helper(2)
    @classmethod
    def of(cls): return (lambda: TABLE.sum())()
    @staticmethod
    def shape(): return numpy.ones(3)
    @decorate
    def begin(self, prompt, passes): return functools.partial(max, 4)
class Own(Base):
    name = "own"
"""


def typed(source: str, path: str = "<stdin>") -> set[str]:
    """Return the code of a class that was typed into an interpreter."""
    scope: dict[str, Any] = {"__name__": "typed"}
    exec(compile(source, path, "exec", dont_inherit=True), scope)
    return foreign_code(scope["Own"]())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ClassVar = 3", "ClassVar = 4"),
        ("return helper(2)", "return helper(3)"),
        ("TABLE.sum()", "TABLE.max()"),
        ("numpy.ones(3)", "numpy.zeros(3)"),
        ("max, 4", "max, 5"),
        ("k=1", "k=2"),
        ("x * k", "x + k"),
        ("[x, 5]", "[x, 6]"),
        ("lambda cls: 11", "lambda cls: 12"),
        ("return x + 7", "return x + 8"),
        ("GLOBAL, TABLE, LOCK = [0", "GLOBAL, TABLE, LOCK = [1"),
        ("{1, 2}", "{1, 3}"),
        ("torch.ones(2)", "torch.zeros(2)"),
        ("function(*values))", "function(*values) or 0)"),
    ],
)
def test_typed_code_is_identified_with_all_that_it_refers_to(old: str, new: str) -> None:
    assert TYPED.count(old) == 1
    assert (
        typed(TYPED) == typed("\n# another cell\n" + TYPED, "/tmp/ipykernel_7/1.py") != typed(TYPED.replace(old, new))
    )


def test_typed_code_has_the_same_identity_after_a_restart() -> None:
    code = (
        f"scope = {{'__name__': 'typed'}}; exec({TYPED!r}, scope)\nfrom revisit.models.identity import foreign_code\n"
    )
    code += "print(*sorted(foreign_code(scope['Own']())), sep='\\n')"
    prints = set()
    for seed in "12":  # of the hashes of text, on which the order of sets depends
        variables = {**os.environ, "PYTHONHASHSEED": seed}
        prints.add(subprocess.run([sys.executable, "-c", code], env=variables, text=True, stdout=-1, check=True).stdout)
    assert prints == {"\n".join(sorted(typed(TYPED))) + "\n"}


def test_what_cannot_be_identified_is_never_used_again(caplog: pytest.LogCaptureFixture) -> None:
    source = TYPED.replace("return helper(2)", "return LOCK")
    assert typed(source) != typed(source)
    assert "Own cannot be identified (it refers to a lock)" in caplog.text


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


class Adapter(torch.nn.Module):
    """An adapter as peft's: its state decides what it adds to the layer that it replaces."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.active, self.scaling, self.merged, self.disabled = layer, ["a"], {"a": 1.0}, [], False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states) * (1 if self.disabled else 1 + self.scaling[self.active[0]])


def steer(by: float) -> Any:
    return lambda module, inputs, output: output + by


def test_a_loaded_model_is_identified_by_its_adapters_hooks_and_functions() -> None:
    model, processor = copy.deepcopy(build("llava"))
    mlp = model.get_decoder().layers[0].mlp
    plain = LocalEngine((model, processor)).fingerprint
    revisit.generate(model, **prepare(processor, "What?", image(0)), method="revisit", max_new_tokens=2)
    assert loaded_fingerprint(model, processor) == plain  # transformers adds hooks of its own
    mlp.up_proj = Adapter(mlp.up_proj)
    prints = [plain, loaded_fingerprint(model, processor)]
    for name, value in (("active", ["b"]), ("scaling", {"a": 0.5}), ("merged", ["a"]), ("disabled", True)):
        setattr(mlp.up_proj, name, value)
        prints.append(loaded_fingerprint(model, processor))
    for by in (1.0, 2.0):
        with mlp.register_forward_hook(steer(by)):
            prints.append(loaded_fingerprint(model, processor))
            assert loaded_fingerprint(model, processor) == prints[-1]
    assert loaded_fingerprint(model, processor) == prints[5]
    mlp.act_fn.forward = torch.nn.functional.relu
    prints.append(loaded_fingerprint(model, processor))
    mlp.act_fn.forward = functools.partial(torch.mul, 2)
    prints.append(loaded_fingerprint(model, processor))
    assert len(set(prints)) == len(prints)
    with mlp.register_forward_hook(steer(threading.Lock())):  # type: ignore[arg-type]
        assert len({loaded_fingerprint(model, processor) for _ in range(2)}) == 2


def test_weights_that_cannot_be_read_are_not_identified(caplog: pytest.LogCaptureFixture) -> None:
    model, processor = copy.deepcopy(build("llava"))
    model.get_decoder().layers[0].mlp.up_proj.to("meta")
    assert loaded_fingerprint(model, processor).startswith("unidentified")
    assert "off-loaded" in caplog.text


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
