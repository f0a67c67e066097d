"""The documentation: equations become MathML, every page is in the navigation, and no script is published as a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert len(set(listed)) == len(listed)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(listed)
    assert [page for page in listed if not page.endswith(".md")] == []


def test_equations_need_no_script() -> None:
    pytest.importorskip("latex2mathml")
    import docs_math

    made = docs_math.on_page_content(
        r'<p>With <span class="arithmatex">\(p(w) \ge \alpha\)</span> and <div class="arithmatex">\[ x &lt; y \]</div></p>'
    )
    assert made.count("<math") == 2
    assert 'display="block"' in made
    assert "&lt;" in made or "&#x0003C;" in made
    assert "\\alpha" not in made
    equations = re.findall(r"\\[(\[](.*?)\\[)\]]", (ROOT / "docs/method.md").read_text("utf-8"), re.DOTALL)
    assert len(equations) > 5
    for tex in equations:
        shown = docs_math.on_page_content(rf'<span class="arithmatex">\({tex}\)</span>')
        assert "<math" in shown
        assert re.findall(r"\\[a-z]+", shown) == [], tex


def test_public_names_are_on_the_api_page() -> None:
    import revisit

    text = (ROOT / "docs/api.md").read_text("utf-8")
    names = set(revisit.__all__) - {"methods"}  # the package, whose classes are on the page
    assert [name for name in names if not re.search(rf"\.{name}$", text, re.MULTILINE)] == []
