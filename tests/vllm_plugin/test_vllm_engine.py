"""vLLM with the plug-in against our transformers path and against vanilla vLLM. Run by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: run `make test-vllm`", allow_module_level=True)

import vllm_models
import vllm_worker
from vllm_breaker import BREAKS

import families

pytestmark = [pytest.mark.timeout(3000)]
FAMILIES = ("llava", "qwen2_5_vl")
SETTINGS = [
    {"alpha": 1e-5},
    {"alpha": 1e-3, "divergence": "official", "normalize": False},
    {"alpha": 0.1},
    {"alpha": 1e-2, "fusion": "interpolation", "weight": 0.3},
    {"alpha": 1e-3, "select": "random", "seed": 7},
    {"alpha": 1e-3, "precision": "model"},
    {"vocabulary": "full"},
    {"alpha": 1e-3, "once": 1.0},
]
SENTENCE = "What can be seen in this picture, and where is everything that is in it? "


def mixed(count: int) -> list[dict[str, Any]]:
    """Make requests with and without an image, opted in and not, of different settings and lengths."""
    return [
        {
            "text": f"\n{i} " + SENTENCE * (i % 3) + "Describe.",
            "images": [] if i % 5 == 4 else [i % 7] if i % 3 else [i % 7, 3],
            "max_tokens": 3 + (i * 7) % 10,
            "revisit": SETTINGS[i % len(SETTINGS)] if i % 3 != 2 else None,
        }
        for i in range(count)
    ]


REQUESTS = mixed(25)
DEEP = [{**r, "revisit": {**SETTINGS[i % 3], "layers": "all"}} for i, r in enumerate(REQUESTS[:10]) if r["images"]]
DEEP += [{**r, "revisit": {**r["revisit"], "norm": "final"}} for r in DEEP[:3]]
GROWING = [{**r, "max_tokens": 40} for r in REQUESTS[:12]]  # answers that outgrow a small cache
STOPPED = [{**r, "eos": True, "max_tokens": 40} for r in REQUESTS[:8]]
# Others act after ReVisiT, in transformers' order; the last list often leaves nothing of the plausible set.
OPTIONS = [
    {"repetition_penalty": 1.6},
    {"logit_bias": {"7": 6.0, "30": 9.0, "41": -20.0}},
    {"allowed_token_ids": list(range(10, 22))},
    {"logit_bias": {"63": 3.0, "66": -5.0}, "allowed_token_ids": list(range(60, 90, 3))},
]
WITH_IMAGE = [r for r in REQUESTS if r["revisit"] and r["images"]]
ORDERED = [{**r, "options": OPTIONS[i % len(OPTIONS)], "max_tokens": 8} for i, r in enumerate(WITH_IMAGE[:8])]
# Thoughts that the prompt opens or the answer, which may write little but the tokens around thoughts.
MARKS = ["<think>", "</think>"]
OPEN = len(families.tokenizer())  # the first token that is added
THINKING = [
    {
        **r,
        "text": r["text"] + MARKS[0] * (i % 2),
        "max_tokens": 12,
        "revisit": {"alpha": 1e-3, "phase": "answer" if i % 4 < 2 else "thought"},
        "options": {"allowed_token_ids": [OPEN, OPEN + 1, *((60, 61) if i % 2 else ())]},
    }
    for i, r in enumerate(WITH_IMAGE[:8])
]
# A hundred requests through a pool with room for three at a time; a few of them break inside the worker.
CROWD = [{**WITH_IMAGE[i % len(WITH_IMAGE)], "max_tokens": 2 + i % 3} for i in range(100)]
BROKEN = (7, 23, 80)
for number in BROKEN:
    CROWD[number] = {**CROWD[number], "revisit": {"alpha": BREAKS}, "max_tokens": 5}
FULL = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}  # images are cut in pieces
UNCACHED = {**FULL, "enable_prefix_caching": False, "max_num_seqs": 16}
ENGINES = [
    {"name": "whole", "options": UNCACHED, "requests": [*REQUESTS, *STOPPED, *ORDERED, *THINKING]},
    {
        "name": "chunked",
        "options": {**CHUNKED, "enable_prefix_caching": True, "max_num_seqs": 8, "block_size": 32},
        "requests": REQUESTS * 2,
    },
    {
        "name": "preempted",
        "options": {
            **CHUNKED,
            "enable_prefix_caching": True,
            "max_num_seqs": 16,
            "max_model_len": 352,
            "num_gpu_blocks_override": 12,  # one of them is vLLM's own: room for a single longest request
            "block_size": 32,
        },
        "requests": GROWING,
    },
    {
        "name": "deep",
        "options": {**CHUNKED, "enable_prefix_caching": False, "max_num_seqs": 4},
        "requests": DEEP,
        "layers": "all",
    },
]
CROWDED = {
    "name": "crowded",
    "options": {
        **FULL,
        "enable_prefix_caching": True,
        "max_num_seqs": 16,
        "worker_extension_cls": "vllm_breaker.Breaker",
    },
    "requests": CROWD,
    "pool_mb": 0.2,
    "rounds": 5,
}
# Five turns of two conversations, each about its image; one of them did not opt in.
TURNS = [
    {
        "text": f"\n{SENTENCE}" + "".join(f"{i}. {SENTENCE}" for i in range(turn)),
        "images": [image],
        "max_tokens": 4,
        "revisit": revisit,
    }
    for turn in range(5)
    for image, revisit in ((1, {"alpha": 1e-3}), (2, None))
]
CONVERSATION = {
    "name": "turns",
    "options": {**CHUNKED, "enable_prefix_caching": True, "max_num_seqs": 4, "block_size": 32, "max_model_len": 1024},
    "requests": TURNS,
    "rounds": 5,
}
# Long answers of random models repeat themselves, so that candidates are accepted.
GUESSED = [{**r, "max_tokens": 24} for r in REQUESTS if not {"random", 1.0} & {*(r["revisit"] or {}).values()}]
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LOOKED_UP = {
    "name": "looked up",
    "options": {**CHUNKED, "enable_prefix_caching": True, "max_num_seqs": 8, "speculative_config": LOOKUP},
    "requests": GUESSED,
}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}
DRAFTED = {**LOOKED_UP, "name": "drafted"}
VANILLA = {"name": "vanilla", "options": UNCACHED, "requests": REQUESTS}


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run one family: the model, all engines with the plug-in, one without."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    model, processor = vllm_models.build(family)
    processor.tokenizer.add_tokens(MARKS)
    vllm_models.save(model, processor, folder / "model")
    base = {"model": str(folder / "model"), "place": vllm_models.PLACE[family]}
    engines = [*ENGINES]
    if family == "llava":
        draft = {**DRAFT, "model": str(vllm_models.save_draft(model, processor, folder / "draft"))}
        drafted = {**DRAFTED, "options": {**LOOKED_UP["options"], "speculative_config": draft}}
        engines += [CROWDED, CONVERSATION, drafted]
    engines.append(LOOKED_UP)  # last: it imports numba, after which vLLM 0.32 starts no second engine in a process
    plugged = vllm_worker.run(folder, "plugged", [{**base, **engine} for engine in engines])
    vanilla = vllm_worker.run(folder, "vanilla", [{**base, **VANILLA}], plugged=False)
    return {
        "family": family,
        "model": model,
        "processor": processor,
        "plugged": {r["name"]: r for r in plugged},
        "vanilla": vanilla[0],
    }


def in_transformers(options: dict[str, Any]) -> dict[str, Any]:
    """Convert the options of a vLLM request to arguments of `generate`."""
    converted = dict(options)
    if bias := converted.pop("logit_bias", None):
        converted["sequence_bias"] = {(int(token),): value for token, value in bias.items()}
    if allowed := converted.pop("allowed_token_ids", None):
        converted["suppress_tokens"] = sorted(set(range(families.TEXT["vocab_size"])) - set(allowed))
    return converted


def expected(runs: dict[str, Any], request: dict[str, Any]) -> list[int]:
    """Return the tokens of one request, alone, in transformers."""
    return expected_with_scores(runs, request)[0]


def inputs_of(runs: dict[str, Any], request: dict[str, Any]) -> Any:
    """Convert a request to the model's inputs in transformers."""
    images = [families.image(seed) for seed in request["images"]]
    text = vllm_models.PLACE[runs["family"]] * len(images) + request["text"]
    inputs = runs["processor"](text=[text], images=[images] if images else None, return_tensors="pt")
    # With these, the tokens of an image attend to each other both ways (Gemma 3), which vLLM does not do on a CPU.
    inputs.pop("token_type_ids", None)
    return inputs


