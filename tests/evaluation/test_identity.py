"""What changes the identity of an answer beside its settings: the files of methods from outside this package."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from revisit import methods
from revisit.evaluation.identity import foreign_code
from revisit.methods.chain import Chain


def test_a_method_outside_the_package_is_known_by_its_file(tmp_path: Path) -> None:
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
