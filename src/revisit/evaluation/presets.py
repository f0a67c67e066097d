"""`--preset paper`: how the ReVisiT paper evaluates, as far as it says so.

The preset gives options of benchmarks, the longest answer and the number of items where nothing else is said, and methods
as published instead of as a model recommends. docs/reproduce.md lists what the paper leaves open.
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
