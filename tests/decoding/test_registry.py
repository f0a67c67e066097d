"""Methods by name: built in, registered, from a file or an installed package; and other ways to specify a method."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import families
import revisit
from revisit import registry
from revisit.decoding.method import METHODS
from revisit.errors import RevisitError
from revisit.eval.config import EvalConfig
from revisit.methods import as_method, find, get, method_text, names, parse_method, parse_methods, register
from revisit.methods.greedy import Greedy
from revisit.registry import parse_entry

FILE = """
from revisit.methods.greedy import Greedy

class Mine(Greedy):
    weight: float = 1.0
    name = "mine"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(METHODS, "registered", {})
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_the_default_method_is_the_recommended_one() -> None:
    model, _ = families.build("qwen2_5_vl")
    inputs = families.inputs("qwen2_5_vl", ["What is it?"], [[families.image(1)]])
    options = {"max_new_tokens": 2, "do_sample": False}
    trace, plain = revisit.Trace(), revisit.Trace()
    revisit.generate(model, **inputs, **options, trace=trace)
    assert trace.method == {"name": "revisit", **revisit.ReVisiT(layers="all").settings()}
    revisit.generate(model, **inputs, **options, method="greedy", trace=plain)
    assert plain.method == {"name": "greedy"}


def test_a_name_takes_recommended_settings_and_an_instance_keeps_its_own() -> None:
    assert as_method("revisit", "qwen2_5_vl").layers == "all"  # type: ignore[attr-defined]
    assert as_method(revisit.ReVisiT, "qwen2_5_vl").layers == "all"  # type: ignore[attr-defined]
    assert as_method("revisit:layers=low", "qwen2_5_vl").layers == "low"  # type: ignore[attr-defined]
    assert as_method(revisit.ReVisiT(), "qwen2_5_vl").layers == "last"  # type: ignore[attr-defined]


@pytest.mark.parametrize("off", [None, "off", "None"])
def test_no_method_is_plain_decoding(off: Any) -> None:
    assert as_method(off) == as_method(off, "llava") == as_method("greedy")
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    revisit.generate(model, **inputs, method=off, trace=(trace := revisit.Trace()), max_new_tokens=2)
    assert trace.method == {"name": "greedy"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ReVisiT", "Did you mean 'revisit'"),
        ("vdc", "Did you mean 'vcd'"),
        (3, "plain decoding is 'greedy'"),
        (dict, "must be a decoding method"),
        ("nowhere.py:Mine", "There is no file"),
        ("revisit:alpha=1e-5,alpha=1e-2", "alpha"),
        ("greedy,revisit:alpha=1", "separately"),
        ("chain:methods=[greedy,vcd:alpha=2]", "semicolons"),
        ("chain:methods=[revisit", r"\[revisit"),
        ("revisit:layers=(0,2]", "layers"),
        ("revisit:all", "'all'"),
        ("revisit:=3", "=3"),
        ({"alpha": 1}, "name"),
        (":alpha=1", "name"),
    ],
)
def test_wrong_methods_raise(spec: Any, message: str) -> None:
    with pytest.raises(RevisitError, match=message):
        as_method(spec)


def test_a_class_from_a_file_is_registered(file: Path) -> None:
    with pytest.raises(RevisitError, match="Unknown method 'mine'"):
        find("mine")
    method: Any = as_method(f"{file}:Mine:weight=2")
    assert (method.name, method.weight) == ("mine", 2.0)
    assert find("mine") is type(method)
    assert parse_method(f"{file}:Mine") == ("mine", {})  # the file runs once
    assert as_method("mine:weight=2") == method
    assert "mine" in names()


def test_another_process_loads_the_class_from_the_same_file(file: Path) -> None:
    pickled = pickle.dumps(as_method(f"{file}:Mine:weight=2"))  # as Ray does to send a method to a worker
    code = "import pickle, sys; method = pickle.load(sys.stdin.buffer); print(method.name, method.weight)"
    output = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True).stdout
    assert output.split() == [b"mine", b"2.0"]


BROKEN = """
from __future__ import annotations
from revisit import Method
from revisit.methods.greedy import Greedy

class NoBegin(Method):
    name = "no-begin"

class Nothing(Method):
    name = "nothing"

    def begin(self, prompt, passes):
        prompt.vision

class Short(Method):
    name = "short"

    def begin(self, prompt, passes):
        return lambda input_ids, logits: logits[:, :5]

class Array(Method):
    name = "array"

    def begin(self, prompt, passes):
        return lambda input_ids, logits: logits.numpy()
"""


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        ("NoBegin", "NoBegin cannot decode: it must have a method begin"),
        ("Nothing", "The method 'nothing' cannot decode: its begin.* not NoneType"),
        ("Short", r"The method 'short' must return logits of the same shape, \(1, 512\), not \(1, 5\)"),
        ("Array", r"The method 'array' must return logits .* not ndarray"),
    ],
)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "in a chain"])
def test_broken_classes_from_a_file_raise_one_sentence(tmp_path: Path, cls: str, message: str, chained: bool) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    named = f"{tmp_path}/broken.py:{cls}"
    with pytest.raises(RevisitError, match=message):
        revisit.generate(model, **inputs, method=f"chain:methods={named}" if chained else named, max_new_tokens=2)


