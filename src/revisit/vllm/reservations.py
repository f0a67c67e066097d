"""The scheduler's account of the pool: which vision states are stored, which requests use them, and which wait for room.

Complete states stay after their requests have ended until their room is needed, the least recently used first. A later request with
the same images behind the same text uses them, and can then read its prompt from vLLM's prefix cache. The workers free blocks and
share states only as the scheduler tells them. No operation walks the requests that wait, of which there may be thousands.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 64  # requests that may overtake the first that waits for room


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
        self._stored: dict[str, Need] = {}  # by owner
        self._owners: dict[str, str] = {}  # by the request that uses the states
        self._users: Counter[str] = Counter()  # number of requests that use the states of an owner
        self._unused: OrderedDict[str, None] = (
            OrderedDict()
        )  # owners whose states nobody uses, the first to be dropped first
        self._incomplete: dict[str, None] = {}  # owners whose states can be shared once they are computed
        self._shareable: dict[bytes, str] = {}  # owners of complete states
        self._waiting: OrderedDict[str, None] = OrderedDict()  # the longest waiting first
        self._overtaken = 0  # how often the first of these was
        self._free = blocks  # blocks that hold no states
        self._used = 0  # blocks whose states are in use
        self._dropped: list[str] = []  # owners whose blocks the workers have not freed yet

    def take(self, name: str, need: Need) -> bool:
        """Reserve blocks and return whether there was room; the first that waits is overtaken at most `PATIENCE` times."""
        if name in self._owners:
            return True
        owner = self._shareable.get(need.key)
        if owner is None:
            overtakes = bool(self._waiting) and next(iter(self._waiting)) != name
            if self._used + need.blocks > self.blocks or (overtakes and self._overtaken >= PATIENCE):
                self._waiting.setdefault(name)
                return False
            self._overtaken += overtakes
            owner = name
            self._store(name, need)
        self._leave(name)
        self._owners[name] = owner
        self._users[owner] += 1
        if self._users[owner] == 1:
            self._used += self._stored[owner].blocks
            self._unused.pop(owner, None)
        return True

    def owner(self, name: str) -> str | None:
        """Return the request that computes the states of a request: itself, another, or None if it needs none."""
        return self._owners.get(name)

    def update(self, requests: Mapping[str, Any], ended: Iterable[str]) -> None:
        """Record which states have been computed, and release those that ended requests used."""
        for owner in [owner for owner in self._incomplete if owner in requests]:
            need = self._stored[owner]
            if requests[owner].num_computed_tokens > need.last:
                del self._incomplete[owner]
                if self.keep:
                    self._shareable.setdefault(need.key, owner)
        for name in ended:
            self._leave(name)
            self._release(name)

    def invalidate(self, owners: Iterable[str] | None = None) -> None:
        """Stop sharing the states of these owners with further requests; None for all."""
        for owner in list(self._stored if owners is None else self._stored.keys() & owners):
            self._incomplete.pop(owner, None)
            key = self._stored[owner].key
            if self._shareable.get(key) == owner:
                del self._shareable[key]
            if owner in self._unused:
                self._drop(owner)

    def forget(self) -> None:
        """Drop all states; requests that used them must take room again, and compute them again."""
        self.invalidate()
        for name in list(self._owners):
            self._release(name)

    def take_dropped(self) -> list[str]:
        """Return the owners of blocks that the workers must free before they store more states, and clear the list."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _store(self, owner: str, need: Need) -> None:
        while self._free < need.blocks:
            self._drop(next(iter(self._unused)))
        self._free -= need.blocks
        self._stored[owner] = need
        self._incomplete[owner] = None

    def _leave(self, name: str) -> None:
        """Remove a request from those that wait."""
        if name in self._waiting:
            if next(iter(self._waiting)) == name:
                self._overtaken = 0
            del self._waiting[name]

    def _release(self, name: str) -> None:
        """Record that a request no longer uses states; drop them if nobody can use them any more."""
        owner = self._owners.pop(name, None)
        if owner is None:
            return
        self._users[owner] -= 1
        if not self._users[owner]:
            del self._users[owner]
            self._used -= self._stored[owner].blocks
            self._unused[owner] = None
            if self._shareable.get(self._stored[owner].key) != owner:
                self._drop(owner)

    def _drop(self, owner: str) -> None:
        need = self._stored.pop(owner)
        del self._unused[owner]
        self._free += need.blocks
        self._incomplete.pop(owner, None)
        if self._shareable.get(need.key) == owner:
            del self._shareable[need.key]
        self._dropped.append(owner)
