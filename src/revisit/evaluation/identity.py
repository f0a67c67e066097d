"""What ties an answer to the code and the files that made it.

An answer may be used again only while everything that could change it is the same. The hashes here cover the code from the
prompt to the text and every file of a model. They do not cover documentation, comments, error texts or log messages,
so that rewording one of them throws no answer away.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from revisit.benchmarks.io.files import file_digest
from revisit.errors import RevisitError
from revisit.evaluation.store import digest

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = ("decoding", "step", "taps", "contrast", "models")  # used by every method
ENGINES = {
    # the last one: ablations store what it answers as the local engine's answers
    "local": ("evaluation/engines/base.py", "evaluation/engines/local.py", "studies/shared.py"),
    "vllm": ("evaluation/engines/base.py", "evaluation/engines/vllm.py", "integrations/vllm/**/*.py"),
}
MESSAGES = {"RevisitError", "unknown", "missing", "warn", "debug", "info", "warning", "error", "exception", "critical"}
DESCRIPTIONS = {"summary", "source", "cost"}  # what `revisit methods` prints about a method

# Files of a model folder that cannot change an answer.
_IGNORED = {".md", ".txt", ".png", ".jpg", ".gitattributes", ".log", ".jsonl", ".csv", ".bin", ".pt", ".pth", ".h5"}
_KEPT_TEXT = {"merges.txt", "vocab.txt"}  # tokenizers; the other .txt files are notes


# -- code ----------------------------------------------------------------------------------------------------------


@cache
def engine_code(engine: str) -> str:
    """SHA-256 of the code that every method shares under an engine: decoding, the step, the models' parts, the engine."""
    patterns = [f"{package}/**/*.{kind}" for package in PACKAGES for kind in ("py", "c")] + list(ENGINES[engine])
    return _digest_files({path for pattern in patterns for path in PACKAGE.glob(pattern)}, PACKAGE)


def method_code(method: Any) -> str:
    """SHA-256 of a method's own modules: its class and its bases, those of its links, and what they import of `methods`."""
    classes = {cls for made in (method, *_links(method)) for cls in type(made).__mro__ if cls is not object}
    files = {Path(found) for cls in classes if (found := _source_file(cls))}
    return _module_digest(frozenset(files))


@cache
def _module_digest(files: frozenset[Path]) -> str:
    inside = {path for path in files if path.is_relative_to(PACKAGE)}
    found, todo = set(files - inside), sorted(inside)
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += _imported_methods(path)
    return _digest_files(found, PACKAGE)


def _links(method: Any) -> Iterator[Any]:
    """The methods inside a method: a chain's."""
    for value in vars(method).values() if hasattr(method, "__dict__") else ():
        if isinstance(value, tuple):
            yield from (link for link in value if hasattr(link, "settings"))


def _source_file(cls: type) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except TypeError:  # a built-in class
        return None


def _imported_methods(path: Path) -> list[Path]:
    """The modules of `revisit.methods` that a module imports; the registry, which only finds classes, left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    found = {PACKAGE / "methods" / f"{name.split('.')[2]}.py" for name in names if name.startswith("revisit.methods.")}
    return sorted(file for file in found if file.exists() and file.stem != "registry")


def _digest_files(paths: Iterable[Path], root: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        text = path.read_text("utf-8")
        meaning = c_meaning(text) if path.suffix == ".c" else python_meaning(text)
        state.update(name.encode() + b"\0" + meaning.encode() + b"\0")
    return state.hexdigest()


def python_meaning(source: str) -> str:
    """Python source without comments, layout, docstrings, and the texts of errors, warnings and log messages."""
    return ast.unparse(_Bare().visit(ast.parse(source)))


def c_meaning(source: str) -> str:
    """C source without comments, blanks joined."""
    code = re.sub(r'("(?:\\.|[^"\\])*")|/\*.*?\*/|//[^\n]*', lambda m: m.group(1) or " ", source, flags=re.S)
    return re.sub(r"[ \t]+", " ", "\n".join(line.strip() for line in code.splitlines() if line.strip()))


class _Bare(ast.NodeTransformer):
    """Takes out of a syntax tree what only people read."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not _is_description(part)] or [ast.Pass()]
        return super().visit(node)

    def visit_Raise(self, node: ast.Raise) -> Any:
        if isinstance(node.exc, ast.Call):
            node.exc.args = [_Silent().visit(part) for part in node.exc.args]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MESSAGES:
            node.args = [_Silent().visit(part) for part in node.args]
        return self.generic_visit(node)


class _Silent(ast.NodeTransformer):
    """Empties every text below a node."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return ast.Constant("")

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        node = self.generic_visit(node)  # type: ignore[assignment]
        both = (node.left, node.right)
        return ast.Constant("") if all(isinstance(part, ast.Constant) and part.value == "" for part in both) else node

    def visit_Constant(self, node: ast.Constant) -> Any:
        return ast.Constant("") if isinstance(node.value, str) else node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_description(node: ast.stmt) -> bool:
    names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
    return isinstance(node, ast.Assign) and bool(names) and set(names) <= DESCRIPTIONS


# -- models --------------------------------------------------------------------------------------------------------


def model_folder(name: str) -> Path:
    """The folder with the model's files: itself, or the hub snapshot in the local cache, fetched if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RevisitError(
            f"There is no model {name!r}: it is neither a local folder nor a hub id that can be reached ({reason})."
        ) from error


def fingerprint(folder: Path) -> str:
    """A hash of every file of a model folder that could change an answer.

    The hub's cache names the files it links to by their own hash, so those need not be read again.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if not path.is_file() or relative.startswith(".") or (path.suffix in _IGNORED and path.name not in _KEPT_TEXT):
            continue
        target = path.resolve()
        hashed = target.parent.name == "blobs" and len(target.name) == 64
        found[relative] = target.name if hashed else file_digest(path)
    if not found:
        raise RevisitError(f"{folder} holds no model files.")
    return digest(found)
