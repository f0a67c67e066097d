"""Read the rows of data and answer files in all common layouts; errors name the file and the line."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from revisit.errors import RevisitError, brief, listed, need, short
from revisit.io.files import path_within, read_blocks, read_file

MAX_UNPACKED = 1 << 30  # bytes of a .gz file's content, or of a table's
RATIO = 20  # of the bytes of a larger table to those of its file
ROWS, CELL = 256, 64  # rows of a table that are read together, and bytes of an object for each of their cells

# Fields with generated text. `answer` is not among them, because it is as often the gold answer.
TEXTS = ("text", "caption", "response", "prediction", "model_prediction")
IDS = ("id", "question_id", "image_id", "index")
YES_NO = {
    **dict.fromkeys(("yes", "y", "true", "1"), "yes"),
    **dict.fromkeys(("no", "n", "false", "0"), "no"),
}
IMAGES = ("image", "image_source", "image_file", "image_path", "img_path", "filename", "images")
VIDEOS = ("video", "video_path", "videos")


T = TypeVar("T")
Fields: TypeAlias = dict[str, Any]  # values by name: a JSON object, or keyword arguments


class Record(Fields):
    """One object of a file, with its place in the file for error messages."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        super().__init__(data)
        self.where = where

    def need(self, key: str) -> Any:
        """Return the value of `key`; raise RevisitError if there is none."""
        if key not in self:
            raise RevisitError(f"{self.where} has no {key!r} (it has: {listed(self) or 'nothing'}).")
        return self[key]

    def need_text(self, key: str) -> str:
        """Return the value of `key`, which must be text."""
        return self._typed(key, str, "text")

    def need_list(self, key: str) -> list[Any]:
        """Return the value of `key`, which must be a list."""
        return self._typed(key, list, "a list")

    def _typed(self, key: str, kind: type[T], name: str) -> T:
        value = self.need(key)
        if not isinstance(value, kind):
            raise RevisitError(f"{self.where}: {key!r} must be {name}, not {type(value).__name__}.")
        return value

    def need_int(self, key: str) -> int:
        """Return the value of `key`, which must be a whole number or the text of one."""
        value = self.need(key)
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            raise RevisitError(f"{self.where}: {key!r} must be a whole number, not {short(value)}.") from error

    def need_choice(self, key: str, allowed: Iterable[str], *, lower: bool = True) -> str:
        """Return the value of `key`, by default in lower case, which must be one of `allowed`."""
        allowed = tuple(allowed)
        text = str(self.need(key)).strip()
        text = text.lower() if lower else text
        if text not in allowed:
            raise RevisitError(f"{self.where}: {key!r} must be one of {', '.join(allowed)}, not {short(self[key])}.")
        return text


def read_text(path: Path) -> str:
    """Return a file as UTF-8 text, unpacked if its name ends in .gz."""
    try:
        raw = read_file(path)
        if path.suffix == ".gz":
            raw = read_blocks(gzip.GzipFile(fileobj=io.BytesIO(raw)), MAX_UNPACKED)  # type: ignore[arg-type]
        return raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise RevisitError(f"{path} does not exist.") from error
    except UnicodeDecodeError as error:
        raise RevisitError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RevisitError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def read_json(path: Path) -> Any:
    """Return the JSON value in a file."""
    return _parse(read_text(path), str(path))


def _parse(text: str, where: str, one_line: bool = False) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where} is" if one_line else f"{where} line {error.lineno} is"
        raise RevisitError(f"{place} not valid JSON ({error.msg} at column {error.colno}).") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
        raise RevisitError(f"{where} is JSON that cannot be read ({error}).") from error


