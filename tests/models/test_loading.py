"""Loading models from folders: safe defaults, processors without torchvision, clear errors."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import families
import revisit
from revisit import ReVisiT, RevisitError
from revisit.eval.engines.local import LocalEngine
from revisit.models import config, loading
from revisit.models.outputs import generated_text
from revisit.models.processors import processor_of
from revisit.models.prompts import prepare


@pytest.mark.parametrize(
    "family", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "smolvlm", "glm4v"]
)
def test_load_and_decode_a_batch(family: str, tmp_path: Path) -> None:
    model, processor = revisit.load(families.save(family, tmp_path))
    assert model.dtype == torch.float32
    assert processor.tokenizer.padding_side == "left"
    images = [[families.image(0, (40, 32))], [families.image(1, (30, 30))]]
    inputs = prepare(processor, ["what is it?", "hi"], images)
    out = revisit.generate(model, **inputs, method=ReVisiT(), max_new_tokens=4, do_sample=False)
    assert len(generated_text(processor, out, inputs)) == 2
    original, _ = families.build(family)
    same = revisit.generate(original, **inputs, method=ReVisiT(), max_new_tokens=4, do_sample=False)
    assert out.tolist() == same.tolist()


@pytest.mark.parametrize(
    ("requested", "emulated", "loaded"),
    [(None, True, "float16"), (None, False, "bfloat16"), ("auto", True, "bfloat16")],
)
def test_bfloat16_weights_become_float16_where_a_gpu_emulates_it(
    requested: str | None, emulated: bool, loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = families.build("llava")
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "emulates_bfloat16", lambda: emulated)
    model, _ = revisit.load(tmp_path, dtype=requested, device_map="cpu")
    assert model.dtype == getattr(torch, loaded)


def test_half_precision_does_not_overflow_into_a_wrong_choice(tmp_path: Path) -> None:
    """States that overflow float16 when projected must still give finite scores."""
    model, processor = revisit.load(families.save("llava", tmp_path), dtype=torch.float16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(200)
        model.get_decoder().norm.weight.mul_(0.005)  # the model's own logits stay as they were
    inputs: Any = prepare(processor, ["hi"], [[families.image(0)]])
    inputs["pixel_values"] = inputs["pixel_values"].half()
    for method in (ReVisiT(alpha=1e-2, layers="all"), ReVisiT.official(alpha=1e-2, layers="all")):
        out = revisit.generate(
            model,
            **inputs,
            method=method,
            max_new_tokens=3,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for scores in out.scores:
            assert not scores.isnan().any()
            assert torch.isfinite(scores.max())


def error_of_load(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(RevisitError) as caught:
        revisit.load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", ["./nope", "/no/such/model", "../nope", "a/b/c"])
def test_a_missing_path_is_not_a_hub_id(path: str) -> None:
    assert "folder" in error_of_load(path)


NEW_TYPE = {"model_type": "new_thing"}
CODE = {"auto_map": {"AutoConfig": "a.B"}}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (None, "config"),
        ({"model_type": "llama"}, "images"),
        (NEW_TYPE, "new_thing"),
        ({**NEW_TYPE, **CODE}, "--trust-remote-code"),
        ({"model_type": "internvl_chat", **CODE}, "-hf"),  # the checkpoint that needs no custom code
    ],
)
def test_folders_without_a_supported_model_raise(config: Any, part: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert part in error_of_load(tmp_path)
    if part == "-hf":
        assert f"{tmp_path}-hf" in error_of_load(tmp_path, trust_remote_code=True)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    folder = families.save("llava", tmp_path)
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in error_of_load(folder)


def test_an_unreachable_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise type("ConnectError", (Exception,), {})("Name or service not known")

    tried: list[str] = []
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", no_network)
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", lambda name, **_: tried.append(name))
    assert "Hub cannot be reached" in error_of_load("nobody/nothing")
    assert tried == []  # transformers would retry for more than a minute


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("place", ["cuda", "cuda:1", {"": "cuda:0"}, torch.device("cuda")])
def test_a_missing_gpu_raises(place: Any) -> None:
    assert "GPU" in error_of_load("tiny", device_map=place)


@pytest.mark.parametrize("place", ["cuda:x", "banana"])
@pytest.mark.parametrize("accelerate", [True, False])
def test_an_unknown_device_raises(place: str, accelerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not accelerate:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert place in error_of_load("tiny", device_map=place)


@pytest.mark.parametrize(("cuda", "mps", "device"), [(True, False, "cuda"), (False, True, "mps"), (False, False, None)])
def test_the_default_device_is_the_accelerator(
    cuda: bool, mps: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert loading._device_map(None, quantized=False) == device
    assert LocalEngine("tiny").device_map == device


def test_a_gpu_is_used_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert loading._device_map(None, quantized=False) == "cuda"
    assert loading._device_map(None, quantized=True) is None  # transformers places those itself
    assert loading._device_map("cpu", quantized=False) == "cpu"
    with pytest.raises(RevisitError, match="1 GPU"):
        loading._device_map("cuda:3", quantized=False)


def test_the_former_name_of_dtype_has_an_effect() -> None:
    assert revisit.load("tiny", torch_dtype="bf16")[0].dtype == torch.bfloat16


def test_the_placement_of_a_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="revisit.models.loading"):
        model, _ = revisit.load("tiny")
    assert "tiny is on cpu, float32" in caplog.messages
    assert loading.placement(model) == "cpu, float32"


@pytest.mark.parametrize("name", ["tiny", "photo"])
def test_a_folder_named_like_an_embedded_model_does_not_hide_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    families.save("llava", tmp_path / name)
    monkeypatch.setattr("revisit.models.photo.assembled_folder", lambda: Path("the embedded photo"))
    embedded = {"tiny": str(config.embedded_folder()), "photo": "the embedded photo"}
    assert config.resolve(name) == embedded[name]
    assert config.is_embedded(name) == (name == "tiny")
    for folder in (f"./{name}", Path(name), f"{name}/"):
        assert not config.is_embedded(folder)
        assert revisit.load(folder)[0].config.text_config.vocab_size == families.VOCAB
    plain: Any = transformers.AutoModelForImageTextToText.from_pretrained(name)  # to transformers it is the folder
    assert len(processor_of(plain).tokenizer.encode("<row_1_col_1>", add_special_tokens=False)) == 1


def test_a_head_tied_by_declaration_is_not_missing(tmp_path: Path) -> None:
    config = families.config("llava")
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = True
    model, folder = transformers.LlavaForConditionalGeneration(config), families.save("llava", tmp_path)
    model.save_pretrained(folder)
    assert not any("lm_head" in name for name in load_file(folder / "model.safetensors"))
    loaded, _ = revisit.load(folder)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_an_adapter_does_not_redirect_the_weights(tmp_path: Path) -> None:
    """With peft installed, transformers would load the repository that adapter_config.json names."""
    folder = families.save("llava", tmp_path)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    assert "adapter" in error_of_load(folder)


def test_loading_changes_no_attribute_of_the_model(tmp_path: Path) -> None:
    folder = families.save("llava", tmp_path)
    model, processor = revisit.load(folder)
    assert processor_of(model) is processor
    plain: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    assert set(vars(model)) == set(vars(plain))
    before = set(vars(plain))
    assert processor_of(plain) is processor_of(plain)  # loaded once
    assert set(vars(plain)) == before


def test_the_last_model_that_was_given_by_name_stays_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.save("llava", tmp_path / "model")
    image, original, names = families.image(0), loading.load, list[str]()

    def load(name: str, **options: Any) -> Any:
        names.append(name)
        return original(name, **options)

    monkeypatch.setattr(loading, "load", load)
    model = str(tmp_path / "model")
    first = revisit.ask(model, image, "What is it?", max_new_tokens=2)
    assert revisit.ask(model, image, "What is it?", max_new_tokens=2).text == first.text
    revisit.lens(model, image)
    assert names == [model]
    (kept,) = (weakref.ref(pair[0]) for pair in loading._last.values())
    generation = tmp_path / "model/generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "max_length": 99}))
    revisit.check(model, image, "A dog.")  # its files have changed
    assert names == [model, model]
    gc.collect()
    assert kept() is None
    (kept,) = (weakref.ref(pair[0]) for pair in loading._last.values())
    revisit.unload()
    gc.collect()
    assert kept() is None
