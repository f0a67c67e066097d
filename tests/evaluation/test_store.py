"""The store: whole lines or none, one key per identity, locks that die with their holder."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revisit.errors import RevisitError
from revisit.evaluation import store
from revisit.evaluation.records import AblationRecord, Answer, CellRecord, RunRecord, ScoresRecord, StudyRecord
from revisit.evaluation.store import Cell, digest, locked, read_answers, write_json, write_record


def line(number: int, text: str = "a cat") -> Answer:
    values = {"text": text, "tokens": (1, 2, number), "counters": {"steps": 3}, "seconds": 0.5}
    return Answer(id=f"q{number}", item=f"c{number}", prompt="p", **values)


def cell(output: Path, **identity: object) -> Cell:
    return Cell(output, ("org/model", "revisit(alpha=1e-5)", "pope"), {"model": "m", **identity})


@given(st.text(), st.lists(st.integers(0, 200_000)))
def test_any_text_is_one_line_and_comes_back(text: str, tokens: list[int]) -> None:
    original = Answer(
        id="id", item="c", prompt="p", text=text, tokens=tuple(tokens), counters={"applied": 2}, seconds=0.25
    )
    written = original.to_json()
    assert len(written.splitlines()) == 1
    assert Answer.from_json(written) == original


def test_appended_answers_are_read_again_and_never_doubled(tmp_path: Path) -> None:
    with cell(tmp_path) as first:
        assert first.append([line(1), line(2)]) == 2
        assert first.append([line(2, "another"), line(3)]) == 1
    with cell(tmp_path) as second:
        assert second.path == first.path
        assert second.append([line(1), line(2), line(3)]) == 0
        assert second.get("q2", "c2") == line(2)
        assert second.get("q2", "changed content") is None
    assert list(read_answers(first.path / "answers.jsonl")) == [line(1), line(2), line(3)]


def test_every_cut_of_the_last_line_is_repaired(tmp_path: Path) -> None:
    with cell(tmp_path) as full:
        full.append([line(1), line(2, "ünï\ncode")])
    path = full.path / "answers.jsonl"
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    for cut in range(start, len(data)):
        path.write_bytes(data[:cut])
        with cell(tmp_path) as again:
            assert path.read_bytes() == data[:start]
            assert again.append([line(1), line(2, "ünï\ncode")]) == 1
        assert path.read_bytes() == data


def test_a_tail_longer_than_one_read_is_cut(tmp_path: Path) -> None:
    with cell(tmp_path) as full:
        full.append([line(1)])
    path = full.path / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 200_000)
    with cell(tmp_path):
        assert path.read_bytes() == whole


def test_every_changed_character_is_found_and_its_answer_made_again(tmp_path: Path) -> None:
    with cell(tmp_path) as full:
        full.append([line(1), line(2, "a dog"), line(3)])
    path = full.path / "answers.jsonl"
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    start = len(lines[0])
    for place in range(start, start + len(lines[1]) - 1):
        for other in (b"7", b"x"):
            if data[place : place + 1] == other:
                continue
            path.write_bytes(data[:place] + other + data[place + 1 :])
            with pytest.raises(RevisitError, match=r"answers\.jsonl, line 2 is damaged"):
                list(read_answers(path))
            with cell(tmp_path) as again:
                assert [again.get(f"q{n}", f"c{n}") is None for n in (1, 2, 3)] == [False, True, False]
                assert "1 answer is damaged (line 2) and will be regenerated" in again.repairs[0]
                assert path.read_bytes() == lines[0] + lines[2]
    assert (full.path / "damaged.jsonl").exists()


def test_lines_that_a_changed_byte_joined_or_split_are_made_again(tmp_path: Path) -> None:
    with cell(tmp_path) as full:
        full.append([line(1), line(2), line(3)])
    path = full.path / "answers.jsonl"
    data = path.read_bytes()
    end = data.index(b"\n")
    for damaged, missing in (
        (data[:end] + b" " + data[end + 1 :], [1, 2]),
        (data[:9] + b"\n" + data[10:], [1]),
        (b"\xff\xfe" + data, [1]),
        (b"[" * 100_000 + b"\n" + data, []),
    ):
        path.write_bytes(damaged)
        with cell(tmp_path) as again:
            assert [n for n in (1, 2, 3) if again.get(f"q{n}", f"c{n}") is None] == missing
            assert again.repairs
            again.append([line(n) for n in missing])
        with cell(tmp_path) as whole:
            assert not whole.repairs


def test_a_line_of_another_cell_is_not_taken(tmp_path: Path) -> None:
    with cell(tmp_path) as one, cell(tmp_path, seed=1) as other:
        one.append([line(1)])
        other.append([line(1, "another answer")])
    (one.path / "answers.jsonl").write_bytes((other.path / "answers.jsonl").read_bytes())
    with cell(tmp_path) as again:
        assert again.get("q1", "c1") is None
        assert again.repairs


def test_a_line_without_its_checksum_is_not_an_answer() -> None:
    bare = json.loads(line(1).to_json())
    del bare["check"]
    with pytest.raises(ValueError, match="checksum"):
        Answer.from_json(json.dumps(bare))


def test_any_change_of_identity_is_another_cell(tmp_path: Path) -> None:
    base = {"method": {"name": "revisit", "settings": {"alpha": 1e-5}}, "seed": 0, "decoding": {"max_new_tokens": 64}}
    variants = [
        base,
        {**base, "seed": 1},
        {**base, "decoding": {"max_new_tokens": 65}},
        {**base, "method": {"name": "revisit", "settings": {"alpha": 2e-5}}},
    ]
    assert len({cell(tmp_path, **v).path for v in variants}) == len(variants)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_a_folder_of_other_settings_is_refused_and_a_damaged_description_is_written_again(tmp_path: Path) -> None:
    with cell(tmp_path) as one:
        pass
    about = one.path / "cell.json"
    whole = about.read_bytes()
    for damaged in (b"", b"{", b"[1]", b"\xff", whole.replace(b"model", b"modem", 1), b'{"key": 3}'):
        about.write_bytes(damaged)
        with cell(tmp_path) as again:
            assert "cell.json was damaged" in again.repairs[0]
        assert about.read_bytes() == whole
    write_record(about, {"key": "other", "identity": {}}, CellRecord)
    with pytest.raises(RevisitError, match="belongs to other settings"):
        cell(tmp_path).open()


HOLD = """
import sys, time, pathlib
from revisit.evaluation.store import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_on_one_output_and_a_dead_holder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RevisitError, match=rf"in use by process {holder.pid} on .*another --out"),
            locked(tmp_path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):  # the file of the dead process is still there, its lock is not
        assert (tmp_path / ".holder").read_text().startswith(f"process {os.getpid()} ")


