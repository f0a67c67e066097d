"""Seeded random choices that are the same on every machine and Python version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Dice:
    """Random choices from SplitMix64, seeded by a key such as `"usual/7/12"`."""

    def __init__(self, key: str) -> None:
        self._state = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")

    def bits(self) -> int:
        """Return the next 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """Return an integer in 0..n-1."""
        return (self.bits() * n) >> 64

    def chance(self, p: float) -> bool:
        """Return True with probability p."""
        return self.bits() < p * (1 << 64)

    def pick(self, items: Sequence[T]) -> T:
        """Choose an item uniformly."""
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[T], weights: Sequence[int]) -> T:
        """Choose an item with probability proportional to its integer weight."""
        point = self.below(sum(weights))
        for item, weight in zip(items, weights, strict=True):
            point -= weight
            if point < 0:
                return item
        raise AssertionError("the weights are positive")

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return all items in random order."""
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """Return at most k different items in random order."""
        return self.shuffled(items)[:k]
