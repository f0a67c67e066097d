"""Make the torchvision wheel of the Python package index importable with a CPU build of torch.

vLLM depends on torchvision, whose wheel there is a CUDA build: its C++ operators do not load with a CPU torch, and the
import fails because two operator schemas are missing. Declaring them is enough for everything but the operators
themselves, which neither vLLM nor transformers use here.

    python cpu_torchvision.py SITE_PACKAGES     installs this file there, to act in every process of that environment
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import shutil
import sys
from pathlib import Path
from types import ModuleType


class Declare(importlib.abc.MetaPathFinder):
    """Declares the missing schemas before torchvision is first imported."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> None:
        if name == "torchvision" and not hasattr(Declare, "library"):
            import torch

            Declare.library = torch.library.Library("torchvision", "DEF")
            Declare.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            Declare.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    site = Path(sys.argv[1])
    shutil.copy(__file__, site / "cpu_torchvision.py")
    (site / "cpu_torchvision.pth").write_text("import cpu_torchvision\n")
else:
    sys.meta_path.insert(0, Declare())
