"""`revisit data get` against a loopback copy of the servers: interrupted, resumed, corrupted, disk full."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from http_files import FileServer
from revisit.benchmarks import amber, chair, get, pope
from revisit.benchmarks.base import Benchmark
from revisit.benchmarks.io import data, download
from revisit.cli.main import app
from revisit.errors import RevisitError


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE", 0.001)


def jpeg(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (shade, 90, 200)).save(out, "JPEG")
    return out.getvalue()


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["data", "get", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def offer(server: FileServer, cls: type[Benchmark], contents: dict[str, bytes], patch: pytest.MonkeyPatch) -> None:
    """Puts the benchmark's files on the server, and their checksums where the real ones stand."""
    remotes = []
    for remote in cls.downloads:
        body = contents[remote.path]
        server.files[f"/{remote.urls[0].partition('://')[2]}"] = body
        remotes.append(dataclasses.replace(remote, sha256=hashlib.sha256(body).hexdigest(), size=len(body)))
    patch.setattr(cls, "downloads", tuple(remotes))


def coco_name(number: int) -> str:
    return f"COCO_val2014_{number:012d}.jpg"


def coco_pictures(server: FileServer, *numbers: int) -> None:
    for number in numbers:
        server.files[f"/images.cocodataset.org/val2014/{coco_name(number)}"] = jpeg(number)


