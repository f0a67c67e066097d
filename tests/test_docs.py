"""The documentation: equations, navigation, links and the API pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert len(set(listed)) == len(listed)
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= set(listed)
    assert [page for page in listed if not page.endswith(".md")] == []


def test_equations_need_no_script() -> None:
    pytest.importorskip("latex2mathml")
    import docs_hooks

    html = docs_hooks.on_page_content(
        r'<p>With <span class="arithmatex">\(p(w) \ge \alpha\)</span> and <div class="arithmatex">\[ x &lt; y \]</div></p>'
    )
    assert html.count("<math") == 2
    assert 'display="block"' in html
    assert "&lt;" in html or "&#x0003C;" in html
    assert "\\alpha" not in html
    equations = re.findall(r"\\[(\[](.*?)\\[)\]]", (ROOT / "docs/method.md").read_text("utf-8"), re.DOTALL)
    assert len(equations) > 5
    for tex in equations:
        html = docs_hooks.on_page_content(rf'<span class="arithmatex">\({tex}\)</span>')
        assert "<math" in html
        assert re.findall(r"\\[a-z]+", html) == [], tex


def test_public_names_are_on_the_api_pages() -> None:
    pytest.importorskip("latex2mathml")
    import docs_hooks

    import revisit

    text = docs_hooks.on_page_markdown("\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md")))
    names = set(revisit.__all__) - {"methods", "MethodLike"}  # a package and a type alias
    assert [name for name in names if not re.search(rf"\.{name}$", text, re.MULTILINE)] == []


def test_table_of_models_agrees_with_the_families() -> None:
    from revisit.models.families import FAMILIES

    text = (DOCS / "models.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*`.*\|$", text, re.M)]
    found = {name: cells for first, *cells in rows for name in re.findall(r"\(`(\w+)`\)", first)}
    expected = {
        name: ["yes" if f.vllm else "no", f.layers, "yes" if f.patch_map else "not known"]
        for name, f in FAMILIES.items()
        if f.title
    }
    assert found == expected
    sentence = " ".join(text[: text.index("need torchvision")].split())
    needing = {f.title.split(",")[0].removesuffix(" 4.6") for f in FAMILIES.values() if f.title and f.needs}
    assert [title for title in needing if title not in sentence] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as mkdocs and GitHub derive them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    dead = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and not anchor.startswith("only-") and anchor not in headings(linked)):
            dead.append(target)
    assert dead == []


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    found = set(re.findall(r"[\w./-]+/(?:[\w-]+\.\w+)?(?=[\s`:|),])", text)) - {"methods/NAME.py", "OUT/logs/"}
    assert len(found) > 60
    places = [ROOT / place for place in (".", "src/revisit", "src/revisit/eval", "src/revisit/step")]
    assert [name for name in sorted(found) if not any((place / name).exists() for place in places)] == []
    for name, words in re.findall(r"`(\w+)` (?:within `\w+` )?(?:in|\()\s?`?([\w/]+\.py)`", text):
        file = next(
            place / words for place in (*places, ROOT / "src/revisit/eval/benchmarks") if (place / words).exists()
        )
        assert re.search(rf"\b{name}\b", file.read_text("utf-8")), (name, words)


def test_pages_named_in_the_code_exist() -> None:
    code = [
        file.read_text("utf-8") for file in ROOT.glob("*/**/*.py") if not file.parts[len(ROOT.parts)].startswith(".")
    ]
    assert [page for page in re.findall(r"docs/[\w/-]+\.md", "\n".join(code)) if not (ROOT / page).exists()] == []
