"""The pool of vision states: what is taken is given back, and what is written is found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revisit.integrations.vllm.pool import Pool, PoolFull

BLOCK = 128


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms())
def test_no_block_is_ever_given_to_two(sizes: list[int], random: object) -> None:
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


def test_a_full_pool_says_what_is_missing_and_keeps_what_it_has() -> None:
    pool = Pool(3, BLOCK, 1, torch.float32, "cpu")
    pool.take(2)
    with pytest.raises(PoolFull, match="2 blocks of vision states are needed and 1 of 3 are free"):
        pool.take(2)
    assert pool.used == 2


def test_states_are_kept_at_their_places() -> None:
    pool = Pool(3, BLOCK, 2, torch.float32, "cpu")
    states = torch.arange(6.0).view(3, 2)
    pool.write(torch.tensor([0, BLOCK - 1, 2 * BLOCK]), states)
    assert torch.equal(pool.states[0, 0], states[0])
    assert torch.equal(pool.states[0, -1], states[1])
    assert torch.equal(pool.states[2, 0], states[2])
