"""Methods by name: built in, registered, from a file, from an installed package; and whatever else names a method."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import revisit
from revisit.decoding import plugins, registry
from revisit.decoding.plain import Plain
from revisit.errors import RevisitError
from revisit.methods import as_method, find, names, parse_method, register

FILE = """
from dataclasses import dataclass
from revisit.decoding.plain import Plain

@dataclass(frozen=True)
class Mine(Plain):
    weight: float = 1.0
    name = "mine"

class Other:
    pass

class Forgotten(Plain):
    weight: float = 1.0
    name = "forgotten"

class Vcd(Plain):
    name = "vcd"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    "given",
    ["vcd:alpha=2", {"name": "vcd", "alpha": 2}, revisit.VCD(alpha=2.0)],
    ids=["text", "mapping", "method"],
)
def test_what_names_a_method(given: Any) -> None:
    assert as_method(given) == revisit.VCD(alpha=2.0)
    assert as_method(given, beta="0.3") == revisit.VCD(alpha=2.0, beta=0.3)


def test_a_class_or_nothing_names_a_method_too() -> None:
    assert as_method(revisit.ReVisiT) == revisit.ReVisiT()
    assert as_method(revisit.ReVisiT, alpha="0.1") == revisit.ReVisiT(alpha=0.1)
    assert as_method(None) == Plain()


def test_a_name_takes_what_is_recommended_for_the_model_and_a_method_keeps_its_own() -> None:
    assert as_method("revisit", "qwen2_5_vl").layers == "all"  # type: ignore[attr-defined]
    assert as_method(revisit.ReVisiT, "qwen2_5_vl").layers == "all"  # type: ignore[attr-defined]
    assert as_method("revisit:layers=low", "qwen2_5_vl").layers == "low"  # type: ignore[attr-defined]
    assert as_method(revisit.ReVisiT(), "qwen2_5_vl").layers == "last"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("ReVisiT", "Did you mean 'revisit'"),
        ("vdc", "Did you mean 'vcd'"),
        (3, "must be a decoding method"),
        (dict, "must be a decoding method"),
        ("revisit:all", "settings are key=value"),
        ("nowhere.py:Mine", "There is no file"),
    ],
)
def test_what_names_no_method(given: Any, sentence: str) -> None:
    with pytest.raises(RevisitError, match=sentence):
        as_method(given)


def test_a_file_gives_a_class_that_its_name_finds_from_then_on(file: Path) -> None:
    with pytest.raises(RevisitError, match="Unknown method 'mine'"):
        find("mine")
    made: Any = as_method(f"{file}:Mine:weight=2")
    assert (made.name, made.weight) == ("mine", 2.0)
    assert find("mine") is type(made)
    assert parse_method(f"{file}:Mine") == ("mine", {})  # the file runs once
    assert as_method("mine:weight=2") == made
    assert "mine" in names()


def test_another_process_takes_the_class_from_the_same_file(file: Path) -> None:
    sent = pickle.dumps(as_method(f"{file}:Mine:weight=2"))
    code = "import pickle, sys; method = pickle.load(sys.stdin.buffer); print(method.name, method.weight)"
    said = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout
    assert said.split() == [b"mine", b"2.0"]


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        ("Missing", "has no class 'Missing'"),
        ("Other", "must be a class derived from revisit.Method"),
        ("Forgotten", "put @dataclass"),
        ("Vcd", "there is a method named 'vcd' already"),
    ],
)
def test_classes_of_a_file_that_cannot_be_used(file: Path, cls: str, sentence: str) -> None:
    with pytest.raises(RevisitError, match=sentence):
        as_method(f"{file}:{cls}")


def test_a_file_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(RevisitError, match="could not be run: ZeroDivisionError"):
        as_method(f"{broken}:Mine")


def test_the_decorator() -> None:
    @register
    @dataclass(frozen=True)
    class Mine(Plain):
        name = "decorated"

    assert as_method("decorated") == Mine()
    with pytest.raises(RevisitError, match="already"):

        @register
        @dataclass(frozen=True)
        class Again(Plain):
            name = "decorated"


def test_an_installed_package_offers_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("packaged", "revisit.methods.apc:APC", registry.GROUP)
    bad = EntryPoint("broken", "revisit.nowhere:Nothing", registry.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [good, bad] if group == registry.GROUP else [])
    assert {"packaged", "broken"} <= set(names())
    assert find("packaged") is revisit.APC
    with pytest.raises(RevisitError, match="could not be loaded: ModuleNotFoundError"):
        find("broken")


def test_a_request_cannot_have_a_file_run(file: Path) -> None:
    from revisit.methods import get

    with pytest.raises(RevisitError, match="Unknown method"):
        get(f"{file}:Mine")
