"""How methods (and benchmarks) are written in text: on a command line, in YAML, in a request.

    entry:  name  |  name:key=value,key=value        settings may also be separated by colons
    list:   entry,entry,...

A comma belongs to the entry before it if what follows is another `key=value`, or if the entry has a setting whose value
can go on: inside brackets, after numbers (`layers=0,2,4`), and in a list of methods, so that `chain:methods=vcd,revisit` is
one chain wherever it is written. Write other methods before such a chain, or `chain:methods=[vcd,revisit],greedy`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from revisit.errors import RevisitError

LIST_OF_METHODS = "methods"  # the setting whose value is a list of entries itself
KEY = re.compile(r"\s*[A-Za-z_][\w.]*\s*=")
BRACKETS = {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}


def parse_entry(entry: Any, kind: str = "method") -> tuple[str, dict[str, Any]]:
    """(name, settings) of `name`, `name:key=value,key=value`, or `{name: ..., key: value}`."""
    if isinstance(entry, Mapping):
        if "name" not in entry:
            raise RevisitError(f"A {kind} with settings needs its name: {{name: …, …}}, not {dict(entry)!r}.")
        name, settings = parse_entry(str(entry["name"]), kind)
        return name, {**settings, **{str(key): value for key, value in entry.items() if key != "name"}}
    name, *assignments = _split(str(entry), ":,", KEY.match)
    if not name.strip():
        raise RevisitError(f"A {kind} needs a name before its settings, as in name:key=value, not {entry!r}.")
    return name.strip(), parse_assignments(assignments, f"{kind}:key=value")


def parse_assignments(texts: Iterable[str], wanted: str = "--set key=value") -> dict[str, str]:
    """`key=value` strings as a mapping; each key may be given once."""
    settings: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RevisitError(f"Settings are written {wanted}, not {text!r}; for example alpha=1e-3.")
        if key.strip() in settings:
            raise RevisitError(f"The setting {key.strip()!r} is given twice; leave one out.")
        settings[key.strip()] = value.strip()
    return settings


def without_brackets(text: str) -> str:
    """A list without the brackets around it, if there are any; raises RevisitError where only one of them is there."""
    text = text.strip()
    closing = {"[": "]", "(": ")"}.get(text[:1])
    if closing is None:
        return text
    if not text.endswith(closing):
        raise RevisitError(f"The list {text[:60]!r} begins with {text[0]} and does not end with {closing}.")
    return text[1:-1].strip()


def parse_list(given: Any, is_name: Callable[[str], bool]) -> list[Any]:
    """The entries of comma-separated text, or of a list whose strings may hold commas themselves.

    `is_name` tells names from further parts of the value before them.
    """
    entries = [given] if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) else list(given)
    found: list[Any] = []
    for entry in entries:
        found += _entries(entry, is_name) if isinstance(entry, str) else [entry]
    return found


def _entries(text: str, is_name: Callable[[str], bool]) -> list[str]:
    entries: list[str] = []
    for part in _split(text, ","):
        if entries and _goes_on(entries[-1], part, is_name):
            entries[-1] += f",{part}"
        elif part.strip():
            entries.append(part)
    return [entry.strip() for entry in entries]


def _goes_on(entry: str, part: str, is_name: Callable[[str], bool]) -> bool:
    """Whether a part after a comma belongs to the entry before it."""
    if KEY.match(part):
        return True
    *_, last = _split(entry, ":,", KEY.match)
    key, sign, value = last.partition("=")
    if not sign or not KEY.match(last):
        return False  # an entry without settings
    if key.strip() == LIST_OF_METHODS:
        return not value.strip().startswith(("[", "("))
    return not is_name(parse_entry(part)[0])


def _split(text: str, marks: str, before: Callable[[str], Any] = lambda rest: True) -> list[str]:
    """The text cut at these marks outside brackets, where `before` is true of what follows."""
    pieces, start, depth = [], 0, 0
    for place, letter in enumerate(text):
        depth = max(0, depth + BRACKETS.get(letter, 0))
        if letter in marks and depth == 0 and before(text[place + 1 :]):
            pieces.append(text[start:place])
            start = place + 1
    return [*pieces, text[start:]]
