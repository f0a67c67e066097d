"""Words for objects, as CHAIR lists them."""

from __future__ import annotations

import re
from functools import cache

from revisit.benchmarks.chair_words import WORDS


@cache
def object_words() -> re.Pattern[str]:
    """CHAIR's words with an optional plural ending, the longest first."""
    words = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
    return re.compile(rf"\b({words})(?:e?s)?\b", re.IGNORECASE)
