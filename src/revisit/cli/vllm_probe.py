"""One vLLM engine for `revisit doctor --gpu --vllm`: `python -m revisit.cli.vllm_probe JOB` prints the tokens of its requests as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

from revisit.embedded.samples import SAMPLES
from revisit.eval.engines.vllm import prompt_of
from revisit.models import DESCRIBE
from revisit.models.config import is_embedded, load_config, resolve
from revisit.models.processors import load_processor
from revisit.vllm.worker import count_steps

TOP_P = 0.8
NEW = 32  # tokens of an answer


def probe(model: str, layers: str | None, eager: bool, rows: list[int]) -> dict[str, Any]:
    """Decode plain requests and, with the plug-in, refined ones, some of them sampled with top_p; `rows` at a time are timed."""
    from vllm import LLM, SamplingParams

    length = load_config(resolve(model)).get_text_config().max_position_embeddings
    # The doctor itself holds some memory. Rounding differs between batches, so a small model is decoded in float32.
    limits = {"gpu_memory_utilization": 0.85, "max_model_len": min(4096, length), "max_num_seqs": max([128, *rows])}
    dtype = "float32" if is_embedded(model) else "auto"
    llm = LLM(resolve(model), dtype=dtype, enforce_eager=eager, seed=0, limit_mm_per_prompt={"image": 1}, **limits)
    processor = load_processor(model)
    prompts = [prompt_of(processor, DESCRIBE, [sample.image()]) for sample in SAMPLES.values()]

    def run(count: int, **options: Any) -> list[Any]:
        parameters = SamplingParams(max_tokens=NEW, detokenize=False, **options)
        chosen = [prompts[number % len(prompts)] for number in range(count)]
        return [output.outputs[0] for output in llm.generate(chosen, parameters, use_tqdm=False)]

    def speed(count: int, **options: Any) -> float:
        start = time.perf_counter()
        run(count, temperature=0.0, ignore_eos=True, **options)
        return count * NEW / (time.perf_counter() - start)

    plain = run(8, temperature=0.0, logprobs=0)
    result: dict[str, Any] = {
        "plain": tokens(plain),
        "logprobs": [[step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)] for o in plain],
        "exact": dtype == "float32",
    }
    if layers is not None:
        refined = {"extra_args": {"revisit": {"layers": layers}}}
        result["refined"] = tokens(run(8, temperature=0.0, **refined))
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # which cannot run vLLM's kernel
        sampled = [] if interpreted else run(96, temperature=1.0, top_p=TOP_P, logprobs=20, **refined)
        result["outside_top_p"] = None if interpreted else sum(map(tokens_outside, sampled))
        result["speeds"] = [(count, speed(count), speed(count, **refined)) for count in rows]
        (result["steps"],) = llm.apply_model(count_steps)
    return result


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def tokens_outside(output: Any) -> int:
    """Count the sampled tokens in front of which likelier tokens already have the probability `TOP_P`."""
    outside = 0
    for token, listed in zip(output.token_ids, output.logprobs, strict=True):
        likelier = sum(math.exp(other.logprob) for other in listed.values() if other.logprob > listed[token].logprob)
        outside += likelier > TOP_P + 1e-3
    return outside


if __name__ == "__main__":
    print(json.dumps(probe(**json.loads(sys.argv[1]))))
