"""Names from data stay in their folder, only regular files are read, and files of lines survive kills, damage and full disks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revisit.errors import RevisitError
from revisit.io.files import (
    LineFile,
    alone,
    decode,
    encode,
    file_digest,
    make_folder,
    new_folder,
    path_within,
    read_file,
    read_lines,
    write_json,
)
from revisit.io.records import plain_cell


def test_names_from_data_stay_in_their_folder(tmp_path: Path) -> None:
    assert path_within(tmp_path, "a/../b.png") == tmp_path / "b.png"
    assert path_within(tmp_path, tmp_path / "b.png") == tmp_path / "b.png"
    for name in ("/dev/zero", "../b.png", "a/../../b.png", f"{tmp_path}2/b.png", ".", "a\0b"):
        with pytest.raises(RevisitError, match="outside the folder"):
            path_within(tmp_path, name)


def test_pipes_devices_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"abc")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_file, file_digest):
            with pytest.raises(OSError, match=r"regular|directory"):
                read(path)
    assert read_file(tmp_path / "file", 3) == b"abc"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_file(tmp_path / "file", 2)


@given(
    st.dictionaries(
        st.text(), st.one_of(st.text(), st.integers(), st.lists(st.floats(allow_nan=False, allow_infinity=False)))
    )
)
def test_any_object_is_one_line_and_can_be_read_again(value: dict[str, object]) -> None:
    value.pop("checksum", None)
    line = encode(value)
    assert len(line.decode().splitlines()) == 1
    assert decode(line) == value


def test_every_cut_of_the_last_line_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with closing(LineFile(path)) as file:
        file.append([{"n": 1}, {"n": 2, "text": "ünï\ncode"}])
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    for cut in range(start, len(data)):
        path.write_bytes(data[:cut])
        assert read_lines(path)[:2] == ([{"n": 1}], 0)
        with closing(LineFile(path)) as file:
            assert file.objects == [{"n": 1}]
            file.append([{"n": 2, "text": "ünï\ncode"}])
        assert path.read_bytes() == data
    path.write_bytes(data[:start] + b"\0" * 200_000)
    with closing(LineFile(path)):
        assert path.read_bytes() == data[:start]


def test_every_changed_character_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with closing(LineFile(path)) as file:
        file.append([{"n": 1}, {"n": 2, "text": "a dog"}, {"n": 3}])
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for place in range(len(lines[0]), len(lines[0]) + len(lines[1]) - 1):
        for other in (b"7", b"x"):
            if data[place : place + 1] != other:
                path.write_bytes(data[:place] + other + data[place + 1 :])
                assert read_lines(path)[:2] == ([{"n": 1}, {"n": 3}], 1)
    path.write_bytes(b"[" * 100_000 + b"\n\xff\xfe\n" + data)
    assert read_lines(path)[1] == 2


HOLD = """
import sys, time, pathlib
from contextlib import closing
from revisit.io.files import LineFile
with closing(LineFile(pathlib.Path(sys.argv[1]))) as file:
    file.append([{"n": 1}])
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_file_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RevisitError, match="in use"):
            LineFile(path)
        holder.send_signal(signal.SIGKILL)
    with closing(LineFile(path)) as file:
        assert file.objects == [{"n": 1}]


FILL = """
import pathlib, resource, sys
from contextlib import closing
from revisit.errors import RevisitError
from revisit.io.files import LineFile
with closing(LineFile(pathlib.Path(sys.argv[1]))) as file:
    file.append([{"n": 1}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    try:
        file.append([{"text": "x" * 300}])
    except RevisitError as error:
        print(error)
"""


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert path.read_bytes() == encode({"n": 1})


def test_links_and_pipes_in_place_of_a_file_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("of somebody else")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(RevisitError, match="Cannot write"):
            LineFile(tmp_path / name)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RevisitError, match="No space left"):
        write_json(path, {"n": 2})
    assert "1" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_several_writers_and_readers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = [[n] * 5_000 for n in range(8)]
    write_json(path, values[0])
    (tmp_path / ".a.json.0.revisit-tmp").write_text("of a killed writer")
    os.utime(tmp_path / ".a.json.0.revisit-tmp", (0, 0))
    with ThreadPoolExecutor(9) as pool:
        writes = [pool.submit(write_json, path, value) for value in values * 20]
        while not all(write.done() for write in writes):
            assert json.loads(path.read_text()) in values
    assert [write.exception() for write in writes] == [None] * 160
    assert os.listdir(make_folder(tmp_path)) == ["a.json"]


def test_a_folder_that_cannot_be_written_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RevisitError, match="Not a directory"):
        make_folder(tmp_path / "file" / "out")
    monkeypatch.setattr(os, "access", lambda *_: False)  # rights do not hold for root
    with pytest.raises(RevisitError, match="Permission denied"):
        make_folder(tmp_path)


def test_cells_of_a_table_are_not_formulas() -> None:
    assert [plain_cell(text) for text in ("=1+1", "-x", "@a", "plain", "")] == ["'=1+1", "'-x", "'@a", "plain", ""]


def test_the_second_of_two_processes_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom revisit.io.files import alone\n"
        f"with alone(Path({str(tmp_path / 'x')!r})):\n print(flush=True)\n sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        threading.Timer(0.5, other.stdin.close).start()
        with alone(tmp_path / "x"):
            assert other.wait(10) == 0
    assert "waiting" in caplog.text


def test_a_new_folder_replaces_an_empty_one_where_open_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: a rename needs a free name, and a file that is open cannot be removed."""
    rename, unlink = Path.rename, Path.unlink

    def rename_to_a_free_name(path: Path, target: Path) -> Path:
        if Path(target).exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        return rename(path, target)

    def unlink_unless_open(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".lock":
            raise PermissionError(errno.EACCES, "The file is in use", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "rename", rename_to_a_free_name)
    monkeypatch.setattr(Path, "unlink", unlink_unless_open)
    (tmp_path / "data").mkdir()
    with new_folder(tmp_path / "data") as draft:
        (draft / "file").write_text("x")
    assert (tmp_path / "data" / "file").read_text() == "x"
    with pytest.raises(RevisitError, match="Cannot write"), new_folder(tmp_path / "data"):
        pass
    assert (tmp_path / "data" / "file").read_text() == "x"
