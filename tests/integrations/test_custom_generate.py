from __future__ import annotations

import copy
from pathlib import Path

import pytest
from typer.testing import CliRunner

import families
import revisit
from revisit import Trace, methods
from revisit.cli.main import app
from revisit.decoding.loop import generate
from revisit.errors import RevisitError
from revisit.integrations.custom_generate import write
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT


def test_transformers_loads_the_folder_and_decodes_with_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["export", "--to", "custom-generate", "--out", str(tmp_path), "--set", "alpha=0.01"]
    )
    assert result.exit_code == 0, result.output
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["What is this?"], [[families.picture(1)]])
    options = {"max_new_tokens": 8, "do_sample": False}

    def through_folder(**more: object) -> list[int]:
        output = model.generate(**inputs, custom_generate=str(tmp_path), trust_remote_code=True, **options, **more)
        return list(output[0].tolist())

    def directly(method: object) -> list[int]:
        return list(generate(model, **inputs, method=method, **options)[0].tolist())

    assert through_folder() == directly(ReVisiT(alpha=0.01))
    assert through_folder(settings={"alpha": 1e-5, "layers": [2, 4]}) == directly(ReVisiT(alpha=1e-5, layers=(2, 4)))
    assert through_folder(method="greedy") == directly(Greedy())
    assert directly(Greedy()) != directly(ReVisiT(alpha=0.01))
    config = copy.deepcopy(model.generation_config)
    config.revisit = {"alpha": 0.5}
    assert through_folder(generation_config=config) == directly(ReVisiT(alpha=0.5))


def test_existing_files_are_kept(tmp_path: Path) -> None:
    write(tmp_path, ReVisiT())
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(RevisitError, match="exists; choose another folder"):
        write(tmp_path, ReVisiT())
    assert (tmp_path / "README.md").read_text() == "mine"
    write(tmp_path, ReVisiT(layers=(1, 2)), overwrite=True)
    assert "'layers': [1, 2]" in (tmp_path / "custom_generate" / "generate.py").read_text()


def test_what_the_folder_does_not_say_is_recommended_for_the_model(tmp_path: Path) -> None:
    """Qwen's recommendation is every second layer; a method that was given whole keeps its own."""
    model, _ = families.build("qwen2_5_vl")
    inputs = families.inputs("qwen2_5_vl", ["What is this?"], [[families.picture(1)]])
    options = {"max_new_tokens": 8, "do_sample": False}
    CliRunner().invoke(
        app, ["export", "--to", "custom-generate", "--out", str(tmp_path / "named"), "--set", "alpha=0.01"]
    )
    write(tmp_path / "whole", ReVisiT(alpha=0.01))
    for folder, method in (("named", "revisit:alpha=0.01"), ("whole", ReVisiT(alpha=0.01))):
        seen, wanted = Trace(), Trace()
        where = str(tmp_path / folder)
        model.generate(**inputs, custom_generate=where, trust_remote_code=True, trace=seen, **options)
        generate(model, **inputs, method=method, trace=wanted, **options)
        assert seen.method == wanted.method
    assert wanted.method["layers"] == "last"


def test_settings_in_a_generation_config_are_those_of_revisit(tmp_path: Path) -> None:
    """The embedded model recommends settings for ReVisiT; another method does not take them for its own."""
    model, processor = revisit.load("tiny")
    assert model.generation_config.revisit
    inputs = revisit.prepare(processor, ["Describe this image."], [[families.picture(0, (96, 96))]])
    options = {"max_new_tokens": 4, "do_sample": False}
    for name in ("vcd", "greedy", "revisit"):
        write(tmp_path / name, methods.get(name), settings={})
        got = model.generate(**inputs, custom_generate=str(tmp_path / name), trust_remote_code=True, **options)
        want = revisit.generate(model, **inputs, method=methods.as_method(name, model), **options)
        assert got.tolist() == want.tolist()