def expected_with_scores(runs: dict[str, Any], request: dict[str, Any]) -> tuple[list[int], Any]:
    """Return the tokens in transformers, and their log-probabilities.  (tokens, V)"""
    import torch

    from revisit import ReVisiT, generate

    known = runs.setdefault("expected", {})
    key = json.dumps(request, sort_keys=True)
    if key not in known:
        model, inputs = runs["model"], inputs_of(runs, request)
        opted_in = request["revisit"] and request["images"]  # without an image there is nothing to revisit
        method = ReVisiT.recommended(model, **request["revisit"]) if opted_in else "greedy"
        more = {} if request.get("eos") else {"eos_token_id": None}
        more |= in_transformers(request.get("options", {}))
        more |= {"return_dict_in_generate": True, "output_scores": True, "processor": runs["processor"]}
        output = generate(model, **inputs, method=method, max_new_tokens=request["max_tokens"], do_sample=False, **more)
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        known[key] = tokens, torch.cat(output.scores).log_softmax(-1)
    answer: tuple[list[int], Any] = known[key]
    return answer


def result_of(runs: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the result of one engine."""
    if name not in runs["plugged"]:
        pytest.skip("run with one family")
    result: dict[str, Any] = runs["plugged"][name]
    return result


def test_the_requested_runner_is_used(runs: dict[str, Any]) -> None:
    v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    assert {engine["v2"] for engine in [*runs["plugged"].values(), runs["vanilla"]]} == {v2}


@pytest.mark.parametrize("engine", [*ENGINES, LOOKED_UP, DRAFTED, CONVERSATION], ids=lambda engine: engine["name"])
def test_every_row_has_the_tokens_of_the_transformers_path(runs: dict[str, Any], engine: dict[str, Any]) -> None:
    result = result_of(runs, engine["name"])
    assert [row["tokens"] for row in result["rows"]] == [expected(runs, request) for request in engine["requests"]]
    assert result["requests"] == 0  # none is left


@pytest.mark.parametrize("name", ["looked up", "drafted"])
def test_candidates_of_speculation_are_accepted(runs: dict[str, Any], name: str) -> None:
    result = result_of(runs, name)
    assert result["accepted"] > 20
    generated = sum(r["max_tokens"] for r in GUESSED if r["revisit"] and r["images"])
    assert generated < result["refined"] < generated * 4  # every candidate was refined


def test_only_opted_in_rows_differ_from_vanilla(runs: dict[str, Any]) -> None:
    rows = list(zip(REQUESTS, runs["plugged"]["whole"]["rows"], runs["vanilla"]["rows"], strict=False))
    others = [(ours, theirs) for request, ours, theirs in rows if request["revisit"] is None]
    assert len(others) == 8
    for ours, theirs in others:
        assert ours["tokens"] == theirs["tokens"]
        assert ours["logprobs"] == theirs["logprobs"]  # equal floats, not close ones
    opted = [ours["tokens"] != theirs["tokens"] for r, ours, theirs in rows if r["revisit"] and r["images"]]
    assert sum(opted) > len(opted) / 2


def test_every_token_of_opted_in_requests_with_an_image_is_refined(runs: dict[str, Any]) -> None:
    opted = [r for r in REQUESTS * 2 if r["revisit"] and r["images"]]
    assert runs["plugged"]["chunked"]["refined"] == sum(r["max_tokens"] for r in opted)


def test_opted_in_requests_read_the_prefix_cache_if_their_states_are_stored(runs: dict[str, Any]) -> None:
    rows = zip(runs["plugged"]["chunked"]["rows"], REQUESTS * 2, strict=True)
    cached = [row["cached"] for row, request in rows if request["revisit"] and request["images"]]
    assert not any(cached[:4])  # nothing was stored
    assert any(cached[len(cached) // 2 :])


def test_a_conversation_is_prefilled_once(runs: dict[str, Any]) -> None:
    rows = result_of(runs, "turns")["rows"]
    ours, others = rows[::2], rows[1::2]
    assert [row["cached"] for row in ours] == [row["cached"] for row in others]  # as without ReVisiT
    for before, row in itertools.pairwise(ours):
        assert row["cached"] >= before["prompt"] // 32 * 32  # all whole blocks of the turn before


def test_the_cases_occur(runs: dict[str, Any]) -> None:
    """A small cache preempts requests, and thoughts begin and end in answers."""
    assert runs["plugged"]["preempted"]["preemptions"] > 0
    rows = [row["tokens"] for row in runs["plugged"]["whole"]["rows"][-len(THINKING) :]]
    assert all(any(mark in row[:-1] for row in rows) for mark in (OPEN, OPEN + 1))


def test_requests_wait_for_room_in_a_small_pool_and_errors_end_their_own_request_only(runs: dict[str, Any]) -> None:
    result = result_of(runs, "crowded")
    assert result["blocks"] == 12  # of 64 states; 16 requests run at once where they have room
    for i, (request, row) in enumerate(zip(CROWD, result["rows"], strict=True)):
        if i in BROKEN:
            assert row["finished"] == "error", i
        else:
            assert (row["tokens"], row["finished"]) == (expected(runs, request), "length"), i
    assert result["requests"] == 0


def test_memory_is_flat_over_a_hundred_requests(runs: dict[str, Any]) -> None:
    _, second, *_, last = result_of(runs, "crowded")["memory"]
    assert last < 1.02 * second
