"""The folder for transformers that docs/scale.md describes."""

from __future__ import annotations

from pathlib import Path

import families
from revisit.decoding.loop import generate
from revisit.methods.revisit import ReVisiT


def test_transformers_loads_the_documented_folder_and_decodes_with_it(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")
    code = text.partition("## A folder for transformers")[2].partition("```python\n")[2].partition("```")[0]
    file = tmp_path / "custom_generate" / "generate.py"
    file.parent.mkdir()
    file.write_text(code, "utf-8")
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is this?"], [[families.picture(1)]])
    options = {"max_new_tokens": 8, "do_sample": False}
    loaded = model.generate(**inputs, custom_generate=str(tmp_path), trust_remote_code=True, **options)
    assert loaded.tolist() == generate(model, **inputs, method=ReVisiT(alpha=1e-3), **options).tolist()
