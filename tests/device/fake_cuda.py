"""A test device that torch treats as CUDA, on a machine without a GPU: two devices, memory that the host cannot read, and a log
of every kernel, wait and copy with the line of our code that caused it. It computes real numbers and measures no time.

`load()` builds device.cpp once (one to two minutes) into the cache folder and makes `torch.device("cuda")` work.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from revisit import settings

SOURCE = Path(__file__).with_name("device.cpp")
OURS = "/src/revisit/"
OUTSIDE = ("/transformers/", "/accelerate/")
GATHERS = ("index", "index_select", "gather", "embedding", "scatter", "scatter_")


def unavailable() -> str | None:
    """Return the reason why the device cannot be built here, in one line; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the test device needs Linux"
    if shutil.which("c++") is None:
        return "the test device needs a C++ compiler"
    if not torch.__version__.startswith("2.13") or torch.version.cuda is not None:
        return f"the test device is written for the CPU build of torch 2.13, not for {torch.__version__}"
    return None


@dataclass(frozen=True)
class Event:
    """One call of the device."""

    kind: str  # kernel, wait, asynchronous copy, between devices
    name: str
    read: int
    written: int
    place: str | None  # file:line of our code that caused it; None for other code

    @property
    def bytes(self) -> int:
        """Bytes moved; a gather moves only its result."""
        short = self.name.split("::")[-1].split(".")[0]
        return 2 * self.written if short in GATHERS else self.read + self.written


class Log:
    """Calls of the device by our code within the context."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __enter__(self) -> Log:
        _extension().listen(self.add)
        _STATE.log = self
        return self

    def __exit__(self, *_: object) -> None:
        _extension().listen(None)
        _STATE.log = None

    def add(self, kind: str, name: str, read: int, written: int) -> None:
        frame, place = sys._getframe(1), None
        while frame is not None and place is None:
            path = frame.f_code.co_filename
            if any(part in path for part in OUTSIDE):
                break
            place = f"{path.split(OURS)[1]}:{frame.f_lineno}" if OURS in path else None
            frame = frame.f_back  # type: ignore[assignment]
        self.events.append(Event(kind, name, read, written, place))

    def count(self, kind: str) -> int:
        return sum(event.kind == kind and event.place is not None for event in self.events)

    @property
    def kernels(self) -> int:
        return self.count("kernel")

    @property
    def waits(self) -> int:
        return self.count("wait")

    @property
    def bytes(self) -> int:
        return sum(event.bytes for event in self.events if event.kind == "kernel" and event.place is not None)

    def places(self, kind: str) -> Counter[tuple[str, str | None]]:
        """Count the calls of a kind by line of our code."""
        return Counter((event.name, event.place) for event in self.events if event.kind == kind and event.place)


_STATE = SimpleNamespace(log=None)


class _Event:
    """An event of a stream, whose waits are logged."""

    ticks = itertools.count()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tick = 0

    def record(self, *_: Any) -> None:
        self.tick = next(self.ticks)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds: one for each event that was recorded since."""
        return float(later.tick - self.tick)

    def synchronize(self) -> None:
        if _STATE.log is not None:
            _STATE.log.add("wait", "event", 0, 0)


def _synchronize(*_: Any) -> None:
    if _STATE.log is not None:
        _STATE.log.add("wait", "synchronize", 0, 0)


@functools.cache
def _extension() -> Any:
    version = SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()
    folder = settings.cache_folder() / "test-device"
    built = folder / f"device_{hashlib.sha256(version).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        root, draft = Path(torch.__file__).parent, built.with_suffix(".draft.so")
        includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command = ["c++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        command += ["-DTORCH_EXTENSION_NAME=revisit_test_device", *(f"-I{path}" for path in includes), str(SOURCE)]
        command += ["-o", str(draft), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        subprocess.run(command, check=True)
        draft.rename(built)
    spec = importlib.util.spec_from_file_location("revisit_test_device", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load() -> None:
    """Make torch report two CUDA devices, for the rest of the process."""
    extension = _extension()
    properties = SimpleNamespace(major=8, minor=0, total_memory=80 << 30, multi_processor_count=108, name="test device")
    answers: dict[str, Any] = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": extension.current,
        "set_device": lambda device: extension.set_current(torch.device(device).index or 0),
        "Event": _Event,
        "synchronize": _synchronize,
        "manual_seed_all": lambda _: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: "test device",
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # type: ignore[assignment]
    deepcopy = torch.Tensor.__deepcopy__

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_cuda:
            return deepcopy(self, memo)  # type: ignore[no-any-return, no-untyped-call]
        twin = self.detach().clone()
        memo[id(self)] = torch.nn.Parameter(twin, self.requires_grad) if isinstance(self, torch.nn.Parameter) else twin
        return memo[id(self)]  # type: ignore[no-any-return]

    torch.Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
