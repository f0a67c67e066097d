"""`--preset paper`: how the ReVisiT paper evaluates, as far as it says so.

The preset gives options of benchmarks, the longest answer and the number of items where nothing else is said, and methods
as published instead of as a model recommends. What the paper leaves open is listed in `OPEN`.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_NEW_TOKENS = 512
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "chair": {"ids": "auto"},  # the committed list seed42-500 where its pictures are there
    "hallusionbench": {"part": "VD"},
    "pope": {"suffix": "none"},
    "vqav2": {"suffix": "none"},
    "mmmu": {"keep": "single-image"},
}
ITEMS: Mapping[str, int] = {"vqav2": 500}  # the first items that are asked
OPEN = (
    "CHAIR: the paper's 500 images come from a shuffled directory listing and cannot be known; ours are the sorted file names shuffled "
    "with seed 42 (chair.ids=seed42-500), and OPERA's two lists can be chosen by name.",
    "VQAv2: its accuracies are multiples of 1/1500, so 500 questions; which ones is not said. Ours are the first 500.",
    "POPE: the prompt is the question alone; its parser is not said. Ours is the official one.",
    "HallusionBench: its judge is a GPT model. Without hallusionbench.judge=model and a judge_url answers are judged by rule.",
    "Baselines have their released defaults, which differ by program; ours are official(), one setting for all benchmarks (VCD beta 0.2, "
    "SID 100 of 576 tokens, DoLa low layers without a repetition penalty, M3ID as in RITUAL's code).",
    "ReVisiT's threshold is chosen per task; only CHAIR's (1e-5) and VQAv2's (its ablation table) are known.",
)
