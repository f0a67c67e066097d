"""Measure the time that ReVisiT adds to greedy decoding, in one interleaved run.

Before timing, the fast step must give the reference's tokens on the same model and profile.

    python perf/decode.py                       # 0.5 B text model, 200 tokens; about 25 minutes on 2 idle cores
    python perf/decode.py --part batch --part beams --tokens 20
    python perf/decode.py --part floor          # `photo` with and without a floor, in processor time
    python perf/decode.py --shape qwen2.5-vl-toy --tokens 20 --repeats 1
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any
from unittest import mock

import torch

import revisit
import timing
from random_models import Profile, random_inputs, random_model
from revisit import ReVisiT
from revisit.embedded.samples import sample
from revisit.eval.report.document import Section
from revisit.eval.report.terminal import print_section
from revisit.methods import as_method
from revisit.methods import revisit as revisit_method
from revisit.step.reference import ReferenceStep

GREEDY = revisit.methods.get("greedy")


def reference_step(head: Any, rule: Any, *_: object, **__: object) -> ReferenceStep:
    """Choose the reference, whatever the settings."""
    return ReferenceStep(head, rule)


def same(model: Any, inputs: Any, profile: Profile, name: str, method: ReVisiT, tokens: int, **options: Any) -> None:
    """Check that the fast step gives the reference's tokens."""
    kept = []
    for choose in (reference_step, revisit_method.choose):
        with mock.patch.object(revisit_method, "choose", choose):
            timed = timing.Timed(inner=method, script=profile.at)
            kept.append(
                revisit.generate(model, **inputs, method=timed, do_sample=False, max_new_tokens=tokens, **options)
            )
    assert torch.equal(*kept), f"{name}: tokens differ from the reference"
    print(f"{name}: {tokens} tokens equal to the reference", flush=True)


def prefill(model: Any, inputs: Any, profile: Profile, repeats: int = 9) -> None:
    """Time calls for a single token in turns; the first of each warms up."""
    methods = {"greedy": GREEDY, "last": ReVisiT(layers="last"), "all": ReVisiT(layers="all")}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            started = time.perf_counter()
            revisit.generate(
                model,
                **inputs,
                method=timing.Timed(inner=method, script=profile.at),
                do_sample=False,
                max_new_tokens=1,
            )
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"one token, {name}: {1e3 * median:.0f} ms = {median / medians['greedy']:.3f}×", flush=True)


def floor(tokens: int, repeats: int) -> None:
    """Time methods with and without a floor in turns: the first token, and each of the others."""
    model, processor = revisit.load("photo")
    inputs = revisit.prepare(processor, "Describe the image.", sample().image())
    times: dict[tuple[str, int, float], list[float]] = {}
    for _ in range(repeats + 1):
        for name, new, value in itertools.product(("greedy", "revisit"), (1, tokens), (0.0, 0.1)):
            method = as_method(name, model, floor=value)
            started = time.process_time()
            revisit.generate(model, **inputs, method=method, do_sample=False, max_new_tokens=new, min_new_tokens=new)
            times.setdefault((name, new, value), []).append(time.process_time() - started)
    best = {key: min(taken[1:]) for key, taken in times.items()}
    for name in ("greedy", "revisit"):
        first = [best[name, 1, value] for value in (0.0, 0.1)]
        other = [(best[name, tokens, value] - best[name, 1, value]) / (tokens - 1) for value in (0.0, 0.1)]
        for what, (without, held) in (("first token", first), ("per token", other)):
            print(f"{name}, {what}: {1e3 * held:.1f} ms = {held / without:.3f}×", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-vl-0.5b")
    parser.add_argument("--vision-tokens", type=int, default=346)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--checked", type=int, default=12, help="tokens compared with the reference first")
    parser.add_argument(
        "--part", action="append", choices=["single", "prefill", "batch", "beams", "floor"], default=None
    )
    arguments = parser.parse_args()
    tokens, parts = arguments.tokens, arguments.part or ["single", "prefill", "batch", "beams"]
    if "floor" in parts:
        floor(min(tokens, 60), 8)
    if parts == ["floor"]:
        return
    model = random_model(arguments.shape)
    largest = model.config.get_text_config().vocab_size // 20
    usual = Profile(median=64, steps=tokens, largest=largest)
    even, wide = (Profile(median=min(size, largest), spread=0, steps=tokens) for size in (64, 512))
    print(f"{arguments.shape}, {arguments.vision_tokens} vision tokens, {torch.get_num_threads()} threads")
    print(f"usual: {usual.describe()}\nwide: {wide.describe()}", flush=True)

    def run(batch: int, plans: dict[str, Any], new: int, **options: Any) -> None:
        inputs = random_inputs(model, arguments.vision_tokens, batch=batch)
        for name, (method, _) in plans.items():
            if isinstance(method, ReVisiT) and "each" not in name:
                same(model, inputs, usual, name, method, min(new, arguments.checked), **options)
        rows = timing.table(
            timing.measure(
                model,
                inputs,
                plans,
                new_tokens=new,
                repeats=arguments.repeats,
                warmups=arguments.warmups,
                **options,
            )
        )
        title = f"Batch {batch}, {options or 'greedy search'}, {new} tokens"
        print_section(Section(title, [timing.bench_table(rows, "Ratios are to greedy.")]))

    last, every = ReVisiT(layers="last"), ReVisiT(layers="all")
    adaptive = ReVisiT(layers="last", weight="agreement", neighbors=8)
    both = {"greedy": (GREEDY, usual.at), "last": (last, usual.at), "all": (every, usual.at)}
    if "single" in parts:
        more = {
            "last, adaptive": (adaptive, usual.at),
            "last, once": (ReVisiT(layers="last", once=1.0), usual.at),
            "all, 64 each": (every, even.at),
            "all, 512 each": (every, wide.at),
        }
        run(1, {**both, **more}, tokens)
    if "prefill" in parts:
        prefill(model, random_inputs(model, arguments.vision_tokens), usual)
    if "batch" in parts:
        for batch in (1, 8):
            run(batch, both, tokens)
    if "beams" in parts:
        run(1, both, max(4, tokens // 5), num_beams=4)


if __name__ == "__main__":
    main()
