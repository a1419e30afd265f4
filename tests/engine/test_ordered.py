"""Numbers in order equal a sorted list, whatever comes and goes."""

from __future__ import annotations

import random
from bisect import insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import ordered
from engine.ordered import Ordered


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=200))
def test_it_equals_a_sorted_list(steps: list[tuple[bool, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "MAX_PART", 6)
        patch.setattr(ordered, "MIN_PART", 2)
        numbers, plain = Ordered(), list[float]()
        for comes, value in steps:
            if comes or not plain:
                numbers.add(value)
                insort(plain, value)
            else:
                numbers.remove(plain.pop(value % len(plain)))
            assert len(numbers) == len(plain)
        assert [numbers[index] for index in range(len(plain))] == plain
        for index in (-1, len(plain)):
            with pytest.raises(IndexError):
                numbers[index]


def test_a_window_that_moves_keeps_its_parts_few() -> None:
    numbers, source = Ordered(), random.Random(1)
    values = [number + source.random() * 1000 for number in range(20_000)]
    for index, value in enumerate(values):
        numbers.add(value)
        if index >= 4096:
            numbers.remove(values[index - 4096])
    assert [numbers[index] for index in range(4096)] == sorted(values[-4096:])
    assert len(numbers._parts) < 4096 // ordered.MIN_PART + 2
