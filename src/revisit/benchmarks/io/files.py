"""Reading data and answer files of every layout in use; what cannot be read is named by file and line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


class Record(dict[str, Any]):
    """One object of a file, which knows its place in the file, for error messages."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__(data)
        self.where = where

    def need(self, key: str) -> Any:
        """The value of `key`, or the sentence that names the place where it is missing."""
        if key not in self:
            raise RevisitError(f"{self.where} has no {key!r} (it has: {', '.join(map(str, self)) or 'nothing'}).")
        return self[key]

    def need_text(self, key: str) -> str:
        """The value of `key`, which must be text."""
        value = self.need(key)
        if not isinstance(value, str):
            raise RevisitError(f"{self.where}: {key!r} must be text, not {type(value).__name__}.")
        return value

    def need_list(self, key: str) -> list[Any]:
        """The value of `key`, which must be a list."""
        value = self.need(key)
        if not isinstance(value, list):
            raise RevisitError(f"{self.where}: {key!r} must be a list, not {type(value).__name__}.")
        return value

    def need_int(self, key: str) -> int:
        """The value of `key`, which must be a whole number or the text of one."""
        value = self.need(key)
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            raise RevisitError(f"{self.where}: {key!r} must be a whole number, not {value!r}.") from error

    def need_choice(self, key: str, allowed: Iterable[str], *, lower: bool = True) -> str:
        """The value of `key`, in lower case by default, which must be one of `allowed`."""
        allowed = tuple(allowed)
        text = str(self.need(key)).strip()
        text = text.lower() if lower else text
        if text not in allowed:
            raise RevisitError(f"{self.where}: {key!r} must be one of {', '.join(allowed)}, not {self[key]!r}.")
        return text


def read_text(path: Path) -> str:
    """The whole file as UTF-8 text, unpacked if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise RevisitError(f"{path} does not exist.") from error
    except UnicodeDecodeError as error:
        raise RevisitError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RevisitError(f"{path} cannot be read: {error}.") from error


def read_json(path: Path) -> Any:
    """The one JSON value that the file holds."""
    return _parse(read_text(path), str(path))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _parse(text: str, where: str, one_line: bool = False) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        place = f"{where} is" if one_line else f"{where} line {error.lineno} is"
        raise RevisitError(f"{place} not valid JSON ({error.msg} at column {error.colno}).") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets, a key twice
        raise RevisitError(f"{where} is JSON that cannot be read ({error}).") from error


def read_records(path: Path) -> list[Record]:
    """The objects of a JSON array, of JSON lines, or of a .csv/.tsv table, in file order."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] in ([".xlsx"], [".xls"], [".pkl"], [".pickle"]):
        raise RevisitError(
            f"{path} is a {suffixes[-1]} file, which is not supported; save it as .tsv, .csv, .json or .jsonl first."
        )
    text = read_text(path)
    if ".csv" in suffixes or ".tsv" in suffixes:
        return _table(path, text, "\t" if ".tsv" in suffixes else ",")
    if text.lstrip().startswith("["):
        return _array(path, text)
    return _lines(path, text)


def _table(path: Path, text: str, delimiter: str) -> list[Record]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RevisitError(f"{path} has a duplicate column {twice!r}.")
    records = []
    for row in reader:
        columns = len([value for value in row.values() if value is not None]) + len(row.get(None, [])) - (None in row)
        if columns != len(names):
            raise RevisitError(f"{path} line {reader.line_num} has {columns} columns; the header has {len(names)}.")
        records.append(Record(row, f"{path} line {reader.line_num}"))
    return records


def _array(path: Path, text: str) -> list[Record]:
    values = _parse(text, str(path))
    return [record(value, f"{path} entry {number}") for number, value in enumerate(values, 1)]


def _lines(path: Path, text: str) -> list[Record]:
    records = []
    # Not splitlines(): a JSON string may hold U+2028 and other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        records.append(record(_parse(line, where, one_line=True), where))
    return records


def record(value: Any, where: str) -> Record:
    """The object there; raises RevisitError if there is none."""
    if not isinstance(value, dict):
        raise RevisitError(f"{where} is a {type(value).__name__}, not an object.")
    return Record(value, where)


def read_map(path: Path) -> dict[str, Any] | None:
    """The file as one JSON object, or None if it is not a single object (an array, or JSON lines)."""
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # JSON lines, or broken: their reader says where
        return None
    return value if isinstance(value, dict) else None


def folder(data_dir: Path, name: str, *inside: str) -> Path:
    """`data_dir/name`, or `data_dir` itself if that folder is not there and one of the files `inside` it is here."""
    sub = data_dir / name
    return data_dir if not sub.is_dir() and any((data_dir / file).exists() for file in inside) else sub


def find_image(data_dir: Path, name: str, *places: str) -> Path:
    """Where image `name` is below `data_dir`: the first of `places` that holds it, else where it should be put."""
    for place in places:
        path = data_dir / place / name
        if path.exists():
            return path
    return data_dir / places[0] / name
