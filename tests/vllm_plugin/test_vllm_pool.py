"""The pool of vision states, reservations and block sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revisit.vllm.plan import PATIENCE, Reservations, block_size
from revisit.vllm.pool import Pool, PoolFull

BLOCK = 128


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms())
def test_no_block_is_taken_twice(sizes: list[int], random: object) -> None:
    pool = Pool(16, BLOCK, 1, torch.float32, "cpu")
    held: list[np.ndarray] = []
    for size in sizes:
        try:
            held.append(pool.take(size))
        except PoolFull:
            pool.give_back(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        numbers = [int(n) for part in held for n in part]
        assert len(set(numbers)) == len(numbers) == pool.used
    for part in held:
        pool.give_back(part)
    assert pool.used == 0
    assert pool.take(2).tolist() == [0, 1]  # the front is used first


def test_a_full_pool_raises_and_is_unchanged() -> None:
    pool = Pool(3, BLOCK, 1, torch.float32, "cpu")
    pool.take(2)
    with pytest.raises(PoolFull, match="2 blocks"):
        pool.take(2)
    assert pool.used == 2


def test_states_are_stored_at_their_places() -> None:
    pool = Pool(3, BLOCK, 2, torch.float32, "cpu")
    states = torch.arange(6.0).view(3, 2)
    pool.write(torch.tensor([0, BLOCK - 1, 2 * BLOCK]), states)
    assert torch.equal(pool.states[0, 0], states[0])
    assert torch.equal(pool.states[0, -1], states[1])
    assert torch.equal(pool.states[2, 0], states[2])


def test_a_waiting_request_is_overtaken_a_limited_number_of_times() -> None:
    reservations = Reservations(4)
    assert reservations.take("long", 2)
    assert not reservations.take("large", 3)
    for number in range(PATIENCE):
        assert reservations.take(str(number), 1)
        assert reservations.take(str(number), 1)  # asked again, it has its place
        assert not reservations.take("large", 3)
        reservations.forget({"long", "large"})
    assert not reservations.take("one more", 1)
    reservations.forget({"large", "one more"})
    assert not reservations.take("one more", 1)  # there is room, and it is not its turn
    assert reservations.take("large", 3)
    assert reservations.take("one more", 1)


def test_a_request_that_ended_while_waiting_blocks_no_other() -> None:
    reservations = Reservations(4)
    assert reservations.take("long", 2)
    assert not reservations.take("large", 3)
    for number in range(PATIENCE):
        assert reservations.take(str(number), 1)
        reservations.forget({"long", "large"})
    reservations.forget({"long"})
    assert reservations.take("small", 2)


@pytest.mark.parametrize(
    ("image", "layers", "size"),
    [(None, 1, 512), (None, 15, 1024), (576, 1, 576), (576, 17, 576), (256, 9, 1024), (16, 20, 320), (16, 1, 64)],
)
def test_blocks_hold_whole_images_where_these_have_one_size(image: int | None, layers: int, size: int) -> None:
    assert block_size(image, layers, 100_000) == size
    assert block_size(image, layers, 4_000) == min(size, 250)  # a small pool is not cut into a few large pieces
    assert block_size(image, layers, 286) == 64
