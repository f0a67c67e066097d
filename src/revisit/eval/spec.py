"""The identity of an evaluation: everything that could change an answer, except the item itself.

A stored answer is used again only if its spec is the same. Methods from outside this package have no version, so a spec has the hashes of
their code.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import cached_property
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import revisit
from revisit.decoding.method import Method
from revisit.decoding.method_id import MethodId, changed, labelled
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Benchmark
from revisit.io.files import digest
from revisit.io.records import Fields
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
    method: MethodId  # with the settings that are not its defaults, and the control
    settings: Fields  # all settings of the method
    code: list[str]  # "NAME SHA-256" of the code of a method or benchmark from outside this package
    benchmark: str  # label: name with every option that is not its default
    benchmark_name: str
    options: Fields  # of the benchmark
    scorer: str  # version of the scoring rule
    decoding: Fields  # length, sampling, beams
    seed: int  # of sampling; 0 without sampling
    engine: str
    libraries: dict[str, str | None]  # versions of this package and of those between the prompt and the text
    batching: Fields | None  # the batches, if answers could depend on them
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
        identity: Fields,
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
            method=MethodId.of(method, control),
            settings=method.settings(),
            code=sorted({*foreign_code(method), *foreign_code(benchmark)}),
            benchmark=label(benchmark),
            benchmark_name=benchmark.name,
            options=benchmark.options(),
            scorer=benchmark.version,
            decoding=dict(decoding),
            seed=seed if decoding.temperature is not None else 0,
            subset=subset,
        )


def label(benchmark: Benchmark) -> str:
    """Return the name of a benchmark with every option that is not its default: `pope(parser=vcd)`."""
    return labelled(benchmark.name, changed(benchmark.options(), type(benchmark)().options()))


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


def environment() -> Fields:
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
