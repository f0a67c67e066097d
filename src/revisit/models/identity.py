"""Identify models, methods and benchmarks by what they are made of: stored answers are only used again for the same ones.

Installed code is identified by its name and version, a user's own files by their hash, and code that was typed into a notebook by its
instructions and everything that these refer to.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from revisit.errors import RevisitError
from revisit.io.files import digest, file_digest

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.models.types import Model, Processor

logger = logging.getLogger(__name__)

# Files of a model folder that cannot change an answer.
_IGNORED = {".md", ".txt", ".png", ".jpg", ".gitattributes", ".log", ".jsonl", ".csv", ".bin", ".pt", ".pth", ".h5"}
_TOKENIZER_FILES = {"merges.txt", "vocab.txt"}  # other .txt files are notes
# Packages that put functions and states of their own into models, which do not change answers.
_USUAL = re.compile(r"(accelerate|revisit|transformers|torch\._dynamo)(\.|$)")
_ATOMS = (type(None), type(...), bool, int, float, complex, str, bytes)
# Attributes of a class that say nothing about its instances, or that pydantic derives from others.
_DERIVED = {*vars(type("", (), {})), "__annotations__", "__annotate_func__", "__annotations_cache__", "__signature__"}
_DERIVED |= {"__abstractmethods__", "__doc__", "_abc_impl"}
# Attributes of a code object: without its file and its lines.
_CODE = ["code", "consts", "names", "varnames", "freevars", "cellvars", "flags", "exceptiontable"]
_CODE += ["argcount", "posonlyargcount", "kwonlyargcount"]


class Unidentified(Exception):
    """Raised for a value whose content cannot be read."""


def unless_unidentified(owner: str, identify: Callable[[], object]) -> str:
    """Return the hash of `identify()`, or if that fails an identity that nothing else has, with a warning."""
    try:
        return digest(identify())
    except (Unidentified, RecursionError) as error:
        logger.warning("%s cannot be identified (%s): its answers are stored, but never used again.", owner, error)
        return f"unidentified-{uuid4().hex}"


# -- code -----------------------------------------------------------------------------------------------------------


def foreign_code(instance: object) -> set[str]:
    """Return "NAME HASH" of the code outside this package that defines a method or benchmark.

    A file's code includes the modules that it imports from the same folder. A chain's includes that of its methods.
    """
    code = set()
    for cls in type(instance).__mro__:
        if cls.__module__.partition(".")[0] in ("builtins", "pydantic", "revisit", "typing"):
            continue
        origin = _origin(cls.__module__)
        code |= set(origin or [f"{cls.__name__} {unless_unidentified(cls.__name__, lambda: _content(cls, {}))}"])  # noqa: B023
    return code.union(*map(foreign_code, getattr(instance, "methods", ())))


def _origin(name: str) -> list[str]:
    """Return what identifies a module: its files if it is the user's own, or name and version; nothing if it has no file."""
    module, package = sys.modules.get(name), name.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "")
    if package == "revisit" or package in sys.stdlib_module_names:
        return [name]
    if module is None or not path.is_file() or (name == "__main__" and hasattr(sys, "ps1")):  # an interactive session
        return []
    if _is_installed(path):
        return [f"{name} {getattr(sys.modules.get(package), '__version__', '')}"]
    return sorted(f"{file.name} {file_digest(file)}" for file in _files_of(module))


def _is_installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts))


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
    package = module.__name__.partition(".")[0]
    if path == start or not path.is_relative_to(start.parent):
        return path == start
    return (
        package != "revisit"
        and package not in sys.stdlib_module_names
        and not _is_installed(Path(start.parent.name, path.relative_to(start.parent)))
    )


