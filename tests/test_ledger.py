"""docs/numbers.json: every measured number in README and docs has a source, and every source is used."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
ledger = importlib.import_module("ledger")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy what the ledger reads; return the copy."""
    for file in [*ledger.pages(), *(ROOT / "docs").rglob("*.csv"), ROOT / "tools/sets.yaml"]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    return tmp_path


def test_the_ledger_is_current() -> None:
    content, wrong = ledger.ledger()
    assert wrong == []
    assert ledger.LEDGER.read_text("utf-8") == ledger.text(content), "run python tools/ledger.py"


def test_every_set_says_how_to_measure_it_again() -> None:
    for name, described in json.loads(ledger.LEDGER.read_text("utf-8"))["sets"].items():
        assert described["values"], name
        assert [key for key in ("what", "command", "commit", "seed") if described[key] in ("", None)] == [], name


def changed_digit(text: str, number: str, dice: random.Random) -> str:
    """Change one digit of one occurrence of a number outside of code."""
    places = [m for m in ledger.NUMBER.finditer(text) if number in m[0].replace(",", "")]
    match = dice.choice(places)
    digits = [place for place in range(match.start(), match.end()) if text[place].isdigit()]
    place = dice.choice(digits)
    return text[:place] + str((int(text[place]) + dice.randint(1, 9)) % 10) + text[place + 1 :]


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("README.md", "81"),
        ("docs/choose.md", "69.9"),
        ("docs/choose.md", "31.5"),
        ("docs/production.md", "2.487"),
        ("docs/research/note.md", "63.5"),
        ("docs/research/results.md", "26.6"),
        ("docs/research/methods.md", "2.08"),
        ("docs/research/guarantee.md", "54.8"),
    ],
)
def test_one_changed_digit_is_noticed(page: str, number: str, copy: Path) -> None:
    for seed in range(3):
        original = (copy / page).read_text("utf-8")
        (copy / page).write_text(changed_digit(original, number, random.Random(seed)), "utf-8")
        content, wrong = ledger.ledger()
        (copy / page).write_text(original, "utf-8")
        assert wrong or ledger.text(content) != ledger.LEDGER.read_text("utf-8")


def test_a_number_without_a_source_is_named(copy: Path) -> None:
    page = copy / "README.md"
    page.write_text(page.read_text("utf-8") + "\nOn U-B it reaches 99.7% of them.\n", "utf-8")
    assert [line for line in ledger.ledger()[1] if "99.7" in line]


def test_a_table_that_differs_from_its_csv_file_is_named(copy: Path) -> None:
    page = copy / "docs/research/note.md"
    page.write_text(page.read_text("utf-8").replace("| greedy | 81.0 |", "| greedy | 81.4 |"), "utf-8")
    assert [line for line in ledger.ledger()[1] if "81.4" in line]


def test_a_measurement_that_no_page_quotes_is_named(copy: Path) -> None:
    sets = copy / "tools/sets.yaml"
    sets.write_text(
        sets.read_text("utf-8").replace("{ratio to a plain pass: 1.09}", '{ratio to a plain pass: "1.09, 7.77"}'),
        "utf-8",
    )
    assert [line for line in ledger.ledger()[1] if "7.77" in line]
