"""Shared paths and settings of the test suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the suite may reach for the network
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads only get in each other's way
# Some machines advertise AMX and refuse its use: half precision would end the process. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT / "tests"))

import recorded_language  # noqa: E402
from http_files import FileServer  # noqa: E402


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference material that is kept beside the repository, not in it."""
    if not SHARED.is_dir():
        pytest.skip("the reference material (../shared) is not here")  # honest: these tests compare with it
    return SHARED


@pytest.fixture(scope="module")
def nltk_data() -> Iterator[None]:
    """NLTK with its data, where it is; elsewhere what it gave for the sentences of these tests, as recorded."""
    with pytest.MonkeyPatch.context() as patch:
        recorded_language.provide(patch, SHARED / "data" / "nltk_data")
        yield


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """A file server on the loopback."""
    server = FileServer()
    yield server
    server.close()


# A busy machine is slow at times, which says nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
