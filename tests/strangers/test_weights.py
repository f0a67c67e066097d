"""Models whose weights are quantized (torchao, optimum-quanto) or off-loaded (accelerate)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import revisit
from revisit.decoding.method import METHODS
from revisit.models.head import plain_tensors
from revisit.models.identity import loaded_fingerprint

NAMES = [name for name in METHODS.built_in if name not in ("chain", "tcd")]  # TCD is for videos
TEXT = "A suitcase at an airport."


def supports(pair: Any, images: Any) -> list[float]:
    return [round(word.support, 3) for word in revisit.check(pair, images[0], TEXT).words]


def quantized(kind: str, module: nn.Module, *, everything: bool) -> None:
    """Quantize the linear layers of the decoder, or the head alone."""
    if kind == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(module, torchao.Int8WeightOnlyConfig(), lambda part, _: isinstance(part, nn.Linear))
    else:
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(module, weights=quanto.qint8, include=None if everything else ["lm_head"])
        quanto.freeze(module)


def dequantized(module: nn.Module) -> None:
    """Replace quantized linear layers by plain ones with the same numbers."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and hasattr(child.weight, "__tensor_flatten__"):
            plain = nn.Linear(child.in_features, child.out_features, child.bias is not None)
            plain.weight.data = child.weight.dequantize().detach().clone()
            if child.bias is not None:
                plain.bias.data = child.bias.detach().clone()
            setattr(module, name, plain)
        else:
            dequantized(child)


@pytest.mark.parametrize("kind", ["torchao", "quanto"])
@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_model_answers_as_its_dequantized_copy(
    fresh: Any, images: Any, answer: Any, name: str, kind: str
) -> None:
    model = fresh[0]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # no longer tied to the embedding
    part = model if kind == "quanto" else model.model.language_model
    quantized(kind, part, everything=True)
    if kind == "torchao":
        quantized(kind, model.lm_head, everything=False)
    got = answer(fresh, name), supports(fresh, images)
    dequantized(model)
    assert got == (answer(fresh, name), supports(fresh, images))


@pytest.mark.parametrize("name", ["revisit", "vcd", "dola", "memvr"])
def test_an_adapter_around_quantized_weights(fresh: Any, images: Any, answer: Any, name: str) -> None:
    peft, (model, processor) = pytest.importorskip("peft"), fresh
    quantized("torchao", model.model.language_model, everything=True)
    torch.manual_seed(1)
    layers = r".*language_model.*(q_proj|v_proj)"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)).eval()
    got = answer((wrapped, processor), name), supports((wrapped, processor), images)
    dequantized(wrapped)
    assert got == (answer((wrapped, processor), name), supports((wrapped, processor), images))


def test_load_quantizes_as_from_pretrained_does(pair: Any, answer: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForImageTextToText, TorchAoConfig

    settings = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    loaded, processor = revisit.load("tiny", quantization_config=settings)
    plain = AutoModelForImageTextToText.from_pretrained(pair[0].config._name_or_path, quantization_config=settings)
    assert any(hasattr(weight, "__tensor_flatten__") for weight in loaded.state_dict().values())
    for name in ("greedy", "revisit", "vcd"):
        assert answer((loaded, processor), name) == answer((plain.eval(), processor), name)


def test_load_finds_damage_inside_quantized_weights(tmp_path: Path, pair: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from safetensors.torch import load_file, save_file
    from transformers import TorchAoConfig

    for part in pair:
        part.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    next(value for name, value in weights.items() if "q_proj.weight" in name)[0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(revisit.RevisitError, match="not finite"):
        revisit.load(tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_an_off_loaded_model_answers_as_one_in_memory(
    pair: Any, fresh: Any, images: Any, answer: Any, where: str, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    if where == "disk":
        accelerate.disk_offload(fresh[0], tmp_path, execution_device="cpu")
    else:
        accelerate.cpu_offload(fresh[0], execution_device="cpu")

    def found(pair: Any) -> list[Any]:
        inputs = revisit.prepare(pair[1], "Describe it.", images[0], device=pair[0].device)
        tokens = revisit.generate(pair[0], **inputs, max_new_tokens=8)
        asked = str(revisit.ask(pair, images[0], max_new_tokens=16))
        return [
            tokens.tolist(),
            answer(pair, "memvr"),
            asked,
            supports(pair, images),
            repr(revisit.lens(pair, images[0])),
        ]

    assert found(fresh) == found(pair)


def test_ask_and_check_take_a_compiled_model(pair: Any, images: Any) -> None:
    compiled = torch.compile(pair[0], backend="eager"), pair[1]
    assert str(revisit.ask(compiled, images[0], max_new_tokens=16)) == str(
        revisit.ask(pair, images[0], max_new_tokens=16)
    )
    assert supports(compiled, images) == supports(pair, images)


@pytest.mark.parametrize("kind", ["torchao", "quanto"])
def test_a_quantized_model_is_identified_by_its_numbers(fresh: Any, caplog: Any, kind: str) -> None:
    model, processor = fresh
    quantized(kind, model.model.language_model, everything=True)
    before = loaded_fingerprint(model, processor)
    assert loaded_fingerprint(model, processor) == before
    weight = model.model.language_model.layers[0].mlp.down_proj.weight
    next(plain_tensors(weight)).data.view(-1)[0] += 1
    assert loaded_fingerprint(model, processor) != before
    assert "cannot be identified" not in caplog.text
