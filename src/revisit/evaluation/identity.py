"""What identifies the model files and the foreign code behind an answer.

An answer may be used again only while everything that could change it is the same: the version of this package, the
method and its settings, the model's files, the benchmark's options and the prompt. Methods from outside this package have
no version that we know, so their source files count instead.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from revisit.benchmarks.io.files import file_digest
from revisit.errors import RevisitError
from revisit.evaluation.store import digest

# Files of a model folder that cannot change an answer.
_IGNORED = {".md", ".txt", ".png", ".jpg", ".gitattributes", ".log", ".jsonl", ".csv", ".bin", ".pt", ".pth", ".h5"}
_KEPT_TEXT = {"merges.txt", "vocab.txt"}  # tokenizers; the other .txt files are notes


def foreign_code(method: object) -> dict[str, str]:
    """File name → SHA-256 of the source of a method's classes outside this package, those of a chain's links too."""
    found = {}
    for cls in type(method).__mro__:
        if cls is object or cls.__module__.startswith("revisit."):
            break
        with suppress(TypeError):  # a class typed into an interpreter has no file
            if path := inspect.getsourcefile(cls):
                found[Path(path).name] = file_digest(Path(path))
    for link in getattr(method, "methods", ()):
        found |= foreign_code(link)
    return found


def model_folder(name: str) -> Path:
    """The folder with the model's files: itself, or the Hub snapshot in the local cache, fetched if need be."""
    if Path(name).is_dir():
        return Path(name)
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RevisitError(
            f"There is no model {name!r}: it is neither a local folder nor a reachable Hub id ({reason})."
        ) from error


def fingerprint(folder: Path) -> str:
    """A hash of every file of a model folder that could change an answer.

    The Hub's cache names the files it links to by their own hash, so those need not be read again.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if not path.is_file() or relative.startswith(".") or (path.suffix in _IGNORED and path.name not in _KEPT_TEXT):
            continue
        target = path.resolve()
        hashed = target.parent.name == "blobs" and len(target.name) == 64
        found[relative] = target.name if hashed else file_digest(path)
    if not found:
        raise RevisitError(f"{folder} contains no model files.")
    return digest(found)
