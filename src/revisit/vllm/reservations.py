"""The scheduler's view of the pool: which vision states are stored, for which requests, and which requests wait for room.

Complete states of ended requests stay until their room is needed, the least recently used first. A request with the same images
behind the same text uses them, and so can read its prompt from vLLM's prefix cache. The workers follow: they free blocks
and share states only as the scheduler says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 64  # requests that may overtake one that waits for room


@dataclass(frozen=True)
class Need:
    """What a request needs of the pool."""

    blocks: int
    last: int  # position of its last vision token
    key: bytes  # equal for requests with the same vision states


@dataclass
class Stored:
    """Vision states in the pool, and the requests that use them."""

    need: Need
    users: set[str]
    complete: bool = False  # whether all have been computed
    valid: bool = True  # whether other requests may use them


class Reservations:
    """The states in the pool, and the requests that wait for room.

    Args:
        blocks: Size of the pool.
        keep: Whether states of ended requests stay.
    """

    def __init__(self, blocks: int, keep: bool = False) -> None:
        self.blocks, self.keep = blocks, keep
        self._stored: dict[str, Stored] = {}  # by the request that computes them, the least recently used first
        self._owners: dict[str, str] = {}  # the request that computes the states of each request
        self._complete: dict[bytes, str] = {}  # owners of complete states
        self._waiting: dict[str, int] = {}  # how often each was overtaken
        self._dropped: list[str] = []  # owners whose blocks are free again, which the workers do not know yet

    def take(self, name: str, need: Need) -> bool:
        """Reserve blocks and return whether there was room; waiting requests are overtaken at most `PATIENCE` times."""
        if name in self._owners:
            return True
        owner = self._complete.get(need.key)
        if owner is None:
            patient = all(count < PATIENCE for other, count in self._waiting.items() if other != name)
            used = sum(stored.need.blocks for stored in self._stored.values() if stored.users)
            if not patient or used + need.blocks > self.blocks:
                self._waiting.setdefault(name, 0)
                return False
            self._make_room(need.blocks)
            owner, self._stored[name] = name, Stored(need, set())
        self._waiting.pop(name, None)
        if owner == name:
            self._waiting = {other: count + 1 for other, count in self._waiting.items()}
        self._stored[owner] = stored = self._stored.pop(owner)  # the most recently used
        stored.users.add(name)
        self._owners[name] = owner
        return True

    def owner(self, name: str) -> str | None:
        """Return the request that computes the states of a request; itself, another, or None if it needs none."""
        return self._owners.get(name)

    def update(self, requests: Mapping[str, Any]) -> None:
        """Release what ended requests used, and note which states the scheduled steps complete."""
        for owner, stored in self._stored.items():
            if not stored.complete and owner in requests and requests[owner].num_computed_tokens > stored.need.last:
                stored.complete = True
                if self.keep and stored.valid:
                    self._complete.setdefault(stored.need.key, owner)
        self._waiting = {name: count for name, count in self._waiting.items() if name in requests}
        for name in [name for name in self._owners if name not in requests]:
            owner = self._owners.pop(name)
            self._stored[owner].users.remove(name)
        for owner, stored in list(self._stored.items()):
            if not stored.users and self._complete.get(stored.need.key) != owner:
                self._drop(owner)

    def invalidate(self, names: Iterable[str] | None = None) -> None:
        """Share the states of these requests with no more requests; None for all."""
        for owner in list(self._stored if names is None else self._stored.keys() & names):
            stored = self._stored[owner]
            stored.valid = False
            if self._complete.get(stored.need.key) == owner:
                del self._complete[stored.need.key]

    def take_dropped(self) -> list[str]:
        """Return the owners of blocks that the workers must free before they store more states, and clear the list."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _make_room(self, blocks: int) -> None:
        free = self.blocks - sum(stored.need.blocks for stored in self._stored.values())
        for owner, stored in list(self._stored.items()):
            if free >= blocks:
                return
            if not stored.users:
                free += stored.need.blocks
                self._drop(owner)

    def _drop(self, owner: str) -> None:
        key = self._stored.pop(owner).need.key
        if self._complete.get(key) == owner:
            del self._complete[key]
        self._dropped.append(owner)
