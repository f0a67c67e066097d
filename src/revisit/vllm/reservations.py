"""The scheduler's account of the pool: which vision states are stored, which requests use them, and which wait for room.

Complete states stay after their requests have ended until their room is needed, the least recently used first. A later request with
the same images behind the same text uses them, and can then read its prompt from vLLM's prefix cache. The workers free blocks and
share states only as the scheduler tells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

PATIENCE = 64  # requests that may overtake one that waits for room


@dataclass(frozen=True)
class Need:
    """The room that a request needs in the pool."""

    blocks: int
    last: int  # position of its last vision token
    key: bytes  # equal for requests with the same vision states


class Reservations:
    """The states in the pool, and the requests that wait for room.

    Args:
        blocks: Size of the pool.
        keep: Whether states stay after their requests have ended.
    """

    def __init__(self, blocks: int, keep: bool = False) -> None:
        self.blocks, self.keep = blocks, keep
        # States are named after the request that computes them, their owner.
        self._stored: dict[str, Need] = {}  # by owner, the least recently used first
        self._owners: dict[str, str] = {}  # by the request that uses the states
        self._incomplete: set[str] = set()  # owners whose states can be shared once they are computed
        self._shareable: dict[bytes, str] = {}  # owners of complete states
        self._waiting: dict[str, int] = {}  # how often each request was overtaken, the longest waiting first
        self._dropped: list[str] = []  # owners whose blocks the workers have not freed yet

    def take(self, name: str, need: Need) -> bool:
        """Reserve blocks and return whether there was room; waiting requests are overtaken at most `PATIENCE` times."""
        if name in self._owners:
            return True
        owner = self._shareable.get(need.key)
        if owner is None:
            ahead = list(takewhile(lambda other: other != name, self._waiting))
            used = sum(self._stored[owner].blocks for owner in set(self._owners.values()))
            if used + need.blocks > self.blocks or any(self._waiting[other] >= PATIENCE for other in ahead):
                self._waiting.setdefault(name, 0)
                return False
            self._make_room(need.blocks)
            owner = name
            self._stored[name] = need
            self._incomplete.add(name)
            for other in ahead:
                self._waiting[other] += 1
        self._waiting.pop(name, None)
        self._stored[owner] = self._stored.pop(owner)  # the most recently used
        self._owners[name] = owner
        return True

    def owner(self, name: str) -> str | None:
        """Return the request that computes the states of a request: itself, another, or None if it needs none."""
        return self._owners.get(name)

    def update(self, requests: Mapping[str, Any]) -> None:
        """Record which states have been computed, and release those that ended requests used."""
        for owner, need in self._stored.items():
            if owner in self._incomplete and owner in requests and requests[owner].num_computed_tokens > need.last:
                self._incomplete.remove(owner)
                if self.keep:
                    self._shareable.setdefault(need.key, owner)
        self._waiting = {name: count for name, count in self._waiting.items() if name in requests}
        self._owners = {name: owner for name, owner in self._owners.items() if name in requests}
        for owner in self._unused():
            if self._shareable.get(self._stored[owner].key) != owner:
                self._drop(owner)

    def invalidate(self, owners: Iterable[str] | None = None) -> None:
        """Stop sharing the states of these owners with further requests; None for all."""
        for owner in list(self._stored if owners is None else self._stored.keys() & owners):
            self._stop_sharing(owner)

    def take_dropped(self) -> list[str]:
        """Return the owners of blocks that the workers must free before they store more states, and clear the list."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _unused(self) -> list[str]:
        used = set(self._owners.values())
        return [owner for owner in self._stored if owner not in used]

    def _make_room(self, blocks: int) -> None:
        free = self.blocks - sum(need.blocks for need in self._stored.values())
        for owner in self._unused():
            if free >= blocks:
                return
            free += self._stored[owner].blocks
            self._drop(owner)

    def _drop(self, owner: str) -> None:
        self._stop_sharing(owner)
        del self._stored[owner]
        self._dropped.append(owner)

    def _stop_sharing(self, owner: str) -> None:
        self._incomplete.discard(owner)
        key = self._stored[owner].key
        if self._shareable.get(key) == owner:
            del self._shareable[key]
