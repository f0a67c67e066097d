"""The documentation: equations become MathML, every page is in the navigation, every link leads somewhere, and the wording is plain."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


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


def headings(page: Path) -> set[str]:
    """The anchors of a page, as mkdocs and GitHub derive them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    dead = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and not anchor.startswith("only-") and anchor not in headings(found)):
            dead.append(target)
    assert dead == []


# Sentences that read as translated, and what to write instead.
AWKWARD = {
    r"\bis told\b|\bare told\b|\btold apart\b": "say who says what, or 'distinguish'",
    r"\bstands? (for|twice|beside|next)\b": "'represents', 'is duplicated', 'is next to'",
    r"\bbeside\b": "'next to', 'in addition to'",
    r"\bso many\b": "a number",
    r"\bis said\b|\bas said\b|\bwhat can be said\b": "'is reported', 'is documented'",
    r"\bgets? stuck\b": "'repeats'",
    r"\bflatters?\b": "'artificially lowers'",
    r"\bmade anew\b|\bmakes .{1,30} anew\b": "'regenerated'",
    r"\bhas not as\b": "state both numbers",
    r"\ba (second|step|token|row|picture|scene|call)'s worth\b": "a plain number",
    r"\bwho mean it\b": "say what the option does",
    r"\bgoes with neither\b": "'cannot be combined with'",
    r"\b(will be|is|are) made again\b": "'regenerated'",
    r"^Say (which|where|what)\b": "'... is missing: give ...'",
    r"\bhas no meaning for\b": "'cannot be used with'",
    r"\bput (that|it|the files) right\b": "'fix'",
    r"\bwith it as best\b": "'where it ranks first'",
    r"\bsaid aloud\b|\blives on\b": "say what happens",
    r"\bthere (twice|a second time)\b": "'duplicate'",
    r"\bholds? no\b": "'contains no'",
    r"\bwants (a|an|at least|width)\b": "'needs', 'must be'",
    r"\bgoes with --": "'needs'",
    r"\bdraws nothing\b": "'does not sample'",
    r"\bdifferences? to greedy\b": "'difference from greedy'",
    r"\bthat could be found\b": "'no ... was found'",
    r"\bmay not be read\b": "'cannot be read'",
    r"\bare no numbers\b": "'not numbers'",
    r"\bby a loop of its own\b": "'has its own loop'",
    r"\bworded by us\b": "'in our words'",
    r"\blies? (on|in) (the|that|our|its)\b": "'is on', 'is in'",
}


def awkward(text: str) -> dict[str, str]:
    return {
        match.group(): hint
        for pattern, hint in AWKWARD.items()
        for match in re.finditer(f".{{0,30}}(?:{pattern}).{{0,20}}", text)
    }


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_wording_is_plain(page: Path) -> None:
    assert awkward(page.read_text("utf-8")) == {}


def messages(path: Path) -> list[str]:
    """The texts of a module that users see: every string but docstrings, and the docstrings of commands, which are their help."""
    tree = ast.parse(path.read_text("utf-8"))
    hidden = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [str(node.value) for node in strings if path.parent.name == "cli" or id(node) not in hidden]


def test_messages_and_help_are_plain() -> None:
    found = {}
    for path in sorted((ROOT / "src/revisit").rglob("*.py")):
        for text in messages(path):
            if "beneath beside between" not in text:  # a list of English words
                found |= {f"{path.name}: {match}": hint for match, hint in awkward(text).items()}
    assert found == {}
