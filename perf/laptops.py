"""Compare ReVisiT in mlx-vlm or llama-cpp-python with transformers on `tiny` in float32: tokens, and time per token.

    .venv-mlx/bin/python perf/laptops.py mlx [--scenes 50] [--timed 20]
    .venv-llama-cpp/bin/python perf/laptops.py llama-cpp

`make test-mlx` and `make test-llama-cpp` create these environments. Times are medians over scenes, with and without ReVisiT in turns.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image

import convert_tiny
import revisit
from revisit import ReVisiT
from revisit.embedded.scenes import render, scene

PROMPT = "Please describe this image in detail."
DEPTH = 5  # layers of `tiny`
SETTINGS: dict[str, dict[str, ReVisiT | None]] = {
    "mlx": {
        "greedy": None,
        "paper": ReVisiT(),
        "all layers": ReVisiT(layers="all"),
        "adaptive": ReVisiT(weight="agreement", neighbors=8),
        "once": ReVisiT(once=1.0),
        "normed": ReVisiT(layers="all", norm="final", alpha=1e-3),
        "max": ReVisiT(select="max"),
        "floor": ReVisiT(floor=0.5, floor_layer=DEPTH),
        "greedy, floor": ReVisiT(weight=0.0, floor=0.2, floor_layer=DEPTH),
        "floor of another layer": ReVisiT(layers="all", norm="final", alpha=1e-3, floor=0.3, floor_layer=DEPTH - 1),
    },
    "llama-cpp": {
        "greedy": ReVisiT(weight=0.0),  # through the refiner, because the image embeddings are those of transformers
        "paper": ReVisiT(),
        "adaptive": ReVisiT(weight="agreement", neighbors=8),
        "once": ReVisiT(once=1.0),
        "interpolation": ReVisiT(fusion="interpolation", alpha=1e-3),
        "floor": ReVisiT(floor=0.5, floor_layer=DEPTH),
        "greedy, floor": ReVisiT(weight=0.0, floor=0.2, floor_layer=DEPTH),
    },
}


class Mlx:
    """`tiny` in mlx-vlm."""

    def __init__(self, folder: Path) -> None:
        from mlx_vlm.utils import load_model

        self.pair = revisit.load("tiny")  # first: mlx-vlm replaces transformers' processor of LLaVA
        self.model = load_model(convert_tiny.write_mlx(folder / "tiny"))

    def decode(self, image: Image.Image, method: ReVisiT | None, new: int, chunk: int = 2048) -> list[int]:
        return generate_mlx(self.model, revisit.prepare(self.pair[1], PROMPT, image), method, new, chunk, self.pair[1])


def generate_mlx(
    model: Any, inputs: Any, method: ReVisiT | None, new: int = 24, chunk: int = 2048, processor: Any = None
) -> list[int]:
    """Decode one prompt with mlx-vlm's own loop, until the end of text."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step

    import revisit.mlx

    arrays = {name: mx.array(value.numpy()) for name, value in inputs.items() if name != "attention_mask"}
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values")
    out: list[int] = []
    with revisit.mlx.attach(model, method, processor) if method else nullcontext() as refine:
        options = {"temperature": 0.0, "max_tokens": new, "prefill_step_size": chunk, **arrays}
        processors = [refine] if refine else None
        for token, _ in generate_step(ids, model, pixels, None, logits_processors=processors, **options):
            out.append(token)
            if token == 2:
                break
    return out


