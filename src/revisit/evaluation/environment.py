"""Where a number was made: versions, machine, commit. Versions that could change an answer are part of its identity."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
REPORTED = ("torch", "transformers", "tokenizers", "numpy", "pillow", "scipy", "statsmodels", "nltk", "datasets")

# What may change the text a model gives: everything below the benchmarks. Editing a scorer keeps the answers.
_DECODING = (
    *(
        f"{room}/**/*.{kind}"
        for room in ("decoding", "step", "taps", "contrast", "methods", "models")
        for kind in ("py", "c")
    ),
    *("evaluation/engines/base.py", "evaluation/engines/local.py", "studies/shared.py"),
)


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_digest() -> str:
    """SHA-256 of this package's decoding sources: a changed method never meets answers of its older self."""
    state = hashlib.sha256()
    for path in sorted(path for pattern in _DECODING for path in PACKAGE.glob(pattern)):
        state.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


@cache
def git_commit() -> str | None:
    """The commit this package runs from, with "+changes" if the tree differs from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def environment() -> dict[str, Any]:
    """The machine and the versions, as `results.json` reports them."""
    import revisit

    return {
        "revisit": revisit.__version__,
        "code": code_digest(),
        "git": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "libraries": {name: found for name in REPORTED if (found := version(name))},
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
