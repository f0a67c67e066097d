"""NLTK's data: what is said where it is missing, how it is fetched, and what a score says about it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
from typer.testing import CliRunner

from http_files import FileServer
from revisit.benchmarks import chair, language
from revisit.benchmarks.io import download
from revisit.cli.main import app
from revisit.errors import RevisitError


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without NLTK's data."""
    monkeypatch.delenv("NLTK_DATA", raising=False)
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nltk.data, "path", [])
    for cached in (language._tools, language.version, language.lemma):
        cached.cache_clear()
    yield
    for cached in (language._tools, language.version, language.lemma):
        cached.cache_clear()


def small_data(folder: Path) -> Path:
    """The three packages with next to nothing in them."""
    for package, place in language.PACKAGES.items():
        (folder / place).mkdir(parents=True)
        for name in language.PINNED[package][0]:
            (folder / place / name).write_text(f"{package} {name}\n")
    return folder


def test_missing_data_is_one_sentence() -> None:
    with pytest.raises(RevisitError, match="punkt_tab, averaged_perceptron_tagger_eng, wordnet") as caught:
        chair.parse_caption("a dog")
    assert "revisit data get nltk" in str(caught.value)


def test_fetched_and_found_from_then_on(tmp_path: Path, file_server: FileServer) -> None:
    serve(file_server, small_data(tmp_path / "copy"))
    for _ in ("fetched", "there already"):
        result = CliRunner().invoke(app, ["data", "get", "nltk", "--from", file_server.url])
        assert result.exit_code == 0, result.output
        assert "with other data than the official scorers were compared with (punkt_tab" in result.output
    assert language.missing_packages() == []
    assert (tmp_path / "cache/nltk_data/corpora/wordnet/noun.exc").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(RevisitError, match="is not empty"):
        language.get_data(tmp_path / "mine", file_server.url)


def test_the_version_is_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_server: FileServer
) -> None:
    """Other data elsewhere, which NLTK would find first, says nothing about the folder that was filled."""
    source = small_data(tmp_path / "source")
    serve(file_server, source)
    pinned = {}
    for package, (files, _) in language.PINNED.items():
        bodies = b"".join((source / language.PACKAGES[package] / name).read_bytes() for name in files)
        pinned[package] = (files, hashlib.sha256(bodies).hexdigest())
    monkeypatch.setattr(language, "PINNED", pinned)
    elsewhere = small_data(tmp_path / "elsewhere")
    (elsewhere / "corpora/wordnet/noun.exc").write_text("other words\n")
    monkeypatch.setenv("NLTK_DATA", str(elsewhere))
    assert "with other data than" in language.version()
    for _ in ("filled", "there already"):
        result = CliRunner().invoke(app, ["data", "get", "nltk", str(tmp_path / "new"), "--from", file_server.url])
        assert "with the data that the official scorers were compared with" in result.output, result.output
    assert "(wordnet)" in language.get_data(elsewhere)


def serve(server: FileServer, root: Path) -> None:
    """NLTK's packages as archives on a loopback server."""
    for package, place in language.PACKAGES.items():
        kind, data = place.split("/")[0], io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for path in sorted((root / kind / package).rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(root / kind))
        server.files[f"/{kind}/{package}.zip"] = data.getvalue()


def test_downloaded_from_a_server(tmp_path: Path, file_server: FileServer) -> None:
    serve(file_server, small_data(tmp_path / "source"))
    assert "with other data" in language.get_data(tmp_path / "data", file_server.url)
    assert (tmp_path / "data/taggers/averaged_perceptron_tagger_eng").is_dir()
    assert (
        sorted(p.name for p in (tmp_path / "data").rglob("*") if "." in p.name and p.suffix in (".zip", ".part")) == []
    )


def test_a_damaged_archive_leaves_nothing(tmp_path: Path, file_server: FileServer) -> None:
    serve(file_server, small_data(tmp_path / "source"))
    file_server.files["/corpora/wordnet.zip"] = b"not an archive"
    with pytest.raises(RevisitError, match=r"wordnet\.zip did not arrive as expected \(it is no zip archive"):
        language.get_data(tmp_path / "data", file_server.url)
    with pytest.raises(RevisitError, match=r"wordnet\.zip is not there \(status 404\)"):
        language.get_data(tmp_path / "data", f"{file_server.url}/nowhere")
    assert not (tmp_path / "data").exists()


def test_interrupted_and_resumed(tmp_path: Path, file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE", 0.001)
    serve(file_server, small_data(tmp_path / "source"))
    path = "/corpora/wordnet.zip"
    file_server.cut[path] = [100] + [0] * (download.ATTEMPTS - 1)
    with pytest.raises(RevisitError, match="run the same command again to resume"):
        language.get_data(tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    file_server.requests.clear()
    language.get_data(tmp_path / "data", file_server.url)
    assert (path, "bytes=100-") in file_server.requests
    assert [asked for asked, _ in file_server.requests] == [path]  # the two that had arrived were kept
    assert all((tmp_path / "data" / place).is_dir() for place in language.PACKAGES.values())


def test_a_full_disk(tmp_path: Path, file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(file_server, small_data(tmp_path / "source"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(RevisitError, match=r"needs 66 MB more, and the disk has 0 MB left"):
            language.get_data(tmp_path / "data", file_server.url)
    assert file_server.requests == []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)  # filled up meanwhile
        with pytest.raises(RevisitError, match=r"No space left on device\. What is complete was kept"):
            language.get_data(tmp_path / "data", file_server.url)
    assert not (tmp_path / "data").exists()
    result = CliRunner().invoke(app, ["data", "get", "nltk", str(tmp_path / "data"), "--from", file_server.url])
    assert result.exit_code == 0, result.output
    assert "License of NLTK's data: WordNet's own" in result.output


def test_other_benchmarks_run_meanwhile(tmp_path: Path) -> None:
    common = [
        "eval",
        "--method",
        "greedy",
        "--data",
        "scenes:unusual:2",
        "--limit",
        "2",
        "--max-new-tokens",
        "3",
        "--quiet",
    ]
    result = CliRunner().invoke(app, [*common, "--benchmark", "chair,pope", "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, RevisitError)
    assert result.exception.status == 3
    assert "chair was left out" in str(result.exception)
    assert "revisit data get nltk" in str(result.exception)
    cells = json.loads((tmp_path / "run/results.json").read_text())["cells"]
    assert [cell["benchmark"]["name"] for cell in cells] == ["pope"]
    alone = CliRunner().invoke(app, [*common, "--benchmark", "chair", "--out", str(tmp_path / "alone")])
    assert isinstance(alone.exception, RevisitError)
    assert "NLTK data not found" in str(alone.exception)
    assert not (tmp_path / "alone").exists()
