"""One vLLM engine for `revisit doctor --gpu --vllm`: `python -m revisit.cli.vllm_probe JOB` prints the tokens of its requests as JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from revisit.embedded.samples import SAMPLES
from revisit.models import DESCRIBE
from revisit.models.config import load_config, resolve
from revisit.models.processors import load_processor
from revisit.models.prompts import chat_text

TOP_P = 0.8


def probe(model: str, layers: str | None, eager: bool) -> dict[str, Any]:
    """Decode 8 plain requests and, with the plug-in, 8 refined ones and 96 refined ones that are sampled with top_p."""
    from vllm import LLM, SamplingParams

    length = min(4096, load_config(resolve(model)).get_text_config().max_position_embeddings)
    memory = {
        "gpu_memory_utilization": 0.85,
        "max_model_len": length,
        "max_num_seqs": 128,
    }  # the doctor itself holds some
    llm = LLM(resolve(model), enforce_eager=eager, seed=0, limit_mm_per_prompt={"image": 1}, **memory)
    processor = load_processor(model)
    text = chat_text(processor, DESCRIBE).removeprefix(getattr(processor.tokenizer, "bos_token", None) or "")
    images = [sample.image() for sample in SAMPLES.values()]
    prompts = [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]

    def run(count: int, **options: Any) -> list[Any]:
        parameters = SamplingParams(max_tokens=32, detokenize=False, **options)
        chosen = [prompts[number % len(prompts)] for number in range(count)]
        return [output.outputs[0] for output in llm.generate(chosen, parameters, use_tqdm=False)]

    start = time.perf_counter()
    result: dict[str, Any] = {"plain": tokens(run(8, temperature=0.0))}
    if layers is not None:
        refined = {"revisit": {"layers": layers}}
        result["refined"] = tokens(run(8, temperature=0.0, extra_args=refined))
        sampled = run(96, temperature=1.0, top_p=TOP_P, logprobs=20, extra_args=refined)
        result["outside_top_p"] = sum(map(tokens_outside, sampled))
    count = sum(map(len, result["plain"] + result.get("refined", [])))
    return {**result, "tokens_per_second": count / (time.perf_counter() - start)}


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
