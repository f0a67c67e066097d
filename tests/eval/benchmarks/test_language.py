"""NLTK's data: the error if it is missing, how it is downloaded, and what a score reports about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import nltk
import pytest
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import chair, language


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without NLTK's data."""
    monkeypatch.delenv("NLTK_DATA", raising=False)
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nltk.data, "path", [])
    for cached in (language._tools, language.lemma):
        cached.cache_clear()
    yield
    for cached in (language._tools, language.lemma):
        cached.cache_clear()


def test_missing_data_raises(tmp_path: Path) -> None:
    with pytest.raises(
        RevisitError, match=r"punkt_tab, averaged_perceptron_tagger_eng, wordnet.*revisit data get nltk"
    ):
        chair.parse_caption("a dalmatian")
    command = ["eval", "--method", "greedy", "--data", str(tmp_path), "--benchmark", "chair,pope"]
    with pytest.raises(RevisitError, match="NLTK data not found"):
        CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert not (tmp_path / "run").exists()  # before the work


@pytest.fixture
def downloader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NLTK's downloader, patched to copy packages with almost no content from this folder."""
    source = tmp_path / "source"
    for package, path in language.PACKAGES.items():
        (source / path).mkdir(parents=True)
        (source / path / "words.txt").write_text(f"{package}\n")

    def download(package: str, download_dir: str, quiet: bool, raise_on_error: bool) -> bool:
        path = "/".join(language.PACKAGES[package].split("/")[:2])
        if not (source / path).is_dir():
            raise ValueError(f"Package {package!r} not found\n in index")
        shutil.copytree(source / path, Path(download_dir) / path, dirs_exist_ok=True)
        return quiet and raise_on_error

    monkeypatch.setattr(nltk, "download", download)
    return source


@pytest.mark.usefixtures("downloader")
def test_downloaded_data_is_found(tmp_path: Path) -> None:
    for _ in ("fetched", "there already"):
        result = CliRunner().invoke(app, ["data", "get", "nltk"])
        assert result.exit_code == 0, result.output
        assert "License of NLTK's data: WordNet's own" in result.output
    assert language.missing_packages() == []
    assert (tmp_path / "cache/nltk_data/corpora/wordnet/words.txt").is_file()


def test_a_corpus_may_stay_zipped(downloader: Path) -> None:
    shutil.make_archive(str(downloader / "corpora/wordnet"), "zip", downloader / "corpora", "wordnet")
    shutil.rmtree(downloader / "corpora/wordnet")
    nltk.data.path.append(str(downloader))
    assert language.missing_packages() == []
    assert language.version() == f"Words by NLTK {nltk.__version__}."


def test_failed_downloads_raise(tmp_path: Path, downloader: Path) -> None:
    shutil.rmtree(downloader / "corpora")
    with pytest.raises(
        RevisitError, match=r"could not download wordnet into .* \(Package 'wordnet' not found in index\)"
    ):
        language.get_data(tmp_path / "data")
