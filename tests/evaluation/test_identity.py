"""What changes the identity of an answer, and what does not."""

from __future__ import annotations

import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from revisit import methods
from revisit.evaluation import identity


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this package that a test may edit."""
    copy = tmp_path / "revisit"
    for name in (*identity.PACKAGES, "methods", "evaluation", "integrations", "studies"):
        shutil.copytree(identity.PACKAGE / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(identity, "PACKAGE", copy)
    return copy


def code(engine: str) -> str:
    identity.engine_code.cache_clear()
    return identity.engine_code(engine)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} does not contain {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_error_texts_docstrings_and_comments_keep_every_answer(package: Path) -> None:
    before = code("local"), code("vllm")
    for path in sorted(package.rglob("*.py")):
        path.write_text("# A comment.\n" + path.read_text())
    edit(package / "models/prompts.py", "which stands for an image in this model", "which means a picture here")
    edit(package / "decoding/method.py", '"""What every decoding method is', '"""What a method is')
    assert (code("local"), code("vllm")) == before


def test_a_formula_changes_every_answer_and_the_plug_in_only_vllms(package: Path) -> None:
    local, vllm = code("local"), code("vllm")
    reference = package / "step/reference.py"
    reference.write_text(reference.read_text() + "\nEXTRA = 1\n")
    changed = code("local"), code("vllm")
    assert changed[0] != local
    assert changed[1] != vllm
    head = package / "integrations/vllm/head.py"
    head.write_text(head.read_text() + "\nEXTRA = 1\n")
    assert code("local") == changed[0]
    assert code("vllm") != changed[1]


def test_the_compiled_step_counts_without_its_comments(package: Path) -> None:
    before = code("local")
    (kernel,) = package.glob("step/**/*.c")
    kernel.write_text("/* a comment\n   of two lines */ // and one more\n" + kernel.read_text())
    assert code("local") == before
    kernel.write_text(kernel.read_text() + "\nint extra(void) { return 1; }\n")
    assert code("local") != before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 1  # one\n", "x = 1\n", True),
        ('def f():\n    """Doc."""\n    return 1\n', "def f():\n    return 1\n", True),
        ('raise RevisitError(f"a {x} b")', 'raise RevisitError("c")', True),
        ('return RevisitError("a" + "b")', 'return RevisitError("c")', True),
        ('logger.warning("a %s", x)', 'logger.warning("b %s", x)', True),
        ('class A:\n    summary = "a"\n    alpha = 1\n', 'class A:\n    summary = "b"\n    alpha = 1\n', True),
        ('x = "a"\n', 'x = "b"\n', False),
        ('f("a")\n', 'f("b")\n', False),
        ("if x > 1:\n    raise RevisitError('a')", "if x > 2:\n    raise RevisitError('a')", False),
        ("raise RevisitError('a')", "raise KeyError('a')", False),
        ("x = a + b\n", "x = a - b\n", False),
    ],
)
def test_what_counts_as_meaning(one: str, other: str, same: bool) -> None:
    indented = [text.replace("return Rev", "def f():\n    return Rev") for text in (one, other)]
    assert (identity.python_meaning(indented[0]) == identity.python_meaning(indented[1])) is same


def test_c_texts_that_look_like_comments_are_kept() -> None:
    assert identity.c_meaning('s = "/* no comment */"; // yes\n') == 's = "/* no comment */";'
    assert identity.c_meaning("a /* b */ c\n\n  d\n") == "a c\nd"


def test_a_method_has_the_code_of_its_own_modules_only() -> None:
    greedy, vcd, sid = (identity.method_code(methods.get(name)) for name in ("greedy", "vcd", "sid"))
    assert len({greedy, vcd, sid}) == 3
    chain = identity.method_code(methods.get("chain", methods="vcd,revisit"))
    other = identity.method_code(methods.get("chain", methods="sid,revisit"))
    assert chain != other


def test_a_method_outside_the_package_is_known_by_its_file(tmp_path: Path) -> None:
    text = (
        "from dataclasses import dataclass\nfrom revisit.decoding.plain import Plain\n\n\n"
        "@dataclass(frozen=True)\nclass Own(Plain):\n    '''Doc.'''\n    factor: float = 1.0\n"
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

    first = identity.method_code(load("a", text))
    assert identity.method_code(load("b", text.replace("Doc.", "Documented."))) == first
    assert identity.method_code(load("c", text.replace("1.0", "2.0"))) != first
