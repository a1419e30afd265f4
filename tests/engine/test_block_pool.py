"""Blocks are handed out once, counted, and given back."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None
    assert len(set(first)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == ()


def test_a_freed_block_is_handed_out_again() -> None:
    pool = BlockPool(1)
    assert pool.allocate(1) == (0,)
    pool.free([0])
    assert pool.allocate(1) == (0,)


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(2)
    blocks = list(pool.allocate(1) or ())
    pool.free(blocks)
    with pytest.raises(ValueError, match="is free already"):
        pool.free(blocks)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_integrity_names_the_block_whose_count_is_off() -> None:
    pool = BlockPool(4)
    blocks = list(pool.allocate(2) or ())
    pool.check_integrity([blocks])
    with pytest.raises(RuntimeError, match=rf"\[{blocks[1]}\]"):
        pool.check_integrity([blocks[:1]])


def test_sums_tell_of_a_table_too_long_and_of_a_block_that_is_lost() -> None:
    pool = BlockPool(4)
    blocks = list(pool.allocate(2) or ())
    pool.check_sums(2)
    with pytest.raises(RuntimeError, match="2 references are counted, the tables hold 3 blocks"):
        pool.check_sums(3)
    pool.ref_counts[blocks[0]] = 0
    pool.ref_counts[blocks[1]] = 2
    with pytest.raises(RuntimeError, match="3 blocks are not used, but 2 are free and 0 cached"):
        pool.check_sums(2)
    pool.begin_anew()
    pool.check_integrity([])
    assert pool.num_free == 4