def test_the_decorator_registers_a_class_once(tmp_path: Path) -> None:
    @register
    class Mine(Greedy):
        name = "decorated"

    assert as_method("decorated") == Mine()
    again = "import revisit\n\n@revisit.methods.register\nclass Mine(revisit.PlausibleOnly):\n    name = 'decorated'\n"
    (tmp_path / "again.py").write_text(again)
    with pytest.raises(
        RevisitError, match=r"a method named 'decorated' already exists; choose another name\.$"
    ) as raised:
        as_method(f"{tmp_path}/again.py:Mine")
    assert ".." not in str(raised.value)


def test_an_installed_package_adds_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("packaged", "revisit.methods.plausible_only:PlausibleOnly", "revisit.methods")
    bad = EntryPoint("broken", "revisit.nowhere:Nothing", "revisit.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [good, bad] if group == "revisit.methods" else [])
    assert {"packaged", "broken"} <= set(names())
    assert find("packaged") is revisit.PlausibleOnly
    with pytest.raises(RevisitError, match="could not be loaded: ModuleNotFoundError"):
        find("broken")


def test_a_request_cannot_run_a_file(file: Path) -> None:
    with pytest.raises(RevisitError, match="Unknown method"):
        get(f"{file}:Mine")


@pytest.mark.parametrize(
    "text",
    [
        "greedy",
        "revisit:alpha=0.01,layers=[0,2]",
        "revisit:normalize=false",
        "pai:gamma=none",
        "chain:methods=[vcd:alpha=0.5;revisit]",
        "icd:sentence=One, two: three.",
    ],
)
def test_the_text_of_a_method_specifies_the_same_method(text: str) -> None:
    method = as_method(text)
    assert as_method(method_text(method.name, method.settings())) == method


def test_the_text_of_a_method_omits_defaults() -> None:
    settings = get("chain", methods="vcd:alpha=0.5;revisit").settings()
    assert method_text("chain", settings) == "chain:methods=[vcd:alpha=0.5;revisit]"
    assert method_text("vcd", get("vcd").settings()) == "vcd"
    assert method_text("from-elsewhere", {"flag": True}) == "from-elsewhere:flag=true"


# -- methods and settings in text: one grammar for the command line, YAML, ablations and requests --------------------------


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("vcd", "vcd", {}),
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


def test_a_chain_in_text_is_one_method() -> None:
    text = "chain:methods=vcd,revisit"
    chain = revisit.Chain([revisit.VCD(), revisit.ReVisiT()])
    assert as_method(text) == chain
    (planned,) = EvalConfig(method=[text]).methods_for("tiny")
    assert [link.name for link in planned.methods] == ["vcd", "revisit"]
    assert as_method("chain:methods=[vcd:alpha=2;revisit:layers=0,2]") == revisit.Chain(
        [revisit.VCD(alpha=2.0), revisit.ReVisiT(layers=(0, 2))]
    )


@pytest.mark.parametrize("text", ["pope:settings=coco_random,LLaVA-Bench", "LLaVA-Bench,pope:settings=coco_random"])
def test_a_benchmark_with_settings_in_a_list_of_names_raises(text: str) -> None:
    with pytest.raises(RevisitError):
        _ = EvalConfig(benchmark=text).benchmarks


def test_named_links_take_recommended_settings_and_objects_keep_theirs() -> None:
    recommended = revisit.ReVisiT.recommended("qwen2_5_vl")
    assert recommended != revisit.ReVisiT()
    for named in ("chain:methods=vcd,revisit", "chain:methods=[vcd,revisit]", revisit.Chain(["vcd", "revisit"])):
        assert as_method(named, "qwen2_5_vl") == revisit.Chain([revisit.VCD(), recommended])
    assert as_method(revisit.Chain([revisit.VCD, revisit.ReVisiT]), "qwen2_5_vl") == revisit.Chain(["vcd", recommended])
    fixed = revisit.Chain([revisit.VCD(), revisit.ReVisiT()])
    assert as_method(fixed, "qwen2_5_vl") == fixed
    assert as_method({"name": "chain", **fixed.settings()}, "qwen2_5_vl") == fixed  # as in a trace
    assert as_method("chain:methods=[revisit:layers=low]", "qwen2_5_vl").methods[0].layers == "low"  # type: ignore[attr-defined]
