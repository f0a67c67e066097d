"""The identity of an evaluation: everything that could change an answer, except the item itself.

A stored answer is used again only if its spec is the same. Methods from outside this package have no version, so a spec has the hashes of
their source files.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import os
import platform
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

import revisit
from revisit.decoding.method import Method, value_text
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark
from revisit.eval.controls import control_label
from revisit.io.files import digest, file_digest

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

# Files of a model folder that cannot change an answer.
_IGNORED = {".md", ".txt", ".png", ".jpg", ".gitattributes", ".log", ".jsonl", ".csv", ".bin", ".pt", ".pth", ".h5"}
_TOKENIZER_FILES = {"merges.txt", "vocab.txt"}  # other .txt files are notes
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
    code: list[str]  # "NAME SHA-256" of the source files of a method or benchmark from outside this package
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


# -- models and methods ---------------------------------------------------------------------------------------------


def foreign_code(instance: object) -> set[str]:
    """Return "NAME SHA-256" of the code outside this package that defines a method or benchmark.

    This includes the modules that its file imports from the same folder, and the methods of a chain.
    """
    code = set()
    for cls in type(instance).__mro__:
        if cls.__module__.partition(".")[0] in ("builtins", "pydantic", "revisit", "typing"):
            continue
        if files := _files_of(sys.modules.get(cls.__module__)):
            code |= {f"{path.name} {file_digest(path)}" for path in files}
        else:  # typed into a notebook or an interpreter
            functions = [value.__code__ for value in vars(cls).values() if inspect.isfunction(value)]
            code.add(f"{cls.__name__} {hashlib.sha256(marshal.dumps(functions)).hexdigest()}")
    return code.union(*map(foreign_code, getattr(instance, "methods", ())))


def _files_of(module: ModuleType | None) -> set[Path]:
    """Return the source file of a module, and those of the modules that it imports from the same folder."""
    start = Path(getattr(module, "__file__", None) or "")
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        module = waiting.pop()
        path = Path(getattr(module, "__file__", None) or "")
        if module is None or path in found or not path.is_file() or not _is_local(module, path, start):
            continue
        found.add(path)
        for value in list(vars(module).values()):
            owner = value if isinstance(value, ModuleType) else sys.modules.get(str(getattr(value, "__module__", "")))
            waiting.append(owner)
    return found


def _is_local(module: ModuleType, path: Path, start: Path) -> bool:
    """Return whether a module is a user's own: below the folder of `start`, not installed and not Python's library."""
    package, installed = module.__name__.partition(".")[0], {"site-packages", "dist-packages"}
    if path == start or not path.is_relative_to(start.parent):
        return path == start
    below = {start.parent.name, *path.relative_to(start.parent).parts}
    return package != "revisit" and package not in sys.stdlib_module_names and not installed & below


def model_folder(name: str) -> Path:
    """Return the folder with a model's files: a local folder, or the Hub snapshot in the cache, downloaded if needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if Path(name).is_dir():
        return Path(name)
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RevisitError(
            f"There is no model {name!r}: it is neither a local folder nor a reachable Hub id ({reason})."
        ) from error


def fingerprint(folder: Path) -> str:
    """Return a hash of every file of a model folder that could change an answer.

    The Hub's cache names files by their hash, so those need not be read.
    """
    digests = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        ignored = path.suffix in _IGNORED and path.name not in _TOKENIZER_FILES
        if not path.is_file() or relative.startswith(".") or ignored:
            continue
        target = path.resolve()
        hashed = target.parent.name == "blobs" and len(target.name) == 64
        digests[relative] = target.name if hashed else file_digest(path)
    if not digests:
        raise RevisitError(f"{folder} contains no model files.")
    return digest(digests)


def loaded_fingerprint(model: Model, processor: Processor) -> str:
    """Return a hash of a loaded model and its processor, which may differ from their files."""
    import torch

    weights = {}
    for name, tensor in model.state_dict().items():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        weights[name] = [list(tensor.shape), hashlib.sha256(data.tobytes()).hexdigest()]
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    inputs = [processor.to_dict(), processor.chat_template, processor.tokenizer.get_vocab()]
    return digest([config, model.generation_config.to_dict(), inputs, weights])


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