def _content(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Return nested lists of text that are equal for two values only if these behave alike, also in another process.

    `seen` has the objects on the way, which may refer to each other. Raises Unidentified for files, locks, generators and the like.
    """
    if isinstance(value, _ATOMS):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return [type(value).__name__, *(_content(entry, seen) for entry in value)]
    if isinstance(value, CodeType):
        return ["code", *(_content(getattr(value, f"co_{name}", None), seen) for name in _CODE)]
    if id(value) in seen:
        return f"seen {seen[id(value)][0]}"
    seen[id(value)] = len(seen), value  # keeps it, so that no other object gets its id
    return [type(value).__qualname__, *(_content(part, seen) for part in _parts(value))]


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of an object that decide what it does."""
    import torch

    if isinstance(value, ModuleType):
        yield _origin(value.__name__) or {name: v for name, v in vars(value).items() if not name.startswith("__")}
    elif isinstance(value, type):
        yield value.__qualname__
        if origin := _origin(value.__module__):
            yield origin
        else:
            yield (type(value), *value.__bases__)
            yield {k: v for k, v in vars(value).items() if k not in _DERIVED and not k.startswith("__pydantic")}
    elif isinstance(value, FunctionType):
        yield value.__qualname__
        origin = _origin(_home(value))
        yield origin or value.__code__
        if not origin:
            yield {name: value.__globals__[name] for name in _global_names(value.__code__) if name in value.__globals__}
        if not origin or "<locals>" in value.__qualname__ or not _origin(_home(getattr(value, "__wrapped__", value))):
            yield value.__defaults__, value.__kwdefaults__, vars(value)
            yield [cell.cell_contents for cell in value.__closure__ or ()]
    elif hasattr(value, "cache_parameters"):  # of functools.lru_cache, which pickles by its name alone
        yield value.__wrapped__
    elif isinstance(value, MethodType):  # of a partial function too, which has no name to be pickled by
        yield from (value.__func__, value.__self__)
    elif isinstance(value, BuiltinFunctionType):
        yield from (value.__qualname__, value.__self__)
    elif isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
        yield from (getattr(value, name, None) for name in ("fget", "fset", "fdel", "__func__", "func"))
    elif type(value) in (set, frozenset):
        yield from sorted(digest(_content(entry, {})) for entry in value)
    elif isinstance(value, torch.Tensor):
        yield _tensor_hash(value)
    else:
        try:
            made = value.__reduce_ex__(4)  # as for a pickle
        except Exception as error:  # any code of the user's
            raise Unidentified(f"it refers to a {type(value).__name__}") from error
        yield from (
            [made] if isinstance(made, str) else [part if n < 3 else list(part or ()) for n, part in enumerate(made)]
        )


def _home(function: Any) -> str:
    """Return the name of the module whose globals a function reads; decorators give their wrappers the name of what they wrap."""
    return getattr(function, "__globals__", {}).get("__name__") or ""


def _global_names(code: CodeType) -> Iterable[str]:
    """Return the names of globals that code, and the functions inside it, read."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return sorted(names.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType))))


# -- models ---------------------------------------------------------------------------------------------------------


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
    """Return a hash of a loaded model and its processor, which may differ from their files.

    It covers adapters (which are active, merged or disabled, and how they are scaled), hooks and replaced functions.
    """

    from revisit.models.head import plain_tensors  # imports torch

    def identify() -> list[Any]:
        config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
        tokenizer = processor.tokenizer
        fast = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
        inputs = [processor.to_dict(), processor.chat_template, {**fast, "padding": None, "truncation": None}]
        state = model.state_dict().items()
        weights = {name: [_tensor_hash(part) for part in plain_tensors(tensor)] for name, tensor in state}
        return [config, model.generation_config.to_dict(), inputs, weights, list(_changes(model, processor))]

    return unless_unidentified("This model", identify)


def state_of(model: Model, processor: Processor) -> str:
    """Return a hash of what may differ between two calls of a loaded model, without reading its weights."""

    def identify() -> list[Any]:
        weights = [(weight.data_ptr(), weight._version) for weight in model.parameters()]
        return [weights, list(_changes(model, processor))]

    return unless_unidentified("This model", identify)


def _tensor_hash(tensor: Tensor) -> list[Any]:
    import torch

    try:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    except Exception as error:  # off-loaded, or of a type that has no bytes
        raise Unidentified("its weights cannot be read; they may be off-loaded") from error
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(data.tobytes()).hexdigest()]


def _changes(model: Model, processor: Processor) -> Iterator[Any]:
    """Yield what the weights and the configuration of a model do not tell: code and state from outside transformers and torch."""
    from torch.nn.modules import module as torch_module
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = model.config._attn_implementation
    hooks = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    everywhere, seen = [ALL_ATTENTION_FUNCTIONS.get(attention), *hooks], dict[int, tuple[int, Any]]()
    yield [attention, *(_content(function, seen) for function in everywhere if not _is_usual(function))]
    common = vars(torch_module.Module()).keys()
    parts = (processor, getattr(processor, "tokenizer", None), getattr(processor, "image_processor", None))
    for part in [*filter(None, parts), *model.modules()]:
        cls, values = type(part), vars(part)
        seen[id(part)] = len(seen), part
        functions = [cls.__call__, getattr(cls, "forward", None)]
        functions += [value for key, value in values.items() if callable(value) and callable(getattr(cls, key, None))]
        functions += [*values.get("_forward_hooks", {}).values(), *values.get("_forward_pre_hooks", {}).values()]
        yield [values.get("training"), *(_content(function, seen) for function in functions if not _is_usual(function))]
        if not _is_usual(cls):  # torch's, an adapter, or the user's
            installed = _is_installed(Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or ""))
            yield _content(cls, seen)
            state = {k: v for k, v in values.items() if k not in common and (not installed or _is_plain(v))}
            yield _content(state, seen)


def _is_usual(function: Any) -> bool:
    """Return whether a function or class belongs to a library that puts such into every model."""
    while inner := getattr(function, "func", None) or getattr(function, "__func__", None):
        function = inner
    module = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")
    return bool(_USUAL.match(str(module)))


def _is_plain(value: Any) -> bool:
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return isinstance(value, _ATOMS) or (isinstance(value, (dict, list, tuple, set)) and all(map(_is_plain, parts)))
