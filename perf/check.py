"""Compare `revisit.check` with a plain batched forward pass over the same images and tokens, in texts per second.

Both open the images, tokenize, and run in batches of the same size. The plain pass is `model(**inputs)` with the logits of every
position; a second row omits those (`logits_to_keep=1`), although scoring the text would need them. They take turns at every batch, and
the best processor time of each is summed, which limits the influence of other processes.

    python perf/check.py [--model tiny] [--texts 1000] [--batch 8] [--turns 3]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import torch

import revisit
from revisit.embedded.scenes import render, scene
from revisit.explain.check import check_many
from revisit.explain.support import encode_text
from revisit.forward.states import forced_inputs
from revisit.models import DESCRIBE
from revisit.models.prompts import chat_text, prepare


def main() -> None:
    """Time all rows in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    model, processor = revisit.load(options.model)
    scenes = [scene("unusual", 77, number) for number in range(options.texts)]
    images = [render(shown) for shown in scenes]
    texts = [
        f"The image shows a {', a '.join(shown.nouns[:4])}. There is also a zebra in the background near the table."
        for shown in scenes
    ]

    @torch.no_grad()
    def plain(part: slice, **more: int) -> None:
        own = images[part]
        inputs = prepare(processor, [DESCRIBE] * len(own), [[image] for image in own], device=model.device)
        tokens = [encode_text(processor, chat_text(processor, DESCRIBE), text)[0] for text in texts[part]]
        model(**forced_inputs(dict(inputs), tokens), use_cache=False, **more)

    rows: dict[str, Callable[[slice], object]] = {
        "check": lambda part: list(check_many((model, processor), images[part], texts[part], batch_size=options.batch)),
        "plain forward": plain,
        "plain forward, no logits": lambda part: plain(part, logits_to_keep=1),
    }
    times = dict.fromkeys(rows, 0.0)
    for start in range(0, options.texts, options.batch):
        found: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(options.turns):
            for name, run in rows.items():
                began = time.process_time()
                run(slice(start, start + options.batch))
                found[name].append(time.process_time() - began)
        for name, each in found.items():
            times[name] += min(each)
    print(
        f"{options.model}, {options.texts} texts in batches of {options.batch}, torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, processor time, best of {options.turns} turns\n"
    )
    print("| | texts a second | time of check / time of this |\n| --- | ---: | ---: |")
    for name, took in times.items():
        print(f"| {name} | {options.texts / took:.1f} | {times['check'] / took:.3f} |")


if __name__ == "__main__":
    main()
