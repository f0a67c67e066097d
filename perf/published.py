"""Compare with the cached algorithm, which keeps vision tokens × whole vocabulary and sorts the vocabulary at every step.

The cached algorithm is implemented here from its published description. Both decode the same prompt with the same random model
and profile, in turns. Before anything is timed, their tokens must be identical, and their largest scores equal up to rounding.

    python perf/published.py                         # 0.5 B text model, 346 vision tokens; about 10 minutes on 2 cores
    python perf/published.py --shape qwen2.5-vl-toy --tokens 20
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor

import revisit
import timing
from random_models import Profile, random_inputs, random_model
from revisit import ReVisiT
from revisit.eval.report.document import Section
from revisit.eval.report.terminal import print_section
from revisit.models.families import resolve_layers


class Published(ReVisiT):
    """Decode with a cache of all vision rows over the whole vocabulary."""

    def begin(self, prompt: Any, passes: Any) -> Any:
        layers = resolve_layers(self.layers, prompt.parts.depth, prompt.parts.tied)
        capture = passes.capture(layers)
        cache: Tensor | None = None

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal cache
            if cache is None:
                head, (item,) = capture.head(passes.raw).module, capture.items
                cache = torch.stack([head(item.by_layer[layer]) for layer in layers]).flatten(0, 1)  # (|J|·N, V)
            logp = logits.float().log_softmax(-1)  # (1, V)
            ordered = torch.sort(logp, descending=True).values
            threshold = torch.minimum(ordered[:, 0], logp.amax(-1) + math.log(self.alpha))
            filtered = logp.masked_fill(logp < threshold[:, None], -math.inf)
            keep = filtered[0] > -1000
            log_p = filtered[:, keep].log_softmax(-1)  # (1, k)
            p = filtered[:, keep].softmax(-1)
            vision = cache[:, keep]  # (rows, k)
            log_q, q = vision.log_softmax(-1), vision.softmax(-1)
            mixed = 0.5 * (p + q)
            first = torch.nn.functional.kl_div(log_p.expand_as(mixed), mixed, reduction="none").mean(-1)
            second = torch.nn.functional.kl_div(log_q, mixed, reduction="none").mean(-1)
            row = int((0.5 * (first + second)).argmin().item())
            scores = torch.full_like(logits, -math.inf)
            scores[:, keep] = log_p + log_q[row]
            return scores

        return refine


def same(model: Any, inputs: Any, profile: Profile, layers: str, tokens: int) -> None:
    """Raise unless both give the same tokens and the same best scores."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    kept = []
    for method in (Published(layers=layers), ReVisiT.official(layers=layers)):
        timed = timing.Timed(inner=method, script=profile.at)
        out = revisit.generate(
            model, **inputs, method=timed, output_scores=True, return_dict_in_generate=True, **options
        )
        kept.append((out.sequences, torch.stack(out.scores)[:, 0].topk(3).values))
    assert torch.equal(kept[0][0], kept[1][0]), f"layers={layers}: tokens differ"
    finite = kept[0][1].isfinite()
    torch.testing.assert_close(kept[0][1][finite], kept[1][1][finite], atol=2e-3, rtol=1e-3)
    print(f"layers={layers}: {tokens} tokens and their best scores identical", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-vl-0.5b")
    parser.add_argument("--vision-tokens", type=int, default=346)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--checked", type=int, default=20, help="tokens that must be identical first")
    parser.add_argument("--median", type=int, default=64)
    arguments = parser.parse_args()
    model = random_model(arguments.shape)
    inputs = random_inputs(model, arguments.vision_tokens)
    profile = Profile(median=arguments.median, steps=max(arguments.tokens, 40), largest=2000)
    print(f"{arguments.shape}, {arguments.vision_tokens} vision tokens, {torch.get_num_threads()} threads")
    print(profile.describe())
    for layers in ("last", "all"):
        same(model, inputs, profile, layers, min(arguments.tokens, arguments.checked))
        methods = {
            "greedy": revisit.methods.get("greedy"),
            f"cached algorithm, {layers}": Published(layers=layers),
            f"official, {layers}": ReVisiT.official(layers=layers),
            f"revisit, {layers}": ReVisiT(layers=layers),
        }
        timings = timing.measure(
            model,
            inputs,
            {name: (method, profile.at) for name, method in methods.items()},
            new_tokens=arguments.tokens,
            repeats=arguments.repeats,
            warmups=arguments.warmups,
        )
        rows = timing.table(timings)
        print_section(Section(f"Layers: {layers}", [timing.bench_table(rows, "Ratios are to greedy.")]))
        peer = rows[1]
        for row in rows[2:]:
            memory = peer["extra_memory_mib"] / max(row["extra_memory_mib"], 1)  # a process's size cannot be read finer
            first = peer["own_first_ms"] / row["own_first_ms"]
            print(
                f"{row['method']}: {memory:.0f}× less extra memory, {first:.1f}× less extra time to the first token, "
                f"own time per step {row['own_ms_per_step'] / peer['own_ms_per_step']:.3f}× the cached algorithm's",
                flush=True,
            )


if __name__ == "__main__":
    main()
