"""Every Python snippet of docs/recipes.md runs, with a tiny model of the same family in place of the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import families

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
TINY = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "HuggingFaceTB/SmolVLM-256M-Instruct": "smolvlm",
}
SNIPPETS = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: families.save(family, root / family) for name, family in TINY.items()}


def test_all_snippets_are_found() -> None:
    assert len(SNIPPETS) == PAGE.read_text("utf-8").count("```python\n") >= 9


@pytest.mark.parametrize(("title", "code"), SNIPPETS, ids=[title for title, _ in SNIPPETS])
def test_recipe_runs(
    title: str,
    code: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    families.picture(0, (60, 48)).save("photo.jpg")
    families.picture(1, (60, 48)).save("other.jpg")
    for name, folder in folders.items():
        code = code.replace(f'"{name}"', repr(str(folder)))
    code = code.replace("bfloat16", "float32")  # half precision is slow on CPUs
    code = re.sub(r"max_new_tokens(\W+)\d+", r"max_new_tokens\g<1>6", code)
    assert "/" not in "".join(re.findall(r'(?:load|from_pretrained)\("([^"]+)"', code))  # no checkpoint is left
    exec(compile(code, title, "exec"), {})
    assert capsys.readouterr().out.strip()
