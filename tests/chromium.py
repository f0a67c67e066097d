"""Find the browser for tests: CHROMIUM if set, else a Chromium or Chrome on the path. Run this file to print it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = "no Chromium was found: install one (Debian: apt-get install chromium) or set CHROMIUM=/path/to/it"


def path() -> str | None:
    """Return the browser's executable, or None."""
    given = os.environ.get("CHROMIUM")
    return shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str | None:
    """Return why browser tests cannot run here; None if they can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[browser]'"
    return None if path() else ADVICE


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"Browser tests cannot run: {reason}.")
    print(f"Browser tests drive {path()}.")
