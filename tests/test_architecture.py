"""The packages of revisit import each other one way; ARCHITECTURE.md shows the graph that is measured here."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from html import escape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "revisit"
PICTURE = ROOT / "docs" / "images" / "packages.svg"
OUTSIDE = ("__init__", "__main__")  # they only point to others, by name

Graph = dict[str, set[str]]


def package_graph(source: Path = SOURCE) -> Graph:
    """Which package (or top-level module) imports which, imports inside functions included, annotations' imports not."""
    rooms = {path.stem if path.suffix else path.name for path in source.iterdir() if path.suffix in ("", ".py")}
    graph: Graph = defaultdict(set)
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).with_suffix("").parts[0]
        if room in OUTSIDE:
            continue
        graph[room] |= {name for name in imported(ast.parse(path.read_text("utf-8"))) if name in rooms and name != room}
    return dict(graph)


def imported(tree: ast.Module) -> set[str]:
    """The first name below `revisit` of everything a module imports."""
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            paths = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {parts[1] for path in paths if (parts := path.split("."))[0] == "revisit" and len(parts) > 1}
    return found


def levels(graph: Graph) -> list[list[str]]:
    """The packages from the bottom up: each imports only from the levels below it."""
    sorter, result = TopologicalSorter(graph), []
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        result.append(ready)
        sorter.done(*ready)
    return result


def draw(graph: Graph) -> str:
    """The graph as an SVG picture, users at the top; an edge that longer ways imply is left out."""
    rows = levels(graph)[::-1]
    width, height, step = 118, 30, 78
    place = {
        name: ((column + 0.5) * 1000 / len(row), 30 + number * step)
        for number, row in enumerate(rows)
        for column, name in enumerate(row)
    }

    def reaches(start: str, end: str) -> bool:
        return any(name == end or reaches(name, end) for name in graph.get(start, ()))

    lines = []
    for room, used in sorted(graph.items()):
        for other in sorted(used):
            if not any(reaches(between, other) for between in used - {other}):
                (x, y), (u, v) = place[room], place[other]
                lines.append(
                    f'<path d="M{x:.0f} {y + height / 2:.0f} C{x:.0f} {y + step / 2:.0f} {u:.0f} {v - step / 2:.0f} {u:.0f} '
                    f'{v - height / 2:.0f}" fill="none" stroke="#8892a6" marker-end="url(#a)"/>'
                )
    for name, (x, y) in sorted(place.items()):
        lines.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width}" height="{height}" rx="6" fill="#eef2fb" '
            f'stroke="#4263a8"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{escape(name)}</text>'
        )
    total = 60 + (len(rows) - 1) * step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {total}" font-family="sans-serif" font-size="14">\n'
        '<marker id="a" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
        '<path d="M0 0L7 3.5L0 7z" fill="#8892a6"/></marker>\n'
        f'<rect width="1000" height="{total}" fill="#fff"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def test_imports_point_one_way() -> None:
    try:
        levels(package_graph())
    except CycleError as error:
        pytest.fail(f"packages import each other in a circle: {' -> '.join(error.args[1])}")


def test_at_most_four_modules_lie_loose_at_the_top() -> None:
    loose = [path.name for path in SOURCE.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(loose) <= 4, loose


def test_the_picture_in_the_documentation_is_this_graph() -> None:
    assert PICTURE.read_text("utf-8") == draw(package_graph()), (
        "run `python tests/test_architecture.py` to draw it again"
    )


def test_the_page_on_the_architecture_names_every_package() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    missing = [room for room in package_graph() if f"`{room}`" not in page]
    assert not missing, f"ARCHITECTURE.md says nothing about {missing}"


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    for room, text in (("a", "from revisit.b import x"), ("b", "def f():\n    import revisit.a")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(text)
    graph = package_graph(tmp_path)
    assert graph == {"a": {"b"}, "b": {"a"}}
    with pytest.raises(CycleError):
        levels(graph)


if __name__ == "__main__":
    PICTURE.write_text(draw(package_graph()), "utf-8")
    sys.stdout.write(f"{PICTURE}\n")
