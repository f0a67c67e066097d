"""A bounded cache of values that belong to a model or a tokenizer."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakCache(Generic[V]):
    """Values by owner and key; they live at most as long as their owner, which is not changed.

    Args:
        limit: Values kept per owner; beyond it, the least recently used one is dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._owners: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, V]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, owner: object, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made at its first use; `make` runs outside the lock and may run twice."""
        value = self.find(owner, key)
        return self.put(owner, key, make()) if value is None else value

    def find(self, owner: object, key: Hashable) -> V | None:
        """Return the value of a key; None if there is none."""
        with self._lock:
            values = self._owners.get(owner)
            if values is None or key not in values:
                return None
            values.move_to_end(key)
            return values[key]

    def put(self, owner: object, key: Hashable, value: V) -> V:
        """Keep a value."""
        with self._lock:
            values = self._owners.setdefault(owner, OrderedDict())
            values[key] = value
            values.move_to_end(key)
            while len(values) > self.limit:
                values.popitem(last=False)
        return value

    def forget(self, owner: object) -> None:
        """Drop the values of an owner."""
        with self._lock:
            self._owners.pop(owner, None)
