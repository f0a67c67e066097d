"""Whether half precision can run on this CPU: some machines advertise AMX and then refuse its use.

There torch's own bfloat16 product is an illegal instruction and ends the process, so it is tried in a child process,
once for each machine; the outcome is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from revisit import settings
from revisit.errors import RevisitError

CPU_INFO = Path("/proc/cpuinfo")
WITHOUT_AMX = "AVX512_CORE_BF16"  # for ONEDNN_MAX_CPU_ISA
TRIAL = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(64, 64, dtype=dtype)
    (x @ x).sum().item()
"""

_log = logging.getLogger(__name__)


def refuses_amx() -> bool:
    """Whether half-precision products would end this process with an illegal instruction."""
    try:
        lines = CPU_INFO.read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux
        return False
    about = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    if not any("amx_" in line for line in about):
        return False
    key = json.dumps([about, platform.release(), version("torch"), settings.onednn_isa()])
    stored = settings.cache_folder() / f"amx-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return bool(json.loads(stored.read_text("utf-8"))["refused"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    refused = _dies_of_the_instruction()
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"refused": refused}), "utf-8")
    except OSError as error:
        _log.info("the outcome of the AMX trial could not be kept: %s", error)
    return refused


def _dies_of_the_instruction() -> bool:
    """Whether a child process that multiplies half-precision matrices dies of an illegal instruction."""
    try:
        done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("whether this CPU can use AMX could not be tried: %s", error)
        return False
    return done.returncode == -signal.SIGILL


def check_half_precision() -> None:
    """Raises RevisitError where half precision would end the process."""
    if refuses_amx():
        raise RevisitError(
            "This CPU advertises AMX but the system refuses its use, so half precision would end the program with an illegal "
            f"instruction: load with dtype=float32, or set ONEDNN_MAX_CPU_ISA={WITHOUT_AMX} before Python starts."
        )
