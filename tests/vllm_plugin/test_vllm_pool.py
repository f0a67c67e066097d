"""The pool of vision states, reservations and block sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revisit.errors import RevisitError
from revisit.vllm.plan import block_size
from revisit.vllm.pool import Pool
from revisit.vllm.reservations import PATIENCE, Need, Reservations

BLOCK = 128


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms())
def test_no_block_is_taken_twice(sizes: list[int], random: object) -> None:
    pool = Pool(16, BLOCK, 1, torch.float32, "cpu")
    held: list[np.ndarray] = []
    for size in sizes:
        try:
            held.append(pool.take(size))
        except RevisitError:
            pool.free(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        numbers = [int(n) for part in held for n in part]
        assert len(set(numbers)) == len(numbers) == pool.used
    for part in held:
        pool.free(part)
    assert pool.used == 0
    assert pool.take(2).tolist() == [0, 1]  # the front is used first


def need(blocks: int, image: str) -> Need:
    return Need(blocks, last=9, key=image.encode())


def alive(*names: str, computed: int = 0) -> dict[str, SimpleNamespace]:
    """Make the requests of a scheduler, with as many computed tokens each."""
    return {name: SimpleNamespace(num_computed_tokens=computed) for name in names}


def update(reservations: Reservations, requests: dict[str, SimpleNamespace]) -> None:
    """Take a step of a scheduler that has these requests."""
    known = {*reservations._owners, *reservations._waiting}
    reservations.update(requests, sorted(known - requests.keys()))


def test_the_first_waiting_request_is_overtaken_a_limited_number_of_times() -> None:
    reservations = Reservations(4)
    assert reservations.take("long", need(2, "a"))
    assert not reservations.take("large", need(3, "b"))
    for number in range(PATIENCE):
        assert reservations.take(str(number), need(1, "c"))
        assert reservations.take(str(number), need(1, "c"))  # a second time, it has its place
        assert not reservations.take("large", need(3, "b"))
        update(reservations, alive("long", "large"))
    assert not reservations.take("one more", need(1, "c"))
    update(reservations, alive("large", "one more"))
    assert not reservations.take("one more", need(1, "c"))  # there is room, and it is not its turn
    update(reservations, alive("one more"))  # the waiting request ended
    assert reservations.take("one more", need(1, "c"))


def test_requests_that_waited_together_are_served_in_order() -> None:
    """None of them blocks the others once the first has been overtaken as often as allowed."""
    reservations = Reservations(4)
    assert reservations.take("long", need(2, "a"))
    for name in ("first", "second"):
        assert not reservations.take(name, need(3, name))
    for number in range(PATIENCE):
        assert reservations.take(str(number), need(1, "c"))
        update(reservations, alive("long", "first", "second"))
    update(reservations, alive("first", "second"))
    assert not reservations.take("second", need(3, "second"))
    assert reservations.take("first", need(3, "first"))
    update(reservations, alive("second"))
    assert reservations.take("second", need(3, "second"))


def test_requests_use_the_states_of_others_with_the_same_images() -> None:
    reservations = Reservations(4, keep=True)
    assert reservations.take("a", need(3, "x"))
    assert not reservations.take("b", need(3, "x"))  # not computed yet
    update(reservations, alive("a", "b", computed=9))
    assert not reservations.take("b", need(3, "x"))  # but for one token
    update(reservations, alive("a", "b", computed=10))
    assert reservations.take("b", need(3, "x"))
    assert reservations.take("c", need(1, "y"))
    assert [reservations.owner(name) for name in "abcd"] == ["a", "a", "c", None]
    update(reservations, alive("b", "c", computed=10))
    assert not reservations.take("d", need(1, "z"))  # the request that computed them ended, the other uses them
    update(reservations, alive())
    assert reservations.take_dropped() == []


def test_kept_states_make_room_the_least_recently_used_first() -> None:
    reservations = Reservations(4, keep=True)
    for name in "abcd":
        assert reservations.take(name, need(1, name))
    update(reservations, alive(*"abcd", computed=10))
    update(reservations, alive())
    assert reservations.take("e", need(1, "a"))
    assert reservations.take("f", need(2, "f"))
    assert reservations.take_dropped() == ["b", "c"]
    assert reservations.take_dropped() == []
    assert not reservations.take("g", need(2, "g"))
    assert reservations.take("h", need(1, "d"))  # still there
    assert reservations.owner("h") == "d"


@pytest.mark.parametrize("keep", [True, False])
def test_states_that_nobody_can_use_are_dropped_with_their_request(keep: bool) -> None:
    reservations = Reservations(8, keep)
    for name, image in zip("abcd", "xxyz", strict=True):
        assert reservations.take(name, need(1, image))
    update(reservations, {**alive(*"abc", computed=10), **alive("d", computed=3)})
    reservations.invalidate({"c"})  # it failed
    update(reservations, alive())
    unfinished_equal_or_failed = ["b", "c", "d"]
    assert reservations.take_dropped() == (unfinished_equal_or_failed if keep else list("abcd"))
    reservations.invalidate()  # the prefix cache was reset
    update(reservations, alive())
    assert reservations.take_dropped() == (["a"] if keep else [])


def test_requests_that_begin_again_take_room_again() -> None:
    """Their states, and those that they shared, are dropped: the weights may have changed."""
    reservations = Reservations(4, keep=True)
    assert reservations.take("a", need(2, "x"))
    update(reservations, alive("a", computed=10))
    assert reservations.take("b", need(2, "x"))
    reservations.forget()
    assert reservations.take_dropped() == ["a"]
    assert [reservations.owner(name) for name in "ab"] == [None, None]
    assert reservations.take("b", need(2, "x"))
    assert reservations.take("a", need(2, "x"))
    assert reservations.owner("b") == "b"


class Counted(OrderedDict[str, None]):
    """Counts how many entries are visited."""

    visited = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            Counted.visited += 1
            yield name


def test_ten_thousand_waiting_requests_are_never_walked() -> None:
    reservations = Reservations(4)
    reservations._waiting = Counted()
    assert reservations.take("long", need(4, "a"))
    names = [f"w{number}" for number in range(10_000)]
    for _ in range(2):
        Counted.visited = 0
        for name in names:
            assert not reservations.take(name, need(2, name))
        assert Counted.visited <= len(names)
    Counted.visited = 0
    reservations.update(alive(), ["long", names[-1]])
    assert [reservations.take(name, need(2, name)) for name in names[:3]] == [True, True, False]
    assert Counted.visited <= 10


@pytest.mark.parametrize(
    ("image", "layers", "size"),
    [(None, 1, 512), (None, 15, 1024), (576, 1, 576), (576, 17, 576), (256, 9, 1024), (16, 20, 320), (16, 1, 64)],
)
def test_blocks_hold_whole_images_where_these_have_one_size(image: int | None, layers: int, size: int) -> None:
    assert block_size(image, layers, 100_000) == size
    assert block_size(image, layers, 4_000) == min(size, 250)  # a small pool is not cut into a few large pieces
    assert block_size(image, layers, 286) == 64
