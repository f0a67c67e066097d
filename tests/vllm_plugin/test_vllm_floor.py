"""A floor on the support of names in vLLM: the tokens of transformers, on the embedded model. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import vllm_worker

import revisit
from revisit.embedded.samples import SAMPLES
from revisit.guard.rates import find_rate
from revisit.methods import as_method
from revisit.models.config import embedded_folder
from revisit.models.prompts import chat_text, prepare
from revisit.words import WORDS, object_words

pytestmark = pytest.mark.timeout(3000)
PROMPT = "Describe the image."
OWN = [["dog", "puppy"], ["traffic light"], ["cat"]]
SETTINGS: list[Any] = [
    {"floor": 0.5},
    {"method": "greedy", "floor": 0.5},
    "greedy:floor=0.3",
    {"floor": 0.5, "layers": "last", "floor_layer": 5},
    {"alpha": 1e-3, "floor": 0.5, "once": 1.0},
    {"floor": 0.9, "names": OWN},
    {"alpha": 1e-3},
    None,
]
ANIMALS = {"structured_outputs": {"choice": ["a dog", "a cat"]}}
CHUNKED = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "block_size": 32,
}
OPTIONS = {"max_num_seqs": 8, "enable_prefix_caching": False}


def request(scenes: list[int], settings: Any, **more: Any) -> dict[str, Any]:
    return {"scenes": scenes, "revisit": settings, "max_tokens": 40, "eos": True, **more}


REQUESTS = [request([i % 3], settings) for i, settings in enumerate(SETTINGS * 2)]
REQUESTS.append(request([2], {"risk": 0.2}, prompt="Please describe this image in detail.", max_tokens=96))
REQUESTS += [request([], {"floor": 1.0}), request([0, 1], {"floor": 0.5}), request([0, 1], "greedy:floor=0.5")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all engines, each in its own process; the compiled one has a compile cache of its own."""
    folder, (model, processor) = tmp_path_factory.mktemp("floor"), revisit.load("tiny")

    def engine(name: str, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        texts = [chat_text(processor, one.get("prompt", PROMPT), one["scenes"]) for one in requests]
        written = [{"images": [], "text": text, **one} for one, text in zip(requests, texts, strict=True)]
        return {
            "name": name,
            "model": str(embedded_folder()),
            "place": "",
            "options": OPTIONS,
            "requests": written,
            **more,
        }

    forced = [request([1], f"greedy:floor={floor}", options=ANIMALS) for floor in (1, 0.5)]
    eager = [
        engine("whole", [*REQUESTS, *forced]),
        engine("chunked", REQUESTS * 2, options={**CHUNKED, "max_num_seqs": 8, "num_gpu_blocks_override": 24}),
    ]
    answers = vllm_worker.run(folder, "eager", eager)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        answers += vllm_worker.run(folder, "compiled", [engine("compiled", REQUESTS, compiled=True)])
    return {"model": model, "processor": processor, **{answer["name"]: answer for answer in answers}}


def expected(runs: dict[str, Any], one: dict[str, Any]) -> list[int]:
    """Return the tokens of one request, alone, in transformers."""
    model, processor, settings = runs["model"], runs["processor"], one["revisit"]
    if isinstance(settings, dict) and "risk" in settings:
        settings = find_rate(model, settings["risk"], None).decoding_method()
    elif isinstance(settings, dict):
        settings = {"name": "revisit", **settings}
        settings["name"] = settings.pop("method", settings["name"])
    images = [list(SAMPLES.values())[number].image() for number in one["scenes"]]
    given = prepare(processor, [one.get("prompt", PROMPT)], [images] if images else None)
    method = as_method(settings, model) if images else None
    output: Any = revisit.generate(
        model, **given, method=method, processor=processor, max_new_tokens=one["max_tokens"], do_sample=False
    )
    return list(output[0, given["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("engine", ["whole", "chunked", "compiled"])
def test_every_request_has_the_tokens_of_transformers(runs: dict[str, Any], engine: str) -> None:
    requests = REQUESTS * 2 if engine == "chunked" else REQUESTS
    wanted = [expected(runs, one) for one in requests]
    assert [row["tokens"] for row in runs[engine]["rows"][: len(requests)]] == wanted
    assert len({str(tokens) for tokens in wanted}) > 8  # the floor acts


def test_no_name_below_the_floor_is_written(runs: dict[str, Any]) -> None:
    tokenizer, held, free = runs["processor"].tokenizer, set[str](), set[str]()
    for one, row in zip(REQUESTS, runs["whole"]["rows"], strict=False):
        text = tokenizer.decode(row["tokens"], skip_special_tokens=True).lower()
        names = {WORDS[found[1].lower()] for found in object_words().finditer(text)}
        if one["revisit"] == {"floor": 0.5} and len(one["scenes"]) == 1:
            held |= names
        free |= names if one["revisit"] is None else set()
    assert held
    assert free - held


def test_a_schema_is_followed_where_it_allows_withheld_names_only(runs: dict[str, Any]) -> None:
    forced = [runs["processor"].tokenizer.decode(row["tokens"]) for row in runs["whole"]["rows"][-2:]]
    assert all(any(animal in text for animal in ("a dog", "a cat")) for text in forced)
    assert runs["whole"]["overruled"] >= 1


def test_states_and_supports_are_read_from_the_cache(runs: dict[str, Any]) -> None:
    assert any(row["cached"] for one, row in zip(REQUESTS * 2, runs["chunked"]["rows"], strict=True) if one["revisit"])
