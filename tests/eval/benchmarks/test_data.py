"""`revisit data get` with a loopback copy of the servers: interrupted, resumed, corrupted, disk full."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from http_files import FileServer
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import amber, chair, get, llava_bench, mmhal, mmvp, phd, pope, vqav2
from revisit.eval.benchmarks.base import Benchmark
from revisit.eval.benchmarks.io import data, download
from revisit.eval.benchmarks.io.places import resolve_data


@pytest.fixture(autouse=True)
def redirected(file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find `https://host/path` at `/host/path` of the file server."""
    made = urllib.request.Request

    def request(url: str, **options: Any) -> urllib.request.Request:
        return made(f"{file_server.url}/{url.partition('://')[2]}", **options)

    monkeypatch.setattr(urllib.request, "Request", request)
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


def zipped(members: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def offer(server: FileServer, cls: type[Benchmark], contents: dict[str, bytes], patch: pytest.MonkeyPatch) -> None:
    """Put the benchmark's files on the server, and their checksums in place of the published ones."""
    for remote in cls.downloads:
        server.files[f"/{remote.urls[0].partition('://')[2]}"] = contents[remote.path]
    known = (replace(r, sha256=hashlib.sha256(contents[r.path]).hexdigest() if r.sha256 else "") for r in cls.downloads)
    patch.setattr(cls, "downloads", tuple(known))


def coco_name(number: int) -> str:
    return f"COCO_val2014_{number:012d}.jpg"


def coco_images(server: FileServer, *numbers: int) -> None:
    for number in numbers:
        server.files[f"/images.cocodataset.org/val2014/{coco_name(number)}"] = jpeg(number)


def offer_pope(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    contents = {}
    for remote in pope.Pope.downloads:
        image = "2400007.jpg" if "gqa" in remote.path else coco_name(7)
        question = {"question_id": 1, "image": image, "text": f"Is there a {remote.path}?", "label": "yes"}
        contents[remote.path] = lines([question, question | {"question_id": 2, "label": "no"}])
    offer(server, pope.Pope, contents, patch)
    coco_images(server, 7)
    server.files["/cs.stanford.edu/people/rak248/VG_100K_2/2400007.jpg"] = jpeg(70)  # not in the first folder


def offer_chair(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    images = [{"id": n, "file_name": coco_name(n)} for n in (1, 2, 3)]
    instances = {"images": images, "categories": [{"id": 1, "name": "dog"}], "annotations": []}
    members = {"instances_val2014": instances, "captions_val2014": {"images": images, "annotations": []}}
    packed = zipped({f"annotations/{name}.json": json.dumps(value) for name, value in members.items()})
    offer(server, chair.Chair, {chair.Chair.downloads[0].path: packed}, patch)
    coco_images(server, 1, 2, 3)


def offer_amber(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    notes = [{"id": n, "type": "discriminative-hallucination", "truth": "no"} for n in (1, 2)]
    queries = [{"id": n, "image": f"AMBER_{n}.jpg", "query": "Is there a dog?"} for n in (1, 2)]
    contents = {"annotations": notes, "relation": {}, "safe_words": [], "query_all": queries}
    by_path = {r.path: json.dumps(contents[Path(r.path).stem]).encode() for r in amber.Amber.downloads}
    offer(server, amber.Amber, by_path, patch)
    packed = zipped({f"images/image/AMBER_{n}.jpg": jpeg(n) for n in (1, 2, 3)})
    server.files[f"/{amber._IMAGES.partition('://')[2]}"] = packed


def offer_vqav2(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    """The two official archives; no checksum of theirs is published, so none is known."""
    asked = [{"question_id": 10 * n, "image_id": n, "question": f"What is on image {n}?"} for n in range(11, 21)]
    answers = [{"answer": "a hill", "answer_confidence": "yes", "answer_id": n} for n in range(1, 11)]
    notes = [{"question_id": 10 * n, "image_id": n, "answers": answers} for n in range(11, 21)]
    members = {vqav2.QUESTIONS: {"questions": asked}, vqav2.ANNOTATIONS: {"annotations": notes}}
    packed = [zipped({name: json.dumps(value)}) for name, value in members.items()]
    offer(server, vqav2.VQAv2, {r.path: body for r, body in zip(vqav2.VQAv2.downloads, packed, strict=True)}, patch)
    coco_images(server, *range(11, 21))


def offer_mmhal(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    asked = {"question_type": "counting", "image_content": ["Dog"], "question": "How many?", "gt_answer": "Two."}
    rows = [{"image_id": f"a{n}", "image_src": f"https://farm1.staticflickr.com/{n}_o.jpg", **asked} for n in (1, 2)]
    offer(server, mmhal.MMHal, {mmhal.MMHal.downloads[0].path: json.dumps(rows).encode()}, patch)
    for n in (1, 2):
        server.files[f"/farm1.staticflickr.com/{n}_o.jpg"] = jpeg(n)


def offer_mmvp(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    table = "Index,Question,Options,Correct Answer\n1,Is it open?,(a) Open (b) Closed,(a)\n2,Is it open?,(a) Open (b) Closed,(b)\n"
    offer(server, mmvp.MMVP, {"mmvp/Questions.csv": table.encode()}, patch)
    for n in (1, 2):
        server.files[f"/huggingface.co/datasets/MMVP/MMVP/resolve/main/MMVP%20Images/{n}.jpg"] = jpeg(n)


def offer_phd(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    asked = {"task": "counting", "yes_question": "Are there two?", "no_question": "Are there three?"}
    rows = [
        {"image_id": "11", "context": {"iac": "It rains.", "icc": "There are three."}, **asked},
        {"image_id": "12", "context": {"iac": "It snows.", "icc": "There are four."}, **asked},
        {"image_id": "0", "ccs_description": "A square wheel.", **asked},
    ]
    offer(server, phd.PhD, {"phd/data.json": json.dumps(rows).encode()}, patch)
    server.files["/images.cocodataset.org/train2014/COCO_train2014_000000000011.jpg"] = jpeg(11)
    coco_images(server, 12)
    server.files[f"/{phd._CCS.partition('://')[2]}"] = zipped({f"CCS_images/{n}.png": jpeg(n) for n in (0, 1)})


def offer_llava_bench(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    rows = (
        {"question_id": 0, "image": "001.jpg", "text": "What is it?", "category": "conv"},
        {"id": "001", "image": "001.jpg", "caption": "A hill."},
        {"question_id": 0, "text": "It is a hill."},
    )
    contents = {
        f"llava_bench/{name}": lines([row]) for name, row in zip(llava_bench.LlavaBench.data_files, rows, strict=True)
    }
    offer(server, llava_bench.LlavaBench, contents, patch)
    server.files[f"/{llava_bench.LlavaBench.images_at.partition('://')[2].format(name='001.jpg')}"] = jpeg(1)


OFFERS: dict[str, tuple[Callable[[FileServer, pytest.MonkeyPatch], None], int]] = {
    "pope": (offer_pope, 2),
    "chair": (offer_chair, 3),
    "amber": (offer_amber, 2),
    "vqav2": (offer_vqav2, 10),
    "mmhal": (offer_mmhal, 2),
    "mmvp": (offer_mmvp, 2),
    "phd": (offer_phd, 3),
    "llava_bench": (offer_llava_bench, 1),
}


@pytest.mark.parametrize("name", OFFERS)
def test_data_is_downloaded_once_and_complete(
    name: str, file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, images = OFFERS[name]
    prepare(file_server, monkeypatch)
    printed = run(name, tmp_path / "data")
    assert f"{images} images of {name}" in printed
    assert "License of" in printed
    about = json.loads((tmp_path / "data/source.json").read_text())
    assert about["license"] == get(name).license
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith((".part", ".zip")) or p.name.startswith(".")]
    if name != "chair":  # whose ground truth needs NLTK's data
        items = get(name).load(tmp_path / "data")
        assert items
        assert all(image.is_file() for item in items for image in item.images)
    asked = len(file_server.requests)
    assert data.get(name, tmp_path / "data") == about
    assert len(file_server.requests) == asked
    with pytest.raises(RevisitError, match="has other files"):
        data.get(name, tmp_path / "data", limit=1)
    with pytest.raises(RevisitError, match="not on the Hub"):
        data.get(name, tmp_path / "other", "somebody/else")


@pytest.fixture(params=["pope", "amber"])  # single images, and an archive
def offered(request: Any, file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    OFFERS[request.param][0](file_server, monkeypatch)
    return str(request.param)


def test_an_interrupted_download_resumes(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    longest = max(file_server.files, key=lambda path: len(file_server.files[path]))
    file_server.cut[longest] = [len(file_server.files[longest]) // 2] * download.ATTEMPTS
    with pytest.raises(RevisitError, match=r"after 5 attempts .* run the same command again to resume"):
        data.get(offered, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    complete = {p.name for p in (tmp_path / ".data.draft").rglob("*") if p.is_file() and p.suffix != ".part"}
    file_server.sent.clear()
    data.get(offered, tmp_path / "data")
    assert not complete & {Path(path).name for path in file_server.sent}  # what had arrived is kept
    assert (tmp_path / "data/source.json").is_file()


def test_a_corrupted_download_raises(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    for path in [path for path in file_server.files if not path.endswith(".jpg")]:
        body = file_server.files[path]
        middle = len(body) // 4
        for damaged in (body[::-1], body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]):
            file_server.files[path] = damaged
            with pytest.raises(RevisitError, match="did not arrive as expected"):
                data.get(offered, tmp_path / "data")
            assert not (tmp_path / "data").exists()
        file_server.files[path] = body
        shutil.rmtree(tmp_path / ".data.draft", ignore_errors=True)
    data.get(offered, tmp_path / "data")


def test_a_full_disk_raises(offered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(RevisitError, match=r"No space left on device\. Complete files were kept"):
            data.get(offered, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    data.get(offered, tmp_path / "data")


def test_a_run_fetches_what_it_needs_once(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`--data download` is what `revisit data get` fetches, in the cache folder; of few items only their images."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    offer_chair(file_server, monkeypatch)
    first = resolve_data("download", "chair", 2)
    assert first.name.endswith("-first2")
    assert chair.Chair.license in caplog.text
    assert sorted(path.name for path in (first / "val2014").iterdir()) == [coco_name(1), coco_name(2)]
    assert sorted(path.name for path in (first / "annotations").iterdir()) == sorted(chair.Chair.downloads[0].members)
    asked = len(file_server.requests)
    assert resolve_data("download", "chair", 2) == first
    assert len(file_server.requests) == asked
    whole = resolve_data("download", "chair")
    assert len(list((whole / "val2014").iterdir())) == 3
    assert resolve_data("download", "chair", 1) == whole  # which serves any limit
    with pytest.raises(RevisitError, match="data folder 'nowhere' does not exist"):
        resolve_data("nowhere", "pope")


@pytest.mark.parametrize("command", ["eval", "reproduce"])
def test_a_run_on_downloaded_data(
    command: str, file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on data that it fetches itself, and the same on a folder from `revisit data get`."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    offer_vqav2(file_server, monkeypatch)
    run("vqav2", tmp_path / "vqav2", "--limit", "3")
    options = ["--benchmark", "vqav2", "--method", "greedy"] if command == "eval" else ["vqav2"]
    for number, place in enumerate(("download", str(tmp_path / "vqav2"))):
        out = tmp_path / f"out{number}"
        words = [command, *options, "--model", "tiny", "--limit", "3", "--data", place, "--out", str(out)]
        result = CliRunner().invoke(app, [*words, "--quiet"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    logs = [sorted(p.name for p in tmp_path.glob(f"out{n}/**/logs/*.jsonl")) for n in (0, 1)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == (1 if command == "eval" else 7 + 2)  # ReVisiT with the thresholds of three models


def test_servers_of_all_kinds(file_server: FileServer, tmp_path: Path) -> None:
    image = jpeg(5)
    file_server.files |= {"/a.jpg": image, "/b.jpg": image}
    file_server.status |= {"/a.jpg": [503, 429], "/b.jpg": [403] * download.ATTEMPTS}  # busy; forbidden
    file_server.cut["/a.jpg"] = [100, 200]
    download.fetch_all([download.Remote("a.jpg", ("http://a.jpg",))], tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == image
    for name, message in (("b.jpg", "status 403"), ("c.jpg", "was not found")):
        with pytest.raises(RevisitError, match=message):
            download.fetch_all([download.Remote(name, (f"http://{name}",))], tmp_path)
    with pytest.raises(RevisitError, match="DIR is missing"):
        run("pope")
