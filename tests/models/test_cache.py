"""The bounded cache of values that belong to a model or a tokenizer."""

from __future__ import annotations

import gc
import weakref

from revisit.models.cache import WeakCache


class Owner:
    """Something that can be referenced weakly."""


def test_the_least_recently_used_value_is_dropped() -> None:
    cache, owner, made = WeakCache[int](limit=2), Owner(), list[int]()

    def square(number: int) -> int:
        return cache.get(owner, number, lambda: made.append(number) or number**2)  # type: ignore[func-returns-value]

    assert [square(number) for number in (1, 2, 1, 3, 1, 2)] == [1, 4, 1, 9, 1, 4]
    assert made == [1, 2, 3, 2]  # 2 was dropped when 3 came, 1 had just been used


def test_owners_have_separate_values_that_end_with_them() -> None:
    cache, owner, other = WeakCache[object](limit=2), Owner(), Owner()
    value = Owner()
    assert cache.put(owner, "x", value) is value
    assert cache.get(other, "x", lambda: None) is None
    kept = weakref.ref(value)
    del value, owner
    gc.collect()
    assert kept() is None
