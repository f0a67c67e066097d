"""The lmms-eval model against lmms-eval's own interface if it is installed, else against its few names used here."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import families
from revisit.errors import RevisitError


class _Lmms:
    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)


@dataclass(frozen=True)
class _Manifest:
    model_id: str
    simple_class_path: str | None = None
    chat_class_path: str | None = None
    aliases: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    names = ["lmms_eval", "lmms_eval.api", "lmms_eval.api.model", "lmms_eval.models", "lmms_eval.models.registry_v2"]
    if importlib.util.find_spec("lmms_eval") is not None:
        yield importlib.import_module("revisit.eval.lmms_eval")
        return
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules["lmms_eval.api.model"].lmms = _Lmms  # type: ignore[attr-defined]
    sys.modules["lmms_eval.models.registry_v2"].ModelManifest = _Manifest  # type: ignore[attr-defined]
    yield importlib.import_module("revisit.eval.lmms_eval")
    for name in [*names, "revisit.eval.lmms_eval"]:
        sys.modules.pop(name, None)


@dataclass
class Request:
    args: tuple[Any, ...]


def requests(arguments: dict[str, Any]) -> tuple[list[Request], dict[str, Any]]:
    """Five questions about an image and one without, as lmms-eval passes them."""
    documents = [[families.image(i).convert("RGBA" if i == 2 else "RGB")] for i in range(5)] + [[]]
    made = [Request(("What?" + " Say." * i, dict(arguments), list, i, "t", "val")) for i in range(6)]
    return made, {"t": {"val": documents}}


def ask(model: Any, arguments: dict[str, Any]) -> list[str]:
    made, model.task_dict = requests(arguments)
    texts: list[str] = model.generate_until(made)
    return texts


def test_answers_are_those_of_generate(plugin: Any, model_folder: Path) -> None:
    from revisit import ReVisiT, generate
    from revisit.models.outputs import generated_text
    from revisit.models.prompts import prepare

    model = plugin.Revisit(pretrained=str(model_folder), method="revisit", alpha=0.01, layers="all", batch_size="4")
    texts = ask(model, {"max_new_tokens": 8, "temperature": 0, "until": ["\n\n"]})
    loaded, processor = model.engine.loaded
    made, documents = requests({})
    for number in range(5):
        image = documents["t"]["val"][number][0].convert("RGB")
        inputs = prepare(processor, [made[number].args[0]], [[image]])
        output = generate(loaded, **inputs, method=ReVisiT(alpha=0.01, layers="all"), max_new_tokens=8, do_sample=False)
        assert texts[number] == plugin.cut(generated_text(processor, output, inputs)[0], ["\n\n"])
    assert len(texts) == 6


def test_method_settings_are_model_arguments(plugin: Any, model_folder: Path) -> None:
    greedy = ask(plugin.Revisit(pretrained=str(model_folder), method="greedy"), {"max_new_tokens": 8})
    changed = ask(plugin.Revisit(pretrained=str(model_folder), method="revisit", alpha=0.1), {"max_new_tokens": 8})
    assert greedy != changed
    with pytest.raises(RevisitError, match="Did you mean 'alpha'"):
        plugin.Revisit(pretrained=str(model_folder), method="revisit", alhpa=0.1)


def test_unknown_generation_arguments_are_named_once(
    plugin: Any, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = plugin.Revisit(pretrained=str(model_folder), method="greedy")
    with caplog.at_level(logging.WARNING):
        ask(model, {"max_new_tokens": 2, "penalty_of_mine": 1})
    assert [r.getMessage() for r in caplog.records if "penalty_of_mine" in r.getMessage()] == [
        "generation argument 'penalty_of_mine' is not used by the model `revisit`"
    ]


def test_unsupported_tasks_and_several_processes_raise(
    plugin: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plugin.Revisit(pretrained=str(model_folder), method="greedy")
    with pytest.raises(RevisitError, match="does not support likelihood tasks"):
        model.loglikelihood([])
    with pytest.raises(RevisitError, match="multi-round"):
        model.generate_until_multi_round([])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RevisitError, match="runs in one process"):
        plugin.Revisit(pretrained=str(model_folder))


def test_stop_strings(plugin: Any) -> None:
    assert plugin.cut("one\n\ntwo", ["\n\n"]) == "one\n\ntwo"  # lmms-eval's default for tasks that say nothing
    assert plugin.cut("one\ntwo", ["\n"]) == "one"
    assert plugin.cut("one stop two", "stop") == "one"
    assert plugin.cut(" one ", None) == "one"


def test_the_entry_point_names_the_class(plugin: Any) -> None:
    manifest = plugin.manifests()
    module, _, name = manifest.simple_class_path.rpartition(".")
    assert manifest.model_id == "revisit"
    assert getattr(importlib.import_module(module), name) is plugin.Revisit
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."lmms_eval.models"]\nrevisit = "revisit.eval.lmms_eval:manifests"\n' in pyproject
