"""The identity of an evaluation: everything that could change an answer, except the item itself.

A stored answer is used again only if its spec is the same. Methods from outside this package have no version, so a spec has the hashes of
their code.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import revisit
from revisit.decoding.method import Method, value_text
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Benchmark
from revisit.eval.controls import control_label
from revisit.io.files import digest
from revisit.models.identity import foreign_code

_REPORTED = ("torch", "transformers", "tokenizers", "numpy", "pillow", "scipy", "statsmodels", "nltk", "datasets")


class Frozen(BaseModel):
    """Base of everything that a log stores: unknown fields raise an error, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spec(Frozen):
    """The identity of the answers in one log; any difference is another log."""

    model: str  # folder or Hub id
    fingerprint: str  # SHA-256 of the model's files, or of the weights of a loaded model
    device: str  # torch's name of the kind of device, such as "cuda"
    dtype: str  # torch's name, such as "bfloat16"
    method: str  # label: name with every setting that is not its default
    method_name: str
    settings: dict[str, Any]  # of the method
    code: list[str]  # "NAME SHA-256" of the code of a method or benchmark from outside this package
    benchmark: str  # label: name with every option that is not its default
    benchmark_name: str
    options: dict[str, Any]  # of the benchmark
    scorer: str  # version of the scoring rule
    decoding: dict[str, Any]  # length, sampling, beams
    seed: int  # of sampling; 0 without sampling
    engine: str
    libraries: dict[str, str | None]  # versions of this package and of those between the prompt and the text
    batching: dict[str, Any] | None  # the batches, if answers could depend on them
    control: str = ""  # what replaces an item's images; empty: nothing
    subset: str = ""  # name of a selection of the items; empty: all

    @cached_property
    def key(self) -> str:
        """The SHA-256 of all fields."""
        return digest(self.model_dump(mode="json"))

    @cached_property
    def similar(self) -> str:
        """A hash that specs share if they differ only in weights, code, libraries or batching; pages show the newest log of these."""
        return digest(self.model_dump(mode="json", exclude={"fingerprint", "code", "libraries", "batching"}))

    @classmethod
    def of(
        cls,
        identity: Mapping[str, Any],
        method: Method,
        benchmark: Benchmark,
        decoding: Decoding,
        seed: int = 0,
        control: str = "",
        subset: str = "",
    ) -> Spec:
        """Return the spec of a method and benchmark on the engine with this `identity`."""
        return cls(
            **identity,
            method=control_label(label(method), control),
            method_name=method.name,
            settings=method.settings(),
            code=sorted({*foreign_code(method), *foreign_code(benchmark)}),
            benchmark=label(benchmark),
            benchmark_name=benchmark.name,
            options=benchmark.options(),
            scorer=benchmark.version,
            decoding=dict(decoding),
            seed=seed if decoding.temperature is not None else 0,
            control=control,
            subset=subset,
        )


def label(part: Method | Benchmark) -> str:
    """Return the name of a method or benchmark with every setting that is not its default: `revisit(alpha=0.01)`."""
    settings, defaults = (p.settings() if isinstance(p, Method) else p.options() for p in (part, type(part)()))
    changed = {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
    listed = ", ".join(f"{key}={value_text(value)}" for key, value in changed.items())
    return f"{part.name}({listed})" if listed else part.name


# -- environment ----------------------------------------------------------------------------------------------------


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def libraries(*names: str) -> dict[str, str | None]:
    """Return the versions of this package and of these distributions."""
    return {"revisit": revisit.__version__, **{name: version(name) for name in names}}


def command_line() -> list[str]:
    """Return the command line of this process, as a user would type it."""
    program = Path(sys.argv[0])
    return [program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def environment() -> dict[str, Any]:
    """Return the machine, the versions and the command line."""
    return {
        "revisit": revisit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "libraries": {name: found for name in _REPORTED if (found := version(name))},
        "argv": command_line(),
    }
