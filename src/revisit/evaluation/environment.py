"""What a result was measured with: versions, machine, commit."""

from __future__ import annotations

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


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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


def command_line() -> list[str]:
    """The command of this process, as one would type it."""
    program = Path(sys.argv[0]).name
    return ["revisit" if program == "__main__.py" else program, *sys.argv[1:]]


def environment() -> dict[str, Any]:
    """The machine and the versions, as `results.json` reports them."""
    import revisit

    return {
        "revisit": revisit.__version__,
        "git": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "libraries": {name: found for name in REPORTED if (found := version(name))},
        "argv": command_line(),
    }
