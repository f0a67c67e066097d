"""Count the forward passes that speculative decoding saves on captions of generated scenes; the tokens are the same.

Each scene gets three captions: plain, with prompt lookup, and with drafts by the model's first layers. Only forward passes of the
whole model are counted; a draft by early layers costs the corresponding share of a forward pass in addition.

    python perf/speculation.py [--model tiny] [--scenes 50] [--tokens 128]
"""

from __future__ import annotations

import argparse
from typing import Any

import revisit
from revisit.embedded.scenes import render, scene
from revisit.models import DESCRIBE

MODES: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
    "early exit": {"assistant_early_exit": 2},
}


def main() -> None:
    """Decode every scene in every mode, and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--scenes", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    model, processor = revisit.load(options.model)
    tokens = 0
    counts = {name: [0, 0] for name in MODES}  # drafted, accepted
    for number in range(options.scenes):
        inputs = revisit.prepare(processor, [DESCRIBE], [[render(scene("unusual", 77, number))]], device=model.device)
        kwargs = {"max_new_tokens": options.tokens, "do_sample": False}
        plain = revisit.generate(model, **inputs, **kwargs)
        tokens += plain.shape[1] - inputs["input_ids"].shape[1]
        for name, mode in MODES.items():
            trace = revisit.Trace()
            output = revisit.generate(model, **inputs, trace=trace, **kwargs, **mode)
            assert output.tolist() == plain.tolist(), f"{name}: other tokens for scene {number}"
            counts[name][0] += trace.drafted
            counts[name][1] += trace.accepted
    print(f"{options.model}: {options.scenes} captions, {tokens} tokens, as many forwards")
    for name, (drafted, accepted) in counts.items():
        saved = accepted / tokens
        print(
            f"{name}: {tokens - accepted} forwards ({saved:.0%} saved), {accepted} of {drafted} drafted tokens accepted"
        )


if __name__ == "__main__":
    main()