def offer_pope(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    contents = {}
    for remote in pope.Pope.downloads:
        image = "2400007.jpg" if "gqa" in remote.path else coco_name(7)
        question = {"question_id": 1, "image": image, "text": f"Is there a {remote.path}?", "label": "yes"}
        contents[remote.path] = lines([question, question | {"question_id": 2, "label": "no"}])
    offer(server, pope.Pope, contents, patch)
    coco_pictures(server, 7)
    server.files["/cs.stanford.edu/people/rak248/VG_100K_2/2400007.jpg"] = jpeg(
        70
    )  # not in the first of the two folders


def offer_repope(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    question = {"question_id": 1, "image": coco_name(8), "text": "Is there a dog?", "label": "yes"}
    offer(server, pope.RePope, {remote.path: lines([question]) for remote in pope.RePope.downloads}, patch)
    coco_pictures(server, 8)


def offer_chair(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    images = [{"id": n, "file_name": coco_name(n)} for n in (1, 2, 3)]
    instances = {"images": images, "categories": [{"id": 1, "name": "dog"}], "annotations": []}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("annotations/instances_val2014.json", json.dumps(instances))
        archive.writestr("annotations/captions_val2014.json", json.dumps({"images": images, "annotations": []}))
        archive.writestr("annotations/instances_train2014.json", "{}" * 1000)
    offer(server, chair.Chair, {chair.Chair.downloads[0].path: packed.getvalue()}, patch)
    coco_pictures(server, 1, 2, 3)


def offer_amber(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    notes = [{"id": n, "type": "discriminative-hallucination", "truth": "no"} for n in (1, 2)]
    queries = [{"id": n, "image": f"AMBER_{n}.jpg", "query": "Is there a dog?"} for n in (1, 2)]
    contents = {"annotations": notes, "relation": {}, "safe_words": [], "query_all": queries}
    by_path = {r.path: json.dumps(contents[Path(r.path).stem]).encode() for r in amber.Amber.downloads}
    offer(server, amber.Amber, by_path, patch)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for n in (1, 2, 3):
            archive.writestr(f"pictures/image/AMBER_{n}.jpg", jpeg(n))
    server.files[f"/{amber._PICTURES.partition('://')[2]}"] = packed.getvalue()


OFFERS: dict[str, Callable[[FileServer, pytest.MonkeyPatch], None]] = {
    "pope": offer_pope,
    "repope": offer_repope,
    "chair": offer_chair,
    "amber": offer_amber,
}
PICTURES = {"pope": 2, "repope": 1, "chair": 3, "amber": 2}


@pytest.fixture(params=OFFERS)
def offered(request: Any, file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A benchmark whose servers are on the loopback."""
    OFFERS[request.param](file_server, monkeypatch)
    return str(request.param)


def test_fetched_whole_and_only_once(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    printed = run(offered, tmp_path / "data", "--from", file_server.url)
    assert f"{PICTURES[offered]} pictures of {offered}" in printed
    assert "License of" in printed
    about = json.loads((tmp_path / "data/source.json").read_text())
    assert about["license"] == get(offered).license
    assert not [
        path for path in tmp_path.rglob("*") if path.name.endswith((".part", ".zip")) or path.name.startswith(".")
    ]
    if offered != "chair":  # whose ground truth needs NLTK's data
        items = get(offered).load(tmp_path / "data")
        assert items
        assert all(image.is_file() for item in items for image in item.images)
    asked = len(file_server.requests)
    assert data.get(offered, tmp_path / "data", file_server.url) == about
    assert len(file_server.requests) == asked
    with pytest.raises(RevisitError, match="is not empty and holds"):
        data.get(offered, tmp_path / "data", file_server.url, limit=1)


def test_interrupted_and_resumed(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    longest = max(file_server.files, key=lambda path: len(file_server.files[path]))
    size = len(file_server.files[longest])
    file_server.cut[longest] = [size // 2] + [0] * (download.ATTEMPTS - 1)  # half of it, then nothing at all
    with pytest.raises(RevisitError, match=r"after 5 attempts .* run the same command again to go on"):
        data.get(offered, tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    file_server.requests.clear()
    data.get(offered, tmp_path / "data", file_server.url)
    assert (longest, f"bytes={size // 2}-") in file_server.requests  # it went on in the middle
    assert (tmp_path / "data/source.json").is_file()


def test_corrupted_on_the_way(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    for path, body in list(file_server.files.items()):
        file_server.files[path] = bytes(reversed(body))
        with pytest.raises(RevisitError, match=r"did not arrive as expected|is damaged"):
            data.get(offered, tmp_path / "data", file_server.url)
        assert not (tmp_path / "data").exists()
        file_server.files[path] = body
        shutil.rmtree(tmp_path / ".data.draft", ignore_errors=True)
    data.get(offered, tmp_path / "data", file_server.url)


def test_a_full_disk_is_noticed_before_anything_is_written(
    offered: str, file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(RevisitError, match=r"needs .* MB more, and the disk has 0 MB left"):
            data.get(offered, tmp_path / "data", file_server.url)
    assert file_server.requests == []
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(shutil, "copyfileobj", full)  # another process filled the disk meanwhile
        with pytest.raises(RevisitError, match=r"No space left on device\. What is complete was kept"):
            data.get(offered, tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    data.get(offered, tmp_path / "data", file_server.url)


def test_servers_of_all_kinds(file_server: FileServer, tmp_path: Path) -> None:
    picture = jpeg(5) * 40
    file_server.files["/a.jpg"] = picture
    remote = download.Remote("a.jpg", (f"{file_server.url}/a.jpg",))
    file_server.status["/a.jpg"] = [503, 429]  # busy
    file_server.cut["/a.jpg"] = [100, 200]
    download.fetch_all([remote], tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == picture
    assert file_server.requests[-1] == ("/a.jpg", "bytes=300-")
    (tmp_path / "a.jpg").unlink()
    file_server.no_ranges.add("/a.jpg")  # sends everything again
    file_server.cut["/a.jpg"] = [100]
    download.fetch_all([remote], tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == picture
    (tmp_path / "a.jpg").unlink()
    file_server.no_ranges.clear()
    (tmp_path / "a.jpg.part").write_bytes(picture + b"too long")  # not the beginning of this file
    download.fetch_all([remote], tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == picture
    file_server.status["/b.jpg"] = [403]
    file_server.files["/b.jpg"] = picture
    with pytest.raises(RevisitError, match=r"b\.jpg was refused with status 403"):
        download.fetch_all([dataclasses.replace(remote, path="b.jpg", urls=(f"{file_server.url}/b.jpg",))], tmp_path)
    with pytest.raises(RevisitError, match="is not there"):
        download.fetch_all([dataclasses.replace(remote, path="c.jpg", urls=(f"{file_server.url}/c.jpg",))], tmp_path)


def test_only_the_pictures_a_run_needs(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_chair(file_server, monkeypatch)
    data.get("chair", tmp_path / "one", file_server.url, limit=1)
    assert [path.name for path in (tmp_path / "one/val2014").iterdir()] == [coco_name(1)]
    assert sorted(path.name for path in (tmp_path / "one/annotations").iterdir()) == [
        "captions_val2014.json",
        "instances_val2014.json",
    ]
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n")
    run("chair", tmp_path / "three", "--from", file_server.url, "--set", f"ids={ids}")
    assert [path.name for path in (tmp_path / "three/val2014").iterdir()] == [coco_name(3)]


def test_wrong_requests_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match="Say where the data goes"):
        run("pope")
    with pytest.raises(RevisitError, match="have no splits"):
        run("pope", tmp_path / "data", "--split", "test")
    with pytest.raises(RevisitError, match="fetched from the hub"):
        run("mmmu", tmp_path / "data", "--from", "http://127.0.0.1:9")
    with pytest.raises(RevisitError, match="names no hub dataset"):
        run("amber", tmp_path / "data", "--from", "somebody/amber")
