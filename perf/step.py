"""The engine's own time per step over the time of a greedy step, in processor time of one thread.

For machines that are too busy for a wall clock: `perf/decode.py` times whole decodes. A text model of the stated shape
with random weights gives the greedy step and the prefill; the engine runs on random vision states and that model's own
head, on stated profiles, after its first steps were found equal to the reference. With --peer, the cached algorithm
(vision tokens × whole vocabulary) does the same steps and must choose the same tokens.

    python perf/step.py [--steps 60] [--peer last --peer all]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from revisit.evaluation.latency import Profile
from revisit.step.engine import Engine, Peaks, Rule

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


class Rows:
    """Random vision rows under a head."""

    def __init__(self, rows: int, head: Tensor, seed: int = 0) -> None:
        self.head = head
        self.states = torch.randn(rows, head.shape[1], generator=torch.Generator().manual_seed(seed))

    @property
    def rows(self) -> int:
        return len(self.states)

    def logits(self, start: int, stop: int, ids: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.states[start:stop], self.head[ids])

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.states[rows], self.head[ids])

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.states, self.head


def busy(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, float]:
    """What a call gives, and its processor time in milliseconds."""
    started = time.process_time()
    result = function(*arguments, **named)
    return result, 1e3 * (time.process_time() - started)


def fast_model() -> Qwen2ForCausalLM:
    """Random weights, drawn quickly."""
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
    """(prefill, step) of plain greedy decoding, in milliseconds; the step is the median."""
    ids = torch.randint(0, 1000, (1, VISION + TEXT))
    output, prefill = busy(model, input_ids=ids, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        output, took = busy(model, input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        times.append(took)
    return prefill, statistics.median(times)


def cached(states: Tensor, head: Tensor) -> Tensor:
    """All vision rows over the whole vocabulary, as the published algorithm keeps them."""
    return torch.stack([torch.nn.functional.linear(part, head) for part in states.split(VISION)]).flatten(0, 1)


def cached_step(logits: Tensor, cache: Tensor, alpha: float) -> int:
    """One step of the published algorithm; the token it would choose."""
    logp = logits.log_softmax(-1)
    threshold = torch.minimum(torch.sort(logp, descending=True).values[0], logp.max() + math.log(alpha))
    filtered = logp.masked_fill(logp < threshold, -math.inf)
    keep = filtered > -1000
    log_p, p = filtered[keep].log_softmax(-1), filtered[keep].softmax(-1)
    vision = cache[:, keep]
    log_q, q = vision.log_softmax(-1), vision.softmax(-1)
    mixed = 0.5 * (p + q)
    kl = torch.nn.functional.kl_div
    first = kl(log_p.expand_as(mixed), mixed, reduction="none").mean(-1)
    second = kl(log_q, mixed, reduction="none").mean(-1)
    row = int((0.5 * (first + second)).argmin().item())
    scores = torch.full_like(logits, -math.inf)
    scores[keep] = log_p + log_q[row]
    return int(scores.argmax())


def own(vision: Rows, rule: Rule, table: Tensor) -> tuple[Engine, list[float], list[int]]:
    """The engine over all steps of a profile: it, its milliseconds and its tokens. The first steps equal the reference."""
    engine, times, tokens = Engine(vision, rule), [], []
    for number, logits in enumerate(table):
        result, took = busy(lambda x=logits: engine.refine(Peaks(x[None])))
        times.append(took)
        tokens.append(int(result.ids[result.final.argmax()]))
        if number < 2:
            expected = rule.reference(logits, vision)
            assert expected.row == result.row
            torch.testing.assert_close(expected.final, result.final, atol=1e-3, rtol=1e-3)
    return engine, times, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--peer", action="append", choices=list(LAYERS), default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = fast_model()
    head: Tensor = model.lm_head.weight
    prefill, step = greedy(model, 6)
    print(f"greedy: prefill of {VISION + TEXT} tokens {prefill:.0f} ms, step {step:.1f} ms (processor time, 1 thread)")
    profiles = {
        "median 64": Profile(64, steps=arguments.steps, largest=2000),
        "64 each": Profile(64, 0.0, steps=arguments.steps),
        "512 each": Profile(512, 0.0, steps=arguments.steps),
    }
    for name, profile in profiles.items():
        print(f"{name}: {profile.describe()}")
        table = profile.logits(head.shape[0])
        for layers, count in LAYERS.items():
            engine, times, _ = own(Rows(count * VISION, head), Rule(1e-5), table)
            mean, middle = statistics.fmean(times[1:]), statistics.median(times[1:])
            print(
                f"  {layers:4s} mean {mean:6.2f} ms a step = {1 + mean / step:.4f}×, median {middle:6.2f} ms = "
                f"{1 + middle / step:.4f}×; first step {times[0]:.1f} ms = {times[0] / prefill:.4f} of the prefill; "
                f"columns reused {1 - engine.projected / engine.asked:.1%}",
                flush=True,
            )
    official = Rule(1e-5, divergence="official", normalize=False, model_dtype=True)
    table = profiles["median 64"].logits(head.shape[0])[:12]
    for layers in arguments.peer:
        vision = Rows(LAYERS[layers] * VISION, head)
        _, times, tokens = own(vision, official, table)
        engine, quick, _ = own(vision, Rule(1e-5), table)
        cache, built = busy(cached, vision.states, head)
        theirs = [busy(cached_step, logits, cache, 1e-5) for logits in table]
        assert [token for token, _ in theirs] == tokens, "tokens differ from the cached algorithm's"
        parts: list[Any] = [vision, engine.columns, engine.columns.books, *engine.scratch.room.areas]
        if engine.stepper is not None:
            parts += [engine.stepper, engine.stepper.books, engine.stepper.shorts]
        tensors = {
            x.data_ptr(): x for part in parts for x in vars(part).values() if isinstance(x, Tensor) and x is not head
        }
        kept = sum(x.nbytes for x in (*tensors.values(), *engine.scratch.buffers))
        peer_step = statistics.fmean(took for _, took in theirs)
        print(
            f"cached algorithm, {layers}: {len(tokens)} tokens identical; it keeps {cache.nbytes / 2**20:.0f} MiB, we at most "
            f"{kept / 2**20:.1f} ({cache.nbytes / kept:.0f}× less); before the first token {built + theirs[0][1]:.0f} ms, we "
            f"{times[0]:.1f} official / {quick[0]:.1f} ({(built + theirs[0][1]) / times[0]:.0f}× less); per step {peer_step:.1f} ms, "
            f"we {statistics.fmean(times[1:]):.1f} official / {statistics.fmean(quick[1:]):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
