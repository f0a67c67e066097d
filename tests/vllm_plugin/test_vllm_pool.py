"""The pool of vision states, reservations and block sizes."""

from __future__ import annotations

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


def test_a_waiting_request_is_overtaken_a_limited_number_of_times() -> None:
    reservations = Reservations(4)
    assert reservations.take("long", need(2, "a"))
    assert not reservations.take("large", need(3, "b"))
    for number in range(PATIENCE):
        assert reservations.take(str(number), need(1, "c"))
        assert reservations.take(str(number), need(1, "c"))  # a second time, it has its place
        assert not reservations.take("large", need(3, "b"))
        reservations.update(alive("long", "large"))
    assert not reservations.take("one more", need(1, "c"))
    reservations.update(alive("large", "one more"))
    assert not reservations.take("one more", need(1, "c"))  # there is room, and it is not its turn
    reservations.update(alive("one more"))  # the waiting request ended
    assert reservations.take("one more", need(1, "c"))


def test_requests_that_waited_together_are_served_in_order() -> None:
    """None of them blocks the others once all have been overtaken as often as allowed."""
    reservations = Reservations(4)
    assert reservations.take("long", need(2, "a"))
    for name in ("first", "second"):
        assert not reservations.take(name, need(3, name))
    for number in range(PATIENCE):
        assert reservations.take(str(number), need(1, "c"))
        reservations.update(alive("long", "first", "second"))
    reservations.update(alive("first", "second"))
    assert not reservations.take("second", need(3, "second"))
    assert reservations.take("first", need(3, "first"))
    reservations.update(alive("second"))
    assert reservations.take("second", need(3, "second"))


def test_requests_use_the_states_of_others_with_the_same_images() -> None:
    reservations = Reservations(4, keep=True)
    assert reservations.take("a", need(3, "x"))
    assert not reservations.take("b", need(3, "x"))  # not computed yet
    reservations.update(alive("a", "b", computed=9))
    assert not reservations.take("b", need(3, "x"))  # but for one token
    reservations.update(alive("a", "b", computed=10))
    assert reservations.take("b", need(3, "x"))
    assert reservations.take("c", need(1, "y"))
    assert [reservations.owner(name) for name in "abcd"] == ["a", "a", "c", None]
    reservations.update(alive("b", "c", computed=10))
    assert not reservations.take("d", need(1, "z"))  # the request that computed them ended, the other uses them
    reservations.update(alive())
    assert reservations.take_dropped() == []


def test_kept_states_make_room_the_least_recently_used_first() -> None:
    reservations = Reservations(4, keep=True)
    for name in "abcd":
        assert reservations.take(name, need(1, name))
    reservations.update(alive(*"abcd", computed=10))
    reservations.update(alive())
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
    reservations.update({**alive(*"abc", computed=10), **alive("d", computed=3)})
    reservations.invalidate({"c"})  # it failed
    reservations.update(alive())
    unfinished_equal_or_failed = ["b", "c", "d"]
    assert reservations.take_dropped() == (unfinished_equal_or_failed if keep else list("abcd"))
    reservations.invalidate()  # the prefix cache was reset
    reservations.update(alive())
    assert reservations.take_dropped() == (["a"] if keep else [])


@pytest.mark.parametrize(
    ("image", "layers", "size"),
    [(None, 1, 512), (None, 15, 1024), (576, 1, 576), (576, 17, 576), (256, 9, 1024), (16, 20, 320), (16, 1, 64)],
)
def test_blocks_hold_whole_images_where_these_have_one_size(image: int | None, layers: int, size: int) -> None:
    assert block_size(image, layers, 100_000) == size
    assert block_size(image, layers, 4_000) == min(size, 250)  # a small pool is not cut into a few large pieces
    assert block_size(image, layers, 286) == 64
