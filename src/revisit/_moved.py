"""Import paths of version 0.1 that still work: `from revisit.trace import Trace` finds `revisit.decoding.trace`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

# module of 0.1 -> module now
MOVED = {
    "revisit.core": "revisit.step.reference",
    "revisit.trace": "revisit.decoding.trace",
    "revisit.methods.base": "revisit.decoding.method",
    "revisit.methods.plain": "revisit.decoding.plain",
    "revisit.geometry": "revisit.models.geometry",
    "revisit.vision": "revisit.taps.vision",
    "revisit.analysis": "revisit.paper",
    "revisit.integrations.lmms_eval": "revisit.evaluation.lmms_eval",
    "revisit.export.custom_generate": "revisit.integrations.custom_generate",
    "revisit.evaluation.local": "revisit.evaluation.engines.local",
    "revisit.evaluation.tables": "revisit.report.tables",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of today under its old name, with a DeprecationWarning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        now = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {now}.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it has run under its own name and keeps it


def install() -> None:
    """Let the old paths be found; called once, when `revisit` is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
