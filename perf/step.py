"""Compare the processor time of ReVisiT's step, with and without cached columns, with that of a greedy step, in one thread.

This works on machines that are too busy for wall-clock times; `perf/decode.py` times whole decoding runs. The greedy step and the
prefill are those of a text model of the stated shape with random weights. ReVisiT's step runs on random vision states, that
model's head and the stated profiles; its first step must equal the reference's.

    python perf/step.py [--steps 60] [--once]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from random_models import Profile
from revisit.models.head import LinearHead
from revisit.step import reference
from revisit.step.batched import BatchedStep
from revisit.step.cached import CachedStep
from revisit.step.interface import RowStates, Step, StepInput
from revisit.step.rule import Rule

SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
VISION, TEXT = 346, 32
LAYERS = {"last": 1, "all": 12}


def implementations(head: LinearHead, rule: Rule) -> dict[str, Step]:
    """Return the implementations of the step on a CPU by name."""
    return {"cached": CachedStep(head, rule), "batched": BatchedStep(head, rule)}


def check(
    step: Step, states: Tensor, head: LinearHead, rule: Rule, logits: Tensor, written: Tensor | None = None
) -> None:
    """Raise unless a step equals the reference's."""
    earlier = None if written is None else written[0]
    expected = reference.scatter(reference.refine_row(logits, states, head, rule, written=earlier), logits)
    got = step.take(StepInput(logits[None], RowStates.of_items([states]), written=written)).scores[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def busy(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, float]:
    """Return the result of a call and its processor time in milliseconds."""
    started = time.process_time()
    result = function(*arguments, **named)
    return result, 1e3 * (time.process_time() - started)


def fast_model() -> Qwen2ForCausalLM:
    """Build a text model whose random weights are drawn quickly."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.uniform_(-0.1, 0.1)
    for buffer in model.buffers():
        buffer.uniform_(0, 1)
    return model


def greedy(model: Qwen2ForCausalLM, steps: int) -> tuple[float, float]:
    """Return the milliseconds of the prefill and of the median step of greedy decoding."""
    ids = torch.randint(0, 1000, (1, VISION + TEXT))
    output, prefill = busy(model, input_ids=ids, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        output, took = busy(model, input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        times.append(took)
    return prefill, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--once", action="store_true", help="the setting once=1, with 200 tokens written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = fast_model()
    head, rule = LinearHead(model.lm_head.weight), Rule(once=float(arguments.once))
    prefill, greedy_step = greedy(model, 6)
    print(
        f"greedy: prefill of {VISION + TEXT} tokens {prefill:.0f} ms, step {greedy_step:.1f} ms (processor time, 1 thread)"
    )
    for name, profile in {
        "median 64": Profile(64, steps=arguments.steps, largest=2000),
        "64 each": Profile(64, 0.0, steps=arguments.steps),
        "512 each": Profile(512, 0.0, steps=arguments.steps),
    }.items():
        print(f"{name}: {profile.describe()}")
        table = profile.logits(len(head.weight))
        written = torch.cat([table[0].topk(10).indices, torch.arange(190)])[None]
        for layers, count in LAYERS.items():
            states = torch.randn(count * VISION, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
            for way, step in implementations(head, rule).items():
                check(step, states, head, rule, table[0], written)
                rows = RowStates.of_items([states])
                times = [busy(step.take, StepInput(logits[None], rows, written=written))[1] for logits in table]
                mean, middle = statistics.fmean(times[1:]), statistics.median(times[1:])
                print(
                    f"  {layers:4s} {way:7s} mean {mean:6.2f} ms a step = {1 + mean / greedy_step:.4f}×, median {middle:6.2f} ms = "
                    f"{1 + middle / greedy_step:.4f}×; first step {times[0]:.1f} ms = {times[0] / prefill:.4f} of the prefill",
                    flush=True,
                )


if __name__ == "__main__":
    main()
