"""Write docs/numbers.json, the ledger of every measured number in README and docs: python tools/ledger.py

`sets.yaml` describes the sets: what was measured, with which seed and command, and the commit that recorded it. The
measurements are the tables of docs/research under a set's name in bold, the CSV files of `revisit compare`, and the
values in `sets.yaml`. Every other number that looks measured has to be one of them, in a paragraph or section that names
the set. `tests/test_ledger.py` compares the result with the file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "docs/numbers.json"
SET = r"[A-Z]-[A-Z]"
NUMBER = re.compile(r"(?<![\w.,^/:-])[−+±-]?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?![\w^/-]|[.,:]\d)%?")
MEASURED = re.compile(r"^(?:%|×|\s+(?:times|points|percent|ms|seconds|of \d+ (?:divisions|captions)))")


class Chunk(NamedTuple):
    """A paragraph, list or table, with the sets that it and its section name."""

    page: str
    section: str
    text: str
    sets: tuple[str, ...]  # those in bold above a table; otherwise those of the paragraph and of its section

    @property
    def is_table(self) -> bool:
        return self.text.startswith("|")


class Found(NamedTuple):
    """A number in the text, and whether it looks measured: a decimal or percent, or a number with a unit of measurement."""

    value: str
    measured: bool


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def chunks(page: Path) -> Iterator[Chunk]:
    """Yield what a page says, without its code, formulas, addresses and headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\\[.*?\\\]|\\\(.*?\\\)|<[^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    name = page.relative_to(ROOT).as_posix()
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        head, _, body = part.partition("\n") if part.startswith("#") else ("", "", part)
        bold = re.findall(rf"\*\*({SET})\*\*", body)
        above: list[str] = []
        for block in re.split(r"\n\s*\n", body):
            text = block.strip()
            if text.startswith("|"):
                yield Chunk(name, head.strip("# "), text, tuple(above))
            elif text:
                above = re.findall(rf"\*\*({SET})\*\*", text) or (above if "|" not in text else [])
                named = re.findall(rf"(?<![\w-]){SET}(?![\w-])", text)
                above = above or named
                yield Chunk(name, head.strip("# "), text, tuple(dict.fromkeys(named + bold)))


def numbers(text: str) -> Iterator[Found]:
    """Yield the numbers of a text, outside of code."""
    text = re.sub(r"`[^`]*`", "", text)
    for match in NUMBER.finditer(text):
        after = text[match.end() :]
        measured = bool(match[2]) or match[0].endswith("%") or bool(MEASURED.match(after))
        yield Found((match[1] + (match[2] or "")).replace(",", ""), measured)


def rows(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name of the row, the name of the column, and the text of each cell but the first of each row."""
    head, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    group = ""
    for first, *cells in body:
        group = first or group
        yield from ((group, column, cell) for column, cell in zip(head[1:], cells, strict=False))


def recorded(sets: dict) -> dict[str, list[dict[str, str]]]:
    """Return the measurements of each set: from tables of docs/research, from CSV files, and from `values` in sets.yaml."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in sets}
    for name, described in sets.items():
        for what, value in described.get("values", {}).items():
            found[name] += [{"value": v.value, "of": what, "from": "tools/sets.yaml"} for v in numbers(str(value))]
        if file := described.get("csv"):
            with (ROOT / file).open() as opened:
                for row in csv.DictReader(opened):
                    for key in ("value", "difference", "difference_low", "difference_high", "p_holm"):
                        if row[key]:
                            of = f"{row['method']} / {row['metric']} / {key}"
                            found[name].append({"value": row[key].lstrip("-"), "of": of, "from": file})
    for page in sorted((ROOT / "docs/research").glob("*.md")):
        for chunk in chunks(page):
            for row, column, cell in rows(chunk.text) if chunk.is_table else ():
                for name in chunk.sets:
                    where = f"{chunk.page}#{chunk.section}"
                    values = [{"value": n.value, "of": f"{row} / {column}", "from": where} for n in numbers(cell)]
                    found[name] += values
    return found


def same(quoted: str, value: str) -> bool:
    """Whether a measurement, rounded like the quoted number, equals it."""
    decimals = len(quoted.partition(".")[2])
    return abs(float(value) - float(quoted)) <= 0.5 * 10**-decimals + 1e-9


def ledger() -> tuple[dict, list[str]]:
    """Return the ledger, and what is wrong: numbers without a measurement, and sets or exceptions that nothing uses."""
    described = yaml.safe_load((ROOT / "tools/sets.yaml").read_text("utf-8"))
    sets, others = described["sets"], {page: list(map(str, v)) for page, v in described["not_measured"].items()}
    measured, wrong = recorded(sets), []
    uses: dict[str, list[str]] = {}
    unused = {(page, value) for page, values in others.items() for value in values}
    named: set[str] = set()
    quoted: set[tuple[str, str]] = set()
    for page in pages():
        for chunk in chunks(page):
            named.update(chunk.sets)
            if {chunk.page, f"{chunk.page}#{chunk.section}"} & set(described["without_measurements"]):
                continue
            defines = chunk.is_table and chunk.page.startswith("docs/research") and bool(chunk.sets)
            source = (
                sets[chunk.sets[0]].get("csv") if defines and len(chunk.sets) == 1 and chunk.sets[0] in sets else None
            )
            for cell in [cell for _, _, cell in rows(chunk.text)] if chunk.is_table else [chunk.text]:
                for number in numbers(cell):
                    known = [m for name in chunk.sets for m in measured.get(name, []) if same(number.value, m["value"])]
                    quoted.update((name, number.value) for name in chunk.sets)
                    if defines or (number.measured and known):
                        uses.setdefault(chunk.page, []).append(number.value)
                    if (defines and not source) or not number.measured:
                        continue
                    if number.value in others.get(chunk.page, []):
                        unused.discard((chunk.page, number.value))
                    elif not [m for m in known if source in (None, m["from"])]:
                        text = " ".join(cell.split())
                        place = text.find(number.value)
                        wrong.append(
                            f"{chunk.page} [{chunk.section}] {number.value}: …{text[max(place - 60, 0) : place + 40]}…"
                        )
    for name, values in measured.items():
        listed = [m for m in values if m["from"] == "tools/sets.yaml" and (name, m["value"]) not in quoted]
        wrong += [f"tools/sets.yaml: no page that names {name} has {m['value']} ({m['of']})" for m in listed]
    wrong += [f"tools/sets.yaml: no page has {value} of {page}" for page, value in sorted(unused)]
    wrong += [f"tools/sets.yaml: no page names {name}" for name in sets if name not in named]
    wrong += [f"no set is called {name}" for name in named if name not in sets]
    wrong += [f"{name} has no measurements" for name, values in measured.items() if not values]
    facts = {name: {key: sets[name][key] for key in ("what", "model", "seed", "command", "commit")} for name in sets}
    return {"sets": {name: facts[name] | {"values": measured[name]} for name in sets}, "numbers_by_page": uses}, wrong


def text(content: dict) -> str:
    """Return the ledger as JSON with one measurement on each line."""
    pretty = json.dumps(content, ensure_ascii=False, indent=1)
    return (
        re.sub(
            r"\{\n\s+(\"value\".*?)\n\s+\}", lambda m: "{" + re.sub(r"\n\s+", " ", m[1]) + "}", pretty, flags=re.DOTALL
        )
        + "\n"
    )


def main() -> None:
    content, wrong = ledger()
    if wrong:
        raise SystemExit("\n".join(wrong))
    LEDGER.write_text(text(content), "utf-8")


if __name__ == "__main__":
    main()
