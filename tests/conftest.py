"""Shared paths and settings of the test suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may use the network
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads slow tiny models down
# Some machines advertise AMX but do not allow it, which ends the process in half precision. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT / "tests"))

import recorded_language  # noqa: E402
from http_files import FileServer  # noqa: E402


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference material next to the repository, or skip the test."""
    if not SHARED.is_dir():
        pytest.skip("the reference material (../shared) is missing")
    return SHARED


@pytest.fixture(scope="module")
def nltk_data() -> Iterator[None]:
    """Provide NLTK with its data, or else its recorded output for the sentences of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        recorded_language.provide(patch, SHARED / "data" / "nltk_data")
        yield


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """Serve files on the loopback interface."""
    server = FileServer()
    yield server
    server.close()


# Deadlines would fail on a busy machine.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
