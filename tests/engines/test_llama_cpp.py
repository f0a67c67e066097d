"""ReVisiT in llama-cpp-python: tokens against transformers with the same weights, through its own chat handler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not in this environment: run `make test-llama-cpp`")

import gguf
import llama_cpp
import numpy as np
import torch

import convert_tiny
import revisit
import revisit.llama_cpp
from laptops import PROMPT, SETTINGS, LlamaCpp
from revisit import ReVisiT
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.models.names import names_of
from revisit.models.prompts import prepare

TIE = 1e-3  # rounding may decide between equal scores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    engine = LlamaCpp(tmp_path_factory.mktemp("tiny"))
    yield engine
    engine.llm.close()


@pytest.mark.parametrize("name", SETTINGS["llama-cpp"])
def test_tiny_gives_the_answers_of_transformers(tiny: LlamaCpp, name: str) -> None:
    """They may part only where two scores are nearly equal."""
    model, processor = tiny.pair
    method = SETTINGS["llama-cpp"][name]
    options = {"max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    for index in range(4):
        image = render(scene("unusual", 77, index))
        tokens = tiny.decode(image, method, 24)
        inputs = prepare(processor, PROMPT, image)
        output = revisit.generate(model, **inputs, method=method, **options)
        expected = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        for got, want, scores in zip(tokens, expected, output.scores, strict=False):
            if got != want:
                assert scores[0, want] - scores[0, got] < TIE
                break
        else:
            assert len(tokens) >= len([token for token in expected if token != 2])


@pytest.mark.parametrize("head", ["F32", "Q8_0"])
def test_names_below_the_floor_are_never_written(tmp_path: Path, head: str) -> None:
    engine = LlamaCpp(tmp_path, head)
    for index in range(4):
        text = engine.answer(render(scene("unusual", 77, index)), ReVisiT(floor=0.5), 40)
        low = {name for name, value in engine.refine.support.items() if value < 0.5}
        assert len(low) > 40
        assert text
        assert not low & set(names_of(()).find(text))
    engine.llm.close()


def test_states_are_those_of_transformers(tiny: LlamaCpp) -> None:
    """All 64 image tokens, in two batches."""
    model, processor = tiny.pair
    image, kept = render(scene("unusual", 77, 0)), []
    keep = revisit.llama_cpp.Refiner.keep

    def watched(self: Any, *arguments: Any) -> None:
        keep(self, *arguments)
        kept.append(self._chunks[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revisit.llama_cpp.Refiner, "keep", watched)
        tiny.decode(image, ReVisiT(), 1)
    inputs = prepare(processor, PROMPT, image)
    with torch.no_grad():
        states = model.model(**inputs).last_hidden_state[0, inputs["input_ids"][0] == model.config.image_token_id]
    assert [len(chunk) for chunk in kept] == [48, 16]
    np.testing.assert_allclose(np.concatenate(kept), states.numpy(), atol=1e-4)


def test_a_quantized_head_is_read_row_by_row(tmp_path: Path) -> None:
    language, _ = convert_tiny.write_gguf(tmp_path, "Q8_0")
    head = revisit.llama_cpp.read_head(str(language))
    assert isinstance(head, revisit.llama_cpp.QuantizedHead)
    tensor = next(t for t in gguf.GGUFReader(language).tensors if t.name == "output.weight")
    weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    states, ids = torch.randn(3, weight.shape[1]), torch.tensor([5, 700, 17, 5])
    torch.testing.assert_close(head.logits(states, ids), states @ weight[ids].T)


def test_a_model_with_a_quantized_head_decodes(tmp_path: Path) -> None:
    engine = LlamaCpp(tmp_path, "Q8_0")
    assert engine.decode(render(scene("unusual", 77, 1)), ReVisiT(), 8)
    engine.llm.close()


def test_wrong_uses_raise_one_sentence(tiny: LlamaCpp) -> None:
    llm, library = tiny.llm, tiny.llm.chat_handler._mtmd_cpp
    for settings in ({"layers": "all"}, {"phase": "answer"}, {"select": "random"}, {"floor_layer": 0}):
        (name,) = settings
        with pytest.raises(RevisitError, match=name), revisit.llama_cpp.attach(llm, ReVisiT(**settings)):
            pass
    with pytest.raises(RevisitError, match="without ReVisiT"), revisit.llama_cpp.attach(llm):
        tiny.decode(render(scene("usual", 77, 0)), None, 1)
    with pytest.raises(RevisitError, match="no image"), revisit.llama_cpp.attach(llm) as refine:
        llm.create_completion("a dog", max_tokens=1, logits_processor=llama_cpp.LogitsProcessorList([refine]))
    assert llm.chat_handler._mtmd_cpp is library


def test_the_recipe_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, with `tiny` under the names of its files."""
    language, encoder = convert_tiny.write_gguf(tmp_path)
    language.rename(tmp_path / "llava.gguf")
    monkeypatch.chdir(tmp_path)
    render(scene("unusual", 77, 2)).save("photo.jpg")
    guide = (Path(__file__).parents[2] / "docs/local.md").read_text("utf-8")
    code = next(text for text in guide.split("```python\n")[1:] if "llama_cpp" in text).split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert encoder.name in code
    assert names["reply"]["choices"][0]["message"]["content"]
