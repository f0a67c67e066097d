"""`--preset paper`: how the ReVisiT paper evaluates, as far as it says so.

The preset sets defaults for benchmark options, the length of answers and the number of items, and uses the published settings of
methods instead of those recommended for a model. docs/reproduce.md lists what the paper leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_NEW_TOKENS = 512
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "chair": {"ids": "auto"},  # the list seed42-500 if the annotations contain it
    "hallusionbench": {"part": "VD"},
    "pope": {"suffix": "none"},
    "vqav2": {"suffix": "none"},
    "mmmu": {"keep": "single-image"},
}
ITEMS: Mapping[str, int] = {"vqav2": 500}  # only the first items are asked
