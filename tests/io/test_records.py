"""Tables and JSON lines are read as meant, or one short sentence names the line."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from revisit import RevisitError
from revisit.io import records
from revisit.io.finder import ImageFinder
from revisit.io.images import open_image
from revisit.io.records import Record, read_answers, read_records

ROW = {"id": "1", "caption": "A dog; a cat."}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("comma.csv", "id,caption\n1,A dog; a cat.\n"),
        ("semicolon.csv", 'id;caption\n1;"A dog; a cat."\n'),
        ("tab.tsv", "id\tcaption\n1\tA dog; a cat.\n"),
        ("lines.jsonl", json.dumps(ROW)),
        ("array.json", json.dumps([ROW])),
    ],
)
def test_every_form_gives_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert read_records(tmp_path / name) == read_records(tmp_path / f"{name}.gz") == [ROW]


def test_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = [{"id": 1, "label": ["dog", "cat"], "question": "Is it?"}, {"id": 2, "label": None, "question": "No?"}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "x.parquet")
    assert read_records(tmp_path / "x.parquet") == [rows[0], {"id": 2, "question": "No?"}]
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RevisitError, match="Parquet"):
        read_records(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.csv", 'id,caption\n1,ok\n2,"A dog\n' + "3,A cat.\n" * 100_000, "line 2"),
        ("x.csv", "id,caption,caption\n1,A,B\n", "several columns named caption"),
        ("x.csv", f"{','.join(f'c{n}' for n in range(200_000))}\n{',' * 199_999}\n", "199,990 more"),
        ("x.jsonl", json.dumps({f"c{n}": 1 for n in range(50_000)}), "49,990 more"),
    ],
    ids=["unclosed", "duplicate", "columns", "fields"],
)
def test_errors_are_short(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RevisitError, match=words) as error:
        read_answers(tmp_path / name)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("row", [{"image": "A" * 9000}, {"id": "A" * 9000}, {"id": ["A" * 9000]}])
def test_names_that_no_file_can_have(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RevisitError) as error:
        open_image(*ImageFinder(tmp_path).find(Record(row, "x.jsonl line 1")))
    assert len(str(error.value)) < 500


def test_what_is_unpacked_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_UNPACKED", 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(RevisitError, match="larger than 1,000 bytes"):
        read_records(tmp_path / "x.jsonl.gz")


def test_a_small_file_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,caption\n1,A dog.\n")
    code = f"from pathlib import Path; from revisit.io.records import read_records; read_records(Path({str(tmp_path / 'x.csv')!r}))"
    limit = 4 << 30
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


def test_a_table_that_unpacks_to_too_much_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"id": [1] * 200_000, "text": ["x" * 1000] * 200_000}).to_parquet(tmp_path / "x.parquet")
    assert len(read_records(tmp_path / "x.parquet")) == 200_000
    monkeypatch.setattr(records, "MAX_UNPACKED", 1_000_000)
    with pytest.raises(RevisitError, match="unpacks to more than"):
        read_records(tmp_path / "x.parquet")
