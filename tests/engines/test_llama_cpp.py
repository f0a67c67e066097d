"""ReVisiT in llama-cpp-python: tokens against transformers with the same weights, through its own chat handler."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not in this environment: run `make test-llama-cpp`")

import gguf
import gguf_tiny
import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_chat_format import MTMDChatHandler
from PIL import Image

import revisit
import revisit.llama_cpp
from revisit import ReVisiT
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.models.prompts import prepare

PROMPT = "Please describe this image in detail."
SETTINGS = {
    "greedy": ReVisiT(weight=0.0),  # through the refiner, which passes the embeddings of transformers
    "paper": ReVisiT(),
    "adaptive": ReVisiT(weight="agreement", neighbors=8),
    "once": ReVisiT(once=1.0),
    "interpolation": ReVisiT(fusion="interpolation", alpha=1e-3),
}
TIE = 1e-3  # rounding may decide between equal scores


def load(files: tuple[Path, Path]) -> llama_cpp.Llama:
    language, encoder = files
    handler = MTMDChatHandler(str(encoder), verbose=False, use_gpu=False)
    wide = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    options = {"n_ctx": 512, "n_batch": 48, "n_threads": 1, "verbose": False, **wide}  # an image takes two batches
    return llama_cpp.Llama(str(language), chat_handler=handler, **options)


class Encoder:
    """llama.cpp's multimodal library with the image embeddings of transformers.

    Its LLaVA encoder puts the class token behind the patches and then leaves out the first one (llama-cpp-python 0.3.36), so that
    its own embeddings belong to other patches than the model's.
    """

    embedded: torch.Tensor  # (64, d)

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def mtmd_get_output_embd(self, _encoder: Any) -> Any:
        return np.ctypeslib.as_ctypes(self.embedded.numpy().reshape(-1))


@pytest.fixture(scope="module")
def pair() -> Any:
    return revisit.load("tiny")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llama_cpp.Llama]:
    model = load(gguf_tiny.write(tmp_path_factory.mktemp("tiny")))
    model.chat_handler._mtmd_cpp = Encoder(model.chat_handler._mtmd_cpp)
    yield model
    model.close()


def messages(image: Image.Image, prompt: str = PROMPT) -> list[Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"\n{prompt}"}]
    return [{"role": "user", "content": parts}]


def encode(pair: Any, image: Image.Image) -> torch.Tensor:
    model, processor = pair
    with torch.no_grad():
        return torch.cat(
            list(model.model.get_image_features(prepare(processor, PROMPT, image)["pixel_values"]).pooler_output)
        )


def answer(llm: llama_cpp.Llama, image: Image.Image, method: ReVisiT, new: int = 24) -> str:
    with revisit.llama_cpp.attach(llm, method) as refine:
        options = {"temperature": 0.0, "max_tokens": new, "logits_processor": llama_cpp.LogitsProcessorList([refine])}
        reply = llm.create_chat_completion(messages(image), **options)
    return str(reply["choices"][0]["message"]["content"])


def assert_equal_or_tied(text: str, pair: Any, image: Image.Image, method: ReVisiT, new: int = 24) -> None:
    """Compare an answer with transformers'; they may part only where two scores are nearly equal."""
    model, processor = pair
    inputs = prepare(processor, PROMPT, image)
    options = {"max_new_tokens": new, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    output = revisit.generate(model, **inputs, method=method, **options)
    expected = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    tokens = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    for got, want, scores in zip(tokens, expected, output.scores, strict=False):
        if got != want:
            assert scores[0, want] - scores[0, got] < TIE
            return
    assert len(tokens) >= len([token for token in expected if token != 2])


@pytest.mark.parametrize("name", SETTINGS)
def test_tiny_gives_the_answers_of_transformers(llm: llama_cpp.Llama, pair: Any, name: str) -> None:
    for index in range(4):
        image = render(scene("unusual", 77, index))
        llm.chat_handler._mtmd_cpp.embedded = encode(pair, image)
        assert_equal_or_tied(answer(llm, image, SETTINGS[name]), pair, image, SETTINGS[name])


def test_states_are_those_of_transformers(llm: llama_cpp.Llama, pair: Any) -> None:
    """All 64 image tokens, in two batches."""
    model, processor = pair
    image = render(scene("unusual", 77, 0))
    llm.chat_handler._mtmd_cpp.embedded = encode(pair, image)
    with revisit.llama_cpp.attach(llm) as refine:
        llm.create_chat_completion(
            messages(image), logits_processor=llama_cpp.LogitsProcessorList([refine]), temperature=0.0, max_tokens=1
        )
    inputs = prepare(processor, PROMPT, image)
    with torch.no_grad():
        states = model.model(**inputs).last_hidden_state[0, inputs["input_ids"][0] == model.config.image_token_id]
    kept = np.concatenate(refine._chunks)
    assert len(kept) == 64
    np.testing.assert_allclose(kept, states.numpy(), atol=1e-4)


def test_a_quantized_head_is_read_row_by_row(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    language, _ = gguf_tiny.write(tmp_path, kind)
    head = revisit.llama_cpp.read_head(str(language))
    assert isinstance(head, revisit.llama_cpp.QuantizedHead)
    tensor = next(t for t in gguf.GGUFReader(language).tensors if t.name == "output.weight")
    weight = torch.from_numpy(gguf.dequantize(tensor.data, kind).copy())
    states, ids = torch.randn(3, weight.shape[1]), torch.tensor([5, 700, 17, 5])
    torch.testing.assert_close(head.logits(states, ids), states @ weight[ids].T)


def test_a_model_with_a_quantized_head_decodes(tmp_path: Path) -> None:
    model = load(gguf_tiny.write(tmp_path, gguf.GGMLQuantizationType.Q8_0))
    assert answer(model, render(scene("unusual", 77, 1)), ReVisiT(), new=8)
    model.close()


def test_wrong_uses_raise_one_sentence(llm: llama_cpp.Llama) -> None:
    image, library = render(scene("usual", 77, 0)), llm.chat_handler._mtmd_cpp
    with pytest.raises(RevisitError, match="layers='last'"), revisit.llama_cpp.attach(llm, ReVisiT(layers="all")):
        pass
    with pytest.raises(RevisitError, match="without ReVisiT"), revisit.llama_cpp.attach(llm):
        llm.create_chat_completion(messages(image), max_tokens=1)
    with pytest.raises(RevisitError, match="no image"), revisit.llama_cpp.attach(llm) as refine:
        llm.create_completion("a dog", max_tokens=1, logits_processor=llama_cpp.LogitsProcessorList([refine]))
    assert llm.chat_handler._mtmd_cpp is library


def test_the_recipe_of_the_guide(
    llm: llama_cpp.Llama, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tiny` stands in for the checkpoint."""
    image = render(scene("unusual", 77, 2))
    llm.chat_handler._mtmd_cpp.embedded = encode(pair, image)
    monkeypatch.chdir(tmp_path)
    image.save("photo.png")
    monkeypatch.setattr(llama_cpp, "Llama", lambda *_, **__: llm)
    monkeypatch.setattr("llama_cpp.llama_chat_format.Llava15ChatHandler", lambda _: None)
    guide = (Path(__file__).parents[2] / "docs/local.md").read_text("utf-8")
    code = next(text for text in guide.split("```python\n")[1:] if "llama_cpp" in text).split("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("file:photo.jpg", (tmp_path / "photo.png").as_uri()), names)
    assert names["reply"]["choices"][0]["message"]["content"]
