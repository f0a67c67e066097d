"""The method of the tutorial, one file outside the package, through `generate`, `eval` and `compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import families
import revisit
from revisit.cli.main import app
from revisit.decoding.method import METHODS

FILE = Path(__file__).parents[2] / "docs" / "tutorials" / "blank_image.py"
METHOD = f"{FILE}:BlankImage"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(METHODS, "registered", {})
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_its_scores_are_the_contrast_with_an_empty_image() -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is it?"], [[families.image(1)]])
    options = {"max_new_tokens": 1, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    made = revisit.generate(model, **inputs, method=f"{METHOD}:alpha=2", **options).scores[0]
    with torch.no_grad():
        clean = model(**inputs).logits[:, -1].float()
        blank = model(**{**inputs, "pixel_values": inputs["pixel_values"] * 0}).logits[:, -1].float()
    plausible = clean >= clean.max() + torch.tensor(0.1).log()
    torch.testing.assert_close(made[plausible], (3 * clean - 2 * blank)[plausible], atol=1e-4, rtol=1e-4)
    assert (made[~plausible] == -torch.inf).all()


def test_generate_eval_and_compare_take_it(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    families.image(1).save(image)
    answer = json.loads(run("generate", image, "--any-image", "--method", METHOD, "--max-new-tokens", 4, "--json"))
    assert answer["method"]["name"] == "blank-image"
    assert answer["counters"]["steps"] > 0

    output = tmp_path / "runs"
    methods = ("--method", "greedy", "--method", f"{METHOD}:alpha=1", "--benchmark", "pope")
    options = ["--data", "scenes:unusual:2", "--limit", "4", "--max-new-tokens", "3", "--quiet", "--out"]
    run("eval", *methods, *options, output)
    assert "blank-image(alpha=1.0)" in run("compare", output)
    assert {log.spec.method.name for log in revisit.read_logs(output)} == {"greedy", "blank-image"}