class LlamaCpp:
    """`tiny` in llama-cpp-python, with the image embeddings of transformers.

    llama.cpp's LLaVA encoder puts the class token behind the patches and then leaves out the first one (llama-cpp-python 0.3.36), so
    that its own embeddings belong to other patches than the model's. Without a method they are used nevertheless.
    """

    def __init__(self, folder: Path, head: str = "F32") -> None:
        self.pair = revisit.load("tiny")
        language, encoder = convert_tiny.write_gguf(folder, head)
        self.llm = load_llama(language, encoder)
        self.library = Embeddings(self.llm.chat_handler._mtmd_cpp)
        self.llm.chat_handler._mtmd_cpp = self.library

    def decode(self, image: Image.Image, method: ReVisiT | None, new: int, chunk: int = 0) -> list[int]:
        text = self.answer(image, method, new)
        return list(self.pair[1].tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, image: Image.Image, method: ReVisiT | None, new: int, **options: Any) -> str:
        import llama_cpp

        import revisit.llama_cpp

        model, processor = self.pair
        with torch.no_grad():
            pixels = revisit.prepare(processor, PROMPT, image)["pixel_values"]
            self.library.embedded = torch.cat(list(model.model.get_image_features(pixels).pooler_output)).contiguous()
        data = io.BytesIO()
        image.save(data, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"\n{PROMPT}"}]
        with revisit.llama_cpp.attach(self.llm, method) if method else nullcontext() as refine:
            self.refine = refine  # of the last answer
            processors = llama_cpp.LogitsProcessorList([refine]) if refine else None
            options = {"temperature": 0.0, "max_tokens": new, "logits_processor": processors, **options}
            reply = self.llm.create_chat_completion([{"role": "user", "content": parts}], **options)
        return str(reply["choices"][0]["message"]["content"])


def load_llama(language: Path, encoder: Path) -> Any:
    import llama_cpp
    from llama_cpp.llama_chat_format import MTMDChatHandler

    handler = MTMDChatHandler(str(encoder), verbose=False, use_gpu=False)
    wide = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    options = {"n_ctx": 512, "n_batch": 48, "n_threads": 1, "verbose": False, **wide}  # an image takes two batches
    return llama_cpp.Llama(str(language), chat_handler=handler, **options)


class Embeddings:
    """llama.cpp's multimodal library, with the image embeddings replaced."""

    embedded: torch.Tensor  # (64, d)

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def mtmd_get_output_embd(self, _encoder: Any) -> Any:
        return np.ctypeslib.as_ctypes(self.embedded.numpy().reshape(-1))


ENGINES = {"mlx": Mlx, "llama-cpp": LlamaCpp}


def in_transformers(pair: Any, image: Image.Image, method: ReVisiT | None, new: int) -> list[int]:
    """Return transformers' tokens, up to the end of text."""
    model, processor = pair
    inputs = revisit.prepare(processor, PROMPT, image)
    out = revisit.generate(model, **inputs, method=method or "greedy", max_new_tokens=new, do_sample=False)
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


def before_end(pair: Any, tokens: Sequence[int]) -> list[int]:
    """Return the tokens before the first at which transformers stops; `tiny` has several."""
    ends = pair[0].generation_config.eos_token_id
    return list(itertools.takewhile(lambda token: token not in ends, tokens))


def time_per_token(engine: Any, scenes: Sequence[Image.Image], new: int) -> None:
    times: dict[str, list[float]] = {"plain": [], "ReVisiT": []}
    engine.decode(scenes[0], ReVisiT(), new)  # warms up
    for image in scenes:
        for name, method in (("plain", None), ("ReVisiT", ReVisiT())):
            began = time.perf_counter()
            count = len(engine.decode(image, method, new))
            times[name].append((time.perf_counter() - began) / count)
    plain, ours = (1000 * statistics.median(values) for values in times.values())
    print(f"time per token over {len(scenes)} scenes: {ours:.1f} ms instead of {plain:.1f} ms ({ours / plain:.2f}x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scenes = [render(scene("unusual", 77, number)) for number in range(arguments.scenes)]
    with tempfile.TemporaryDirectory() as folder:
        engine = ENGINES[arguments.engine](Path(folder))
        for name, method in SETTINGS[arguments.engine].items():
            equal = 0
            for number, image in enumerate(scenes):
                got = engine.decode(image, method, arguments.tokens, chunk=16 if number % 2 else 2048)
                want = in_transformers(engine.pair, image, method, arguments.tokens)
                equal += before_end(engine.pair, got) == before_end(engine.pair, want)
            print(f"{name}: tokens of {equal} of {len(scenes)} scenes equal transformers'", flush=True)
        time_per_token(engine, scenes[: arguments.timed], arguments.tokens)


if __name__ == "__main__":
    main()