FILL = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[2])
from test_store import cell, line
from revisit.errors import RevisitError
with cell(pathlib.Path(sys.argv[1])) as one:
    one.append([line(1)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    try:
        one.append([line(2, "x" * 300)])
    except RevisitError as error:
        print(error)
"""


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    assert len(line(1).to_json()) < 299
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in done.stdout
    assert "intact" in done.stdout
    path = cell(tmp_path).path / "answers.jsonl"
    assert (
        path.read_text() == line(1).to_json(cell(tmp_path).key[:12]) + "\n"
    )  # the 300 bytes that fitted were taken back
    assert resource.RLIMIT_FSIZE is not None


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")]
)
def test_a_failed_write_says_why_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"n": 1})

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.os, "fsync", fail)
    with pytest.raises(RevisitError, match=f"{words}.*intact"):
        write_json(path, {"n": 2})
    with cell(tmp_path / "grid") if False else pytest.raises(RevisitError, match=words):
        cell(tmp_path / "grid").open()
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["results.json"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RevisitError, match="Not a directory"), locked(tmp_path / "file" / "out"):
        pass
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(RevisitError, match="not writable"), locked(tmp_path / "out"):
            pass
        tmp_path.chmod(0o700)


def test_every_field_of_every_record_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    for record in (RunRecord, CellRecord, Answer, ScoresRecord, AblationRecord, StudyRecord):
        schema = record.model_json_schema()
        parts = [schema, *schema.get("$defs", {}).values()]
        for name in (name for part in parts for name in part["properties"]):
            assert f"`{name}`" in documented, (record, name)


def test_a_folder_that_is_there_and_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.os, "access", lambda *_: False)  # rights do not hold for root
    with pytest.raises(RevisitError, match=r"Permission denied\. Choose another --out\.$"):
        store.make_folder(tmp_path)
