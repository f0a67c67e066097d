"""What `revisit.check` costs: texts per second against a plain batched forward pass over the same pictures and tokens.

Both read the same pictures, tokenize and run in batches of the same size. The plain pass is `model(**inputs)` as transformers runs it, with
logits of every position; a second row leaves those out (`logits_to_keep=1`), which no reading of the text could do. They take turns
in one process, and processor time is compared, so that other work on the machine matters little.

    python perf/check.py [--model tiny] [--texts 1000] [--batch 8] [--turns 3]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from statistics import median

import torch

import revisit
from revisit.embedded.scenes import render, scene
from revisit.explain.check import check_many
from revisit.explain.support import encode_text
from revisit.models import DESCRIBE
from revisit.models.prompts import chat_text, prepare
from revisit.taps.forcing import forced_inputs


def main() -> None:
    """Time both in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    model, processor = revisit.load(options.model)
    scenes = [scene("unusual", 77, number) for number in range(options.texts)]
    pictures = [render(shown) for shown in scenes]
    texts = [
        f"The image shows a {', a '.join(shown.nouns[:4])}. There is also a zebra in the background near the table."
        for shown in scenes
    ]
    starts = range(0, options.texts, options.batch)

    @torch.no_grad()
    def plain(**more: int) -> None:
        for start in starts:
            own, part = pictures[start : start + options.batch], texts[start : start + options.batch]
            inputs = prepare(processor, [DESCRIBE] * len(own), [[picture] for picture in own], model.device)
            tokens = [encode_text(processor, chat_text(processor, DESCRIBE), text)[0] for text in part]
            model(**forced_inputs(dict(inputs), tokens), use_cache=False, **more)

    def check() -> None:
        check_many((model, processor), pictures, texts, batch_size=options.batch)

    rows: dict[str, Callable[[], None]] = {
        "check": check,
        "plain forward": plain,
        "plain forward, no logits": lambda: plain(logits_to_keep=1),
    }
    turns = []
    for turn in range(options.turns + 1):  # the first warms up
        times = {}
        for name, run in rows.items():
            began = time.process_time()
            run()
            times[name] = time.process_time() - began
        turns += [times] if turn else []
    print(
        f"{options.model}, {options.texts} texts in batches of {options.batch}, torch {torch.__version__}, {platform.machine()}"
    )
    print(f"{torch.get_num_threads()} threads, processor time, {options.turns} turns\n")
    print("| | texts a second | time of check / time of this | per turn |\n| --- | ---: | ---: | --- |")
    for name in rows:
        ratios = [times["check"] / times[name] for times in turns]
        rate = options.texts / median(times[name] for times in turns)
        print(f"| {name} | {rate:.1f} | {median(ratios):.3f} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