def read_records(path: Path) -> list[Record]:
    """Return the objects of a JSON array, of JSON lines, or of a .csv, .tsv or .parquet table, in file order."""
    suffixes = [s.lower() for s in path.suffixes]
    if ".parquet" in suffixes:
        return _parquet(path)
    text = read_text(path)
    if ".csv" in suffixes or ".tsv" in suffixes:
        return _table(path, text)
    if text.lstrip().startswith("["):
        return [record(value, f"{path} entry {n}") for n, value in enumerate(_parse(text, str(path)), 1)]
    # Not splitlines(): a JSON string may hold U+2028 and other line separators.
    lines = [(f"{path} line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [record(_parse(line, where, one_line=True), where) for where, line in lines]


def _table(path: Path, text: str) -> list[Record]:
    csv.field_size_limit(2**31 - 1)
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)  # spreadsheets write semicolons where the comma is the decimal sign
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    records = []
    try:
        names = next(reader, [])
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise RevisitError(f"{path} has several columns named {listed(repeated)}; rename all but one.")
        for row in filter(None, reader):  # without empty lines
            where = f"{path} line {reader.line_num}"
            if len(row) != len(names):
                raise RevisitError(f"{where} has {len(row)} columns; the header has {len(names)}.")
            records.append(Record(dict(zip(names, row, strict=True)), where))
    except csv.Error as error:
        last = f"after line {records[-1].where.rpartition(' ')[2]}" if records else "in its first rows"
        raise RevisitError(f"{path} is not a valid table {last} ({error}); check its quotation marks.") from error
    return records


def _parquet(path: Path) -> list[Record]:
    need("pyarrow")
    from pyarrow.parquet import ParquetFile

    rows: list[dict[str, Any]] = []
    unpacked = 0
    try:
        limit = max(MAX_UNPACKED, RATIO * path.stat().st_size)
        with ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                unpacked += batch.nbytes + CELL * batch.num_rows * batch.num_columns
                if unpacked > limit:
                    raise RevisitError(f"{path} unpacks to more than {limit:,} bytes.")
                rows += batch.to_pylist()
    except FileNotFoundError as error:
        raise RevisitError(f"{path} does not exist.") from error
    except RevisitError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        raise RevisitError(f"{path} cannot be read as Parquet: {brief(error)}") from error
    known = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return [Record(row, f"{path} row {number}") for number, row in enumerate(known, 1)]


def record(value: Any, where: str) -> Record:
    """Return an object with its place; raise RevisitError for any other value."""
    if not isinstance(value, dict):
        raise RevisitError(f"{where} is a {type(value).__name__}, not an object.")
    return Record(value, where)


def read_list(value: Any) -> list[Any]:
    """Return a list, which in a table is the text of a list, or one value as a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def folder(data_dir: Path, name: str, *inside: str) -> Path:
    """Return `data_dir/name`, or `data_dir` if that folder does not exist and `data_dir` contains one of the files `inside`."""
    sub = data_dir / name
    return data_dir if not sub.is_dir() and any((data_dir / file).exists() for file in inside) else sub


def find_image(data_dir: Path, name: str, *places: str) -> Path:
    """Return the path of an image named in data: in the first of `places` that contains it, or else in the very first."""
    for place in places:
        path = path_within(data_dir, Path(place) / name)
        if path.exists():
            return path
    return path_within(data_dir, Path(places[0]) / name)


# -- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerRow:
    """One generated text and its row."""

    text: str
    record: Record

    @property
    def where(self) -> str:
        """The file and the line."""
        return self.record.where

    def key(self, fields: Sequence[str] = IDS) -> str | None:
        """Return the answer's id: the first of `fields` that its row has."""
        return next((str(self.record[name]) for name in fields if self.record.get(name) is not None), None)

    def need(self, fields: Sequence[str] = IDS) -> str:
        """Return the answer's id; raise RevisitError if it has none."""
        found = self.key(fields)
        if found is None:
            raise RevisitError(f"{self.where} has none of {', '.join(map(repr, fields))} to identify its item.")
        return found


def read_answers(path: Path, field: str | None = None) -> list[AnswerRow]:
    """Return all answers of a file, in order.

    Args:
        path: JSON lines, a JSON array, a JSON map of ids to texts, a .csv or .tsv table, or a log of `revisit eval`.
        field: The field with the generated text; without it, rows must have exactly one of `TEXTS`.
    """
    whole: Any = None
    if ".json" in path.suffixes:
        with suppress(ValueError, RecursionError):  # JSON lines; other errors are raised below, with their place
            whole = json.loads(read_text(path))
    if isinstance(whole, dict) and not {*TEXTS, field} & whole.keys():
        field = "text"
        rows = [Record({"id": key, field: text}, f"{path} entry {key!r}") for key, text in whole.items()]
    else:
        headers = {"spec", "request"}  # of a log
        rows = [row for row in read_records(path) if not headers <= row.keys()]
    if not rows:
        raise RevisitError(f"{path} contains no answers.")
    return [_answer(row, field or _text_field(row)) for row in rows]


def _text_field(row: Record) -> str:
    """Return the field with the generated text; raise RevisitError unless there is exactly one."""
    found = [name for name in TEXTS if name in row]
    if len(found) != 1:
        problem = f"several texts ({', '.join(found)})" if found else "no answer"
        raise RevisitError(
            f"{row.where} has {problem} among its fields {listed(row) or '(none)'}; choose one with --field."
        )
    return found[0]


def _answer(row: Record, field: str) -> AnswerRow:
    value = row.need(field)
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    return AnswerRow(str(value) if whole_number else row.need_text(field), row)


def plain_cell(text: str) -> str:
    """Return a text for a CSV cell, quoted if a spreadsheet would read it as a formula; numbers are none."""
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
