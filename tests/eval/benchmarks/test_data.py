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
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from http_files import FileServer
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import amber, chair, get, mmhal, mmvp, phd, pope, vqav2
from revisit.eval.benchmarks.base import Benchmark
from revisit.eval.benchmarks.io import data, download
from revisit.eval.benchmarks.io.places import resolve_data


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
    """Puts the benchmark's files on the server, with their checksums in place of the published ones."""
    remotes = []
    for remote in cls.downloads:
        body = contents[remote.path]
        server.files[f"/{remote.urls[0].partition('://')[2]}"] = body
        known = hashlib.sha256(body).hexdigest() if remote.sha256 else ""
        remotes.append(dataclasses.replace(remote, sha256=known))
    patch.setattr(cls, "downloads", tuple(remotes))


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
    server.files["/cs.stanford.edu/people/rak248/VG_100K_2/2400007.jpg"] = jpeg(
        70
    )  # not in the first of the two folders


def offer_repope(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    question = {"question_id": 1, "image": coco_name(8), "text": "Is there a dog?", "label": "yes"}
    offer(server, pope.RePope, {remote.path: lines([question]) for remote in pope.RePope.downloads}, patch)
    coco_images(server, 8)


def offer_chair(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    images = [{"id": n, "file_name": coco_name(n)} for n in (1, 2, 3)]
    instances = {"images": images, "categories": [{"id": 1, "name": "dog"}], "annotations": []}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("annotations/instances_val2014.json", json.dumps(instances))
        archive.writestr("annotations/captions_val2014.json", json.dumps({"images": images, "annotations": []}))
        archive.writestr("annotations/instances_train2014.json", "{}" * 1000)
    offer(server, chair.Chair, {chair.Chair.downloads[0].path: packed.getvalue()}, patch)
    coco_images(server, 1, 2, 3)


def offer_amber(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    notes = [{"id": n, "type": "discriminative-hallucination", "truth": "no"} for n in (1, 2)]
    queries = [{"id": n, "image": f"AMBER_{n}.jpg", "query": "Is there a dog?"} for n in (1, 2)]
    contents = {"annotations": notes, "relation": {}, "safe_words": [], "query_all": queries}
    by_path = {r.path: json.dumps(contents[Path(r.path).stem]).encode() for r in amber.Amber.downloads}
    offer(server, amber.Amber, by_path, patch)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for n in (1, 2, 3):
            archive.writestr(f"images/image/AMBER_{n}.jpg", jpeg(n))
    server.files[f"/{amber._IMAGES.partition('://')[2]}"] = packed.getvalue()


def zipped(**members: Any) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            archive.writestr(f"{name}.json", json.dumps(value))
    return packed.getvalue()


def offer_vqav2(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    """The two official archives; no checksum of theirs is published, so none is known."""
    asked = [{"question_id": 10 * n, "image_id": n, "question": f"What is on image {n}?"} for n in range(11, 61)]
    answers = [{"answer": "a hill", "answer_confidence": "yes", "answer_id": n} for n in range(1, 11)]
    notes = [{"question_id": 10 * n, "image_id": n, "answers": answers} for n in range(11, 61)]
    for remote, body in zip(
        vqav2.VQAv2.downloads,
        (
            zipped(**{vqav2.QUESTIONS.removesuffix(".json"): {"questions": asked}}),
            zipped(**{vqav2.ANNOTATIONS.removesuffix(".json"): {"annotations": notes}}),
        ),
        strict=True,
    ):
        server.files[f"/{remote.urls[0].partition('://')[2]}"] = body
    coco_images(server, *range(11, 61))


def offer_mmhal(server: FileServer, patch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "question_type": "counting",
            "image_id": f"a{n}",
            "image_src": f"https://farm1.staticflickr.com/{n}_o.jpg",
            "image_content": ["Dog"],
            "question": "How many dogs are there?",
            "gt_answer": "Two.",
        }
        for n in (1, 2)
    ]
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
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for n in (0, 1):
            archive.writestr(f"CCS_images/{n}.png", jpeg(n))
    server.files[f"/{phd._CCS.partition('://')[2]}"] = packed.getvalue()


OFFERS: dict[str, Callable[[FileServer, pytest.MonkeyPatch], None]] = {
    "pope": offer_pope,
    "repope": offer_repope,
    "chair": offer_chair,
    "amber": offer_amber,
    "vqav2": offer_vqav2,
    "mmhal": offer_mmhal,
    "mmvp": offer_mmvp,
    "phd": offer_phd,
}
IMAGES = {"pope": 2, "repope": 1, "chair": 3, "amber": 2, "vqav2": 50, "mmhal": 2, "mmvp": 2, "phd": 3}


@pytest.fixture(params=OFFERS)
def offered(request: Any, file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A benchmark whose servers are on the loopback."""
    OFFERS[request.param](file_server, monkeypatch)
    return str(request.param)


def test_fetched_whole_and_only_once(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    printed = run(offered, tmp_path / "data", "--from", file_server.url)
    assert f"{IMAGES[offered]} images of {offered}" in printed
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
    with pytest.raises(RevisitError, match="is not empty and contains"):
        data.get(offered, tmp_path / "data", file_server.url, limit=1)


def test_interrupted_and_resumed(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    longest = max(file_server.files, key=lambda path: len(file_server.files[path]))
    file_server.cut[longest] = [len(file_server.files[longest]) // 2] * download.ATTEMPTS
    with pytest.raises(RevisitError, match=r"after 5 attempts .* run the same command again to resume"):
        data.get(offered, tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    complete = {p.name for p in (tmp_path / ".data.draft").rglob("*") if p.is_file() and p.suffix != ".part"}
    file_server.sent.clear()
    data.get(offered, tmp_path / "data", file_server.url)
    assert not complete & {Path(path).name for path in file_server.sent}  # what had arrived is kept
    assert (tmp_path / "data/source.json").is_file()


def test_corrupted_on_the_way(offered: str, file_server: FileServer, tmp_path: Path) -> None:
    images = [path for path in file_server.files if path.endswith(".jpg")]
    only_lengths = ("/PhD/4cc31db049a70abff2912d5c083ebcc5c384b011/data.json", "/MMVP/resolve/main/Questions.csv")
    chosen = [
        path for path in file_server.files if path not in images[1:] and not path.endswith(only_lengths)
    ]  # one image stands for all
    for path in chosen:
        body = file_server.files[path]
        middle = len(body) // 4
        flipped = body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]
        for damaged in (bytes(reversed(body)), flipped) if path not in images else (bytes(reversed(body)),):
            file_server.files[path] = damaged
            with pytest.raises(RevisitError, match="did not arrive as expected"):
                data.get(offered, tmp_path / "data", file_server.url)
            assert not (tmp_path / "data").exists()
        file_server.files[path] = body
        shutil.rmtree(tmp_path / ".data.draft", ignore_errors=True)
    data.get(offered, tmp_path / "data", file_server.url)


def test_a_full_disk_raises(
    offered: str, file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(RevisitError, match=r"No space left on device\. What is complete was kept"):
            data.get(offered, tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    data.get(offered, tmp_path / "data", file_server.url)


def test_a_run_fetches_what_it_needs_once(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`--data download` is what `revisit data get` fetches, in the cache folder; of few items only their images."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    offer_chair(file_server, monkeypatch)
    place = f"download:{file_server.url}"
    first = resolve_data(place, "chair", 2)
    assert first.name.endswith("-first2")
    assert chair.COCO_LICENSE in caplog.text
    assert sorted(path.name for path in (first / "val2014").iterdir()) == [coco_name(1), coco_name(2)]
    asked = len(file_server.requests)
    assert resolve_data(place, "chair", 2) == first
    assert len(file_server.requests) == asked
    whole = resolve_data(place, "chair")
    assert len(list((whole / "val2014").iterdir())) == 3
    assert resolve_data(place, "chair", 1) == whole  # which serves any limit
    offer_vqav2(file_server, monkeypatch)
    some = resolve_data(place, "vqav2", 7)
    assert len(list((some / "val2014").iterdir())) == 7


@pytest.mark.parametrize("command", ["eval", "reproduce"])
def test_from_the_servers_to_a_table(
    command: str, file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on data that it fetches itself, and the same on a folder from `revisit data get`."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    offer_vqav2(file_server, monkeypatch)
    folder = tmp_path / "vqav2"
    run("vqav2", folder, "--from", file_server.url, "--limit", "3")
    options = ["--benchmark", "vqav2", "--method", "greedy"] if command == "eval" else ["vqav2"]
    for number, place in enumerate((f"download:{file_server.url}", str(folder))):
        out = tmp_path / f"out{number}"
        words = [command, *options, "--model", "tiny", "--limit", "3", "--data", place, "--out", str(out)]
        result = CliRunner().invoke(app, [*words, "--quiet"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    logs = [sorted(p.name for p in tmp_path.glob(f"out{n}/**/logs/*.jsonl")) for n in (0, 1)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == (1 if command == "eval" else 7 + 2)  # ReVisiT with the thresholds of three models


def test_items_without_images_raise(file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder downloaded with a limit lists every question; a run that needs more images raises an error at once."""
    offer_vqav2(file_server, monkeypatch)
    run("vqav2", tmp_path / "data", "--from", file_server.url, "--limit", "3")
    words = ["eval", "--model", "tiny", "--method", "greedy", "--benchmark", "vqav2", "--data", tmp_path / "data"]
    with pytest.raises(RevisitError, match=r"downloaded with --limit 3.*use --limit 3"):
        CliRunner().invoke(app, [*map(str, words), "--out", str(tmp_path / "out")], catch_exceptions=False)


def test_servers_of_all_kinds(file_server: FileServer, tmp_path: Path) -> None:
    image = jpeg(5)
    file_server.files |= {"/a.jpg": image, "/b.jpg": image}
    file_server.status |= {"/a.jpg": [503, 429], "/b.jpg": [403]}  # busy; forbidden
    file_server.cut["/a.jpg"] = [100, 200]
    download.fetch_all([download.Remote("a.jpg", (f"{file_server.url}/a.jpg",))], tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == image
    for name, message in (("b.jpg", "failed with status 403"), ("c.jpg", "was not found")):
        with pytest.raises(RevisitError, match=message):
            download.fetch_all([download.Remote(name, (f"{file_server.url}/{name}",))], tmp_path)


def test_only_the_images_a_run_needs(file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_must_be_named() -> None:
    with pytest.raises(RevisitError, match="DIR is missing"):
        run("pope")
