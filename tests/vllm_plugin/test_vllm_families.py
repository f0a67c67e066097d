"""A tiny model of every supported family, in vLLM and in transformers. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import vllm_models
import vllm_worker
from test_vllm_engine import CHUNKED, expected, expected_with_scores, inputs_of, mixed

from revisit import ReVisiT
from revisit.models import families
from revisit.models.parts import ModelParts, vision_mask

pytestmark = pytest.mark.timeout(3000)
HALF = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")  # vLLM's linear attention on CPUs is in bfloat16 only
OTHERS = [name for name in vllm_models.PLACE if name not in ("llava", "qwen2_5_vl")]
REQUESTS = mixed(9)
# LLaVA-OneVision gets one image a request: of several, transformers encodes the whole images only and vLLM their tiles too. Gemma 3
# gets no newline after an image, which vLLM cannot tell from those that belong to the image.
OWN_REQUESTS = {
    "llava_onevision": [{**request, "images": request["images"][:1]} for request in REQUESTS],
    "gemma3": [{**request, "text": request["text"].lstrip("\n")} for request in REQUESTS],
}


def requests_of(family: str) -> list[dict[str, Any]]:
    return OWN_REQUESTS.get(family, REQUESTS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run an engine of each family, all in one process."""
    folder = tmp_path_factory.mktemp("families")
    options = {**CHUNKED, "enable_prefix_caching": False, "max_num_seqs": 8}
    built, engines = {}, []
    for name in OTHERS:
        built[name] = vllm_models.build(name)
        engine = {
            "name": name,
            "model": str(vllm_models.save(*built[name], folder / name)),
            "requests": requests_of(name),
        }
        engine |= {"place": vllm_models.PLACE[name], "options": options}
        engines.append({**engine, **({"dtype": "bfloat16", "states": True} if name in HALF else {})})
    results = {result["name"]: result for result in vllm_worker.run(folder, "families", engines)}
    return {
        name: {"family": name, "model": model, "processor": processor, "result": results[name]}
        for name, (model, processor) in built.items()
    }


def test_every_supported_family_is_run() -> None:
    built = {f"{families.FAMILIES[name].vllm}ForConditionalGeneration" for name in vllm_models.PLACE}
    assert built == families.vllm_architectures()


@pytest.mark.parametrize("family", [name for name in OTHERS if name not in HALF])
def test_every_row_has_the_tokens_of_the_transformers_path(served: dict[str, Any], family: str) -> None:
    got = [row["tokens"] for row in served[family]["result"]["rows"]]
    assert got == [expected(served[family], request) for request in requests_of(family)]


@pytest.mark.parametrize("family", HALF)
def test_states_in_half_precision_are_those_of_the_transformers_path(served: dict[str, Any], family: str) -> None:
    """Rounding may change the nearest vision token, and so the tokens, but hardly the states."""
    own = served[family]
    noted = [(r, row["states"]) for r, row in zip(REQUESTS, own["result"]["rows"], strict=True) if row["states"]]
    assert len(noted) == sum(bool(r["revisit"] and r["images"]) for r in REQUESTS)
    for request, states in noted:
        wanted = hidden_states(own, request)
        assert torch.nn.functional.cosine_similarity(torch.tensor(states), wanted).min() > 0.99


@pytest.mark.parametrize(
    "family", [name for name in HALF if "moe" not in name]
)  # rounding changes the choice of experts
def test_plain_rows_in_half_precision_differ_between_likely_tokens_only(served: dict[str, Any], family: str) -> None:
    own = served[family]
    for request, row in zip(REQUESTS, own["result"]["rows"], strict=True):
        if request["revisit"] and request["images"]:
            continue
        tokens, scores = expected_with_scores(own, request)
        pairs = enumerate(zip(row["tokens"], tokens, strict=True))
        place = next((place for place, (one, other) in pairs if one != other), None)
        if place is not None:
            assert scores[place, tokens[place]] - scores[place, row["tokens"][place]] < 0.5


def hidden_states(own: dict[str, Any], request: dict[str, Any]) -> torch.Tensor:
    """Return the states of a request's vision tokens at its layers, in transformers.  -> (layers · tokens, d)"""
    model, inputs = own["model"], inputs_of(own, request)
    parts = ModelParts.of(model)
    layers = families.resolve_layers(ReVisiT.recommended(model, **request["revisit"]).layers, parts.depth, parts.tied)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    mask = vision_mask(inputs["input_ids"][0], parts.vision_ids)
    return torch.cat([states[layer][0][mask] for layer in layers])


@pytest.mark.parametrize("family", OTHERS)
def test_every_token_of_opted_in_requests_with_an_image_is_refined(served: dict[str, Any], family: str) -> None:
    result = served[family]["result"]
    assert result["refined"] == sum(r["max_tokens"] for r in REQUESTS if r["revisit"] and r["images"])
    assert result["requests"] == 0  # none is left
