"""The code of the user guide: Python runs, commands parse or run, and settings files are read.

Tiny random models of the same family stand in for checkpoints, and `tiny` for `photo`. The blocks of a page share their names, as they
do for somebody who follows the page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from packaging.version import Version
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as transformers_version
from typer.testing import CliRunner

import families
from revisit.cli.main import app
from revisit.decoding.method import METHODS
from revisit.decoding.options import CHUNKS_SINCE
from revisit.embedded.samples import sample
from revisit.eval.benchmarks.base import BENCHMARKS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md"))]
STAND_INS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "HuggingFaceTB/SmolVLM-256M-Instruct": "smolvlm",
    "Qwen/Qwen3-VL-8B-Thinking": "qwen3_vl",
}
RUN = {"methods", "models", "benchmarks", "doctor", "generate", "lens", "check"}  # the other commands are parsed
OTHER_PROGRAMS = {"pip", "curl", "vllm", "lmms-eval"}


class Block(NamedTuple):
    """One fenced block of a page; `line` is the number of its first line."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2])
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a console block, without prompts, comments and assignments of variables."""
    lines = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text, re.MULTILINE)
    words = [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
    return [[word for number, word in enumerate(line) if number or "=" not in word] for line in words]


BLOCKS = [block for page in PAGES for block in blocks(page)]
# Run by tests/engines and tests/strangers, with other packages.
ELSEWHERE = {ROOT / "docs/local.md", ROOT / "docs/works-with.md"}
PYTHON = [page for page in PAGES if page not in ELSEWHERE and any(block.language == "python" for block in blocks(page))]
COMMANDS = [(block, command) for block in BLOCKS if block.language == "console" for command in commands(block)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    saved = {name: str(families.save(family, root / family)) for name, family in STAND_INS.items()}
    thinks = PreTrainedTokenizerFast.from_pretrained(saved["Qwen/Qwen3-VL-8B-Thinking"])
    thinks.add_tokens(["<think>", "</think>"])
    thinks.save_pretrained(saved["Qwen/Qwen3-VL-8B-Thinking"])
    return saved | {"photo": "tiny"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def reader(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REVISIT_CACHE", str(cache))
    monkeypatch.setattr(METHODS, "registered", {})
    for folder in ("photos", "val2014"):
        (tmp_path / folder).mkdir()
    image = sample("demo").image()
    for name in ("photo.jpg", "other.jpg", "photos/1.jpg", "val2014/1.jpg"):
        image.save(name, quality=95)
    Path("captions.jsonl").write_text('{"image_id": 1, "caption": "A cat and a book."}\n')
    for name in ("hub", "docs"):
        os.symlink(ROOT / name, name)
    return tmp_path


@pytest.fixture
def server() -> Iterator[str]:
    """Serve `tiny` as `revisit serve` does; yield the address."""
    from revisit.methods.revisit import ReVisiT
    from revisit.models.loading import load
    from revisit.serve.decoder import Decoder
    from servers import serving

    model, processor = load("tiny")
    with serving(method=ReVisiT.recommended(model), decoder=Decoder(model, processor)) as running:
        yield running.url


def replaced(code: str, folders: dict[str, str]) -> str:
    """Replace checkpoints by stand-ins, and large numbers by small ones."""
    for name, folder in folders.items():
        code = code.replace(f'"{name}"', repr(folder))
    code = code.replace("bfloat16", "float32")  # half precision is slow on CPUs
    code = code.replace("scenes:unusual:20", "scenes:unusual:2").replace("limit=40", "limit=4")
    return re.sub(r"max_(new_)?tokens(\W+)\d+", r"max_\g<1>tokens\g<2>6", code)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    tested = {"python", "console", "yaml", "json", "toml", ""}
    assert [block.place for block in BLOCKS if block.language not in tested] == []
    code = [
        block.place for block in BLOCKS if not block.language and re.search(r"^(\$|import|from) ", block.text, re.M)
    ]
    assert code == []  # a block without a language shows files or output


@pytest.mark.parametrize("page", PYTHON, ids=[str(page.relative_to(ROOT)) for page in PYTHON])
def test_python_runs(page: Path, reader: Path, folders: dict[str, str], request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(page):
        if block.language == "python":
            if "prefill_chunk_size" in block.text and Version(transformers_version) < Version(CHUNKS_SINCE):
                continue  # raises an error with this version of transformers
            code = replaced(block.text, folders)
            if "http://127.0.0.1:8000" in code:
                code = code.replace("http://127.0.0.1:8000", request.getfixturevalue("server"))
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), names)  # errors show the line of the page


@pytest.mark.parametrize(
    ("block", "command"), COMMANDS, ids=[f"{block.place} {' '.join(command[:3])}" for block, command in COMMANDS]
)
def test_command(block: Block, command: list[str], reader: Path, folders: dict[str, str]) -> None:
    program, *arguments = command
    if program != "revisit":
        assert program in OTHER_PROGRAMS
        check_other(program, arguments)
        return
    parser = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(parser, "commands"):  # a group
        parser = parser.commands[rest.pop(0)]
    values = parser.make_context(str(parser.name), list(rest)).params
    for name, registry in (("method", METHODS), ("benchmark", BENCHMARKS)):
        if isinstance(values.get(name), list):
            for entry, settings in registry.parse_list(values[name]):
                registry.get(entry, **settings)
    if arguments[0] in RUN and "--calibrate" not in arguments:
        short = ["--max-new-tokens", "4"] if arguments[0] == "generate" else []
        result = CliRunner().invoke(app, [folders.get(word, word) for word in arguments if word != "MODEL"] + short)
        assert result.exit_code in ((0, 1, 3) if arguments[0] == "check" else (0,)), result.output
        assert result.stdout.strip()


def check_other(program: str, arguments: list[str]) -> None:
    """Check the parts of another program's command that can be checked without running it."""
    if program == "pip":
        extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
        for names in re.findall(r"\.\[(.*?)\]", " ".join(arguments)):
            assert set(names.split(",")) <= set(extras)
    if program == "curl":
        from revisit.serve.schema import CheckBody

        CheckBody.model_validate(json.loads(arguments[arguments.index("-d") + 1]))


def test_settings_files_are_read() -> None:
    from revisit.vllm.request import parse

    model, _ = families.build("llava")
    kinds = {(block.page.name, block.language): block.text for block in BLOCKS}
    blocks_of_requests = [block for block in BLOCKS if block.language == "json" and "vllm_xargs" in block.text]
    requests = [json.loads(line)["vllm_xargs"] for block in blocks_of_requests for line in block.text.splitlines()]
    methods = [parse(xargs, model) for xargs in requests if "risk" not in str(xargs)]  # the model has no certified rate
    assert {method.name for method in methods if method is not None} == {"revisit", "greedy"}
    assert None not in methods
    if sys.version_info >= (3, 11):
        import tomllib

        point = tomllib.loads(kinds["writing-a-method.md", "toml"])["project"]["entry-points"]
        assert set(point) == {METHODS.group}
    assert {name for name, language in kinds if language in ("yaml", "json", "toml")} == {
        "vllm.md",
        "recipes.md",
        "writing-a-method.md",
    }


def test_examples_equal_their_files() -> None:
    code = [block.text for block in blocks(ROOT / "docs" / "writing-a-method.md") if block.language == "python"]
    files = [file.read_text("utf-8") for file in (ROOT / "docs/tutorials").glob("*.py")]
    assert any(text in files for text in code)
