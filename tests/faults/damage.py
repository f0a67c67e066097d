"""Ways in which a file of a run folder can be damaged, each drawn by a seeded generator."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from chat_requests import places

Damage = Callable[[Path, random.Random], None]


def changed_byte(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(bytes(data))


def cut(path: Path, dice: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])


def zeros(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.randrange(1, 4096))
    data[start:end] = bytes(end - start)
    path.write_bytes(bytes(data))


def random_bytes(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(dice.randrange(1, 3000)))


def emptied(path: Path, dice: random.Random) -> None:
    path.write_bytes(b"")


def gone(path: Path, dice: random.Random) -> None:
    path.unlink()


def a_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_itself(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def nested(path: Path, dice: random.Random) -> None:
    path.write_text("[" * 200_000 + "\n")


def other_json(path: Path, dice: random.Random) -> None:
    values = [
        "null",
        "[]",
        "{}",
        "3",
        '"text"',
        '{"schema": 3}',
        '{"schema": "x", "cells": 3}',
        "NaN",
        '{"cells": [null]}',
    ]
    path.write_text(dice.choice(values) + "\n")


def changed_value(path: Path, dice: random.Random) -> None:
    """Replace one value by one of another type; the checksum does not match any more."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = dice.randrange(len(lines))
    value = json.loads(lines[number])
    node, key = dice.choice(list(places(value)))
    node[key] = dice.choice([None, -1, 1e300, "x", [], {}, True, "../../etc", "\u0000"])
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def swapped(path: Path, dice: random.Random) -> None:
    """Replace a log by another one."""
    others = [other for other in path.parent.glob(f"*{path.suffix}") if other != path and other.is_file()]
    if others:
        shutil.copy(dice.choice(sorted(others)), path)


WAYS: tuple[Damage, ...] = (
    *(changed_byte, cut, zeros, random_bytes, emptied, gone),
    *(a_folder, a_link_to_itself, nested, other_json, changed_value, swapped),
)
