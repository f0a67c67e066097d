"""Measure the time per token of every method and of greedy decoding, in one interleaved run on a random model of a real shape.

A contrastive method runs two rows per sequence, so it is compared with greedy decoding at twice the batch size: its step may
take at most 1.05 times as long, and never longer than its sequential mode. DoLa may take at most 1.15 times as long as greedy
decoding. The prompt is reported separately. Before timing, both modes of every contrastive method must give the same tokens. Each
is timed in its default mode ("auto") and in the mode that "auto" did not choose.

    python perf/methods.py                                   # 0.5 B text model; about 20 minutes on 2 idle cores
    python perf/methods.py --shape qwen2.5-vl-toy --tokens 6 --rounds 1     # a look at the script
    python perf/methods.py --method vcd --method dola --check               # exit status 1 beyond a limit
    python perf/methods.py --method vcd --method m3id --rows 4 --tokens 8   # a batch, whose branches are stacked
"""

from __future__ import annotations

import argparse
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import torch

import revisit
from random_models import random_inputs, random_model
from revisit import (
    CODE,
    FLB,
    ICD,
    M3ID,
    ONLY,
    PAI,
    RITUAL,
    SID,
    VAF,
    VCD,
    VISTA,
    AvisC,
    Chain,
    DeCo,
    DoLa,
    MemVR,
    MiddleLayers,
    PlausibleOnly,
    ReVisiT,
)
from revisit.decoding.method import Method
from timing import Timing, time_call

GREEDY, DOUBLE = "greedy", "greedy, twice the batch"
STACKED_LIMIT, DOLA_LIMIT = 1.05, 1.15

WORDS = list(range(30, 40))
CONTRASTIVE: dict[str, Method] = {
    "vcd": VCD(),
    "m3id": M3ID(),
    "code": CODE(description_tokens=8),
    "sid": SID(),
    "icd": ICD(),
    "pai": PAI(),
    "pai (guidance)": PAI.guidance(),
    "ritual": RITUAL(transform="flip"),
    "avisc": AvisC(),
}
OTHERS: dict[str, Method] = {
    "plausible_only": PlausibleOnly(),
    "dola (low)": DoLa(layers="low"),
    "dola (high)": DoLa(layers="high"),
    "dola (one layer)": DoLa(layers=(2,)),
    "deco": DeCo(),
    "flb": FLB(),
    "middle layers": MiddleLayers(),
    "vaf": VAF(),
    "vista": VISTA(),
    "memvr": MemVR(),
    "only": ONLY(),
    "vcd, then revisit": Chain([VCD(), ReVisiT()]),
}


def words_processor(image_token: int) -> Any:
    """Stand in for the processor of a model that has none: ten tokens for any words."""

    class Tokenizer:
        bos_token = bos_token_id = unk_token_id = None

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [*WORDS, image_token, *WORDS] if "<image>" in text else WORDS}

        def encode(self, text: str, **_: object) -> list[int]:
            return []

        def convert_tokens_to_ids(self, token: str) -> int | None:
            return image_token if token == "<image>" else None

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    images = SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return SimpleNamespace(tokenizer=Tokenizer(), image_processor=images)


def with_mode(method: Method, mode: str) -> Method:
    return method.replace(mode=mode)


def same_tokens(model: Any, inputs: Any, label: str, method: Method, tokens: int) -> None:
    """Raise unless both modes give the same tokens."""
    made = [
        revisit.generate(model, **inputs, method=m, max_new_tokens=tokens, do_sample=False)
        for m in (with_mode(method, "stacked"), with_mode(method, "sequential"))
    ]
    if not torch.equal(*made):
        sys.exit(f"{label}: the stacked branches give other tokens than the sequential ones; nothing was measured.")


def plans(names: list[str] | None, single: Any, double: Any, other: str) -> dict[str, tuple[Method, Any]]:
    """Return what to run, in the order of one round."""
    plain = revisit.methods.get("greedy")
    chosen: dict[str, tuple[Method, Any]] = {GREEDY: (plain, single), DOUBLE: (plain, double)}
    for label, method in {**CONTRASTIVE, **OTHERS}.items():
        if names is None or method.name in names:
            chosen[label] = (method, single)
            if label in CONTRASTIVE:
                chosen[f"{label}, {other}"] = (with_mode(method, other), single)
    return chosen


def main() -> None:
    """Check equality, time all methods in turns and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-vl-0.5b")
    parser.add_argument("--vision-tokens", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rows", type=int, default=1, help="sequences decoded at once")
    parser.add_argument("--rounds", type=int, default=3)
    names = sorted({method.name for method in (*CONTRASTIVE.values(), *OTHERS.values())})
    parser.add_argument("--method", action="append", choices=names, help="only these methods")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is exceeded")
    options = parser.parse_args()
    model = random_model(options.shape)
    processor = words_processor(model.config.image_token_id)
    single, double = (
        {**random_inputs(model, options.vision_tokens, batch=n * options.rows), "processor": processor} for n in (1, 2)
    )
    chosen = plans(options.method, single, double, "stacked" if options.rows == 1 else "sequential")
    for label in chosen.keys() & CONTRASTIVE.keys():
        same_tokens(model, single, label, CONTRASTIVE[label], 4)
    timings = {label: Timing(label) for label in chosen}
    length, warm_up = (
        {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False} for count in (options.tokens, 3)
    )
    for turn in range(-1, options.rounds):  # the first turn warms up
        for label, (method, inputs) in chosen.items():
            timing = Timing(label) if turn < 0 else timings[label]
            time_call(model, inputs, method, timing, **(warm_up if turn < 0 else length))
    beyond = report(options, timings)
    if options.check and beyond:
        sys.exit(f"beyond the limit: {', '.join(beyond)}")


def report(options: argparse.Namespace, timings: dict[str, Timing]) -> list[str]:
    """Print the table and return the methods that exceed their limit."""
    greedy, double = timings[GREEDY], timings[DOUBLE]
    first = statistics.median(greedy.first)
    threads = torch.get_num_threads()
    print(f"{options.shape}, {options.vision_tokens} vision tokens, {options.rows} rows, {threads} threads")
    print(f"{'method':28} {'prompt ms':>10} {'× greedy':>9} {'ms/step':>9} {'× greedy':>9} {'× twice':>9}  limit")
    beyond = []
    for label, timing in timings.items():
        ratio, twice = timing.quick / greedy.quick, timing.quick / double.quick
        verdict = ""
        if label in CONTRASTIVE:
            in_turns = timings.get(f"{label}, sequential", timing).quick  # one row on a CPU is sequential by default
            verdict = verdict_of(twice <= STACKED_LIMIT and timing.quick <= in_turns, f"{STACKED_LIMIT} × twice")
        elif label.startswith("dola"):
            verdict = verdict_of(ratio <= DOLA_LIMIT, f"{DOLA_LIMIT} × greedy")
        beyond += [label] if verdict.startswith("beyond") else []
        prompt = statistics.median(timing.first)
        print(
            f"{label:28} {1e3 * prompt:10.0f} {prompt / first:9.2f} {1e3 * timing.quick:9.1f} {ratio:9.3f} {twice:9.3f}  {verdict}"
        )
    return beyond


def verdict_of(met: bool, limit: str) -> str:
    return f"{'within' if met else 'beyond'} {limit}"


if __name__ == "__main__":
    main()
