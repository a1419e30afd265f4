"""Drawing tokens: the right distribution, and nothing that depends on neighbours."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import SamplingRows, keep_likely, noise_key, sample, uniform
from engine.sequence import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWS = 4000


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], num_prompt_tokens: int = 0
) -> list[int]:
    """One token for each row of [R, V] logits."""
    rows = SamplingRows(len(params), logits.shape[1])
    for seat, each in enumerate(params):
        rows.set(seat, each, num_prompt_tokens)
    return sample(logits.clone(), rows, np.arange(len(params)), np.array(positions)).tolist()


def probabilities_of(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """What the definition says, for one row, in double precision."""
    p = torch.softmax(logits.double() / params.temperature, -1).tolist()
    by_likelihood = sorted(range(len(p)), key=lambda i: -p[i])
    kept = by_likelihood[: params.top_k or None]
    total, reached, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        if reached >= params.top_p * total:
            break
        nucleus.append(i)
        reached += p[i]
    final = {i for i in nucleus if p[i] >= params.min_p * max(p)}
    rest = sum(p[i] for i in final)
    return [p[i] / rest if i in final else 0.0 for i in range(len(p))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=4, seed=4),
        SamplingParams(top_p=0.7, seed=5),
        SamplingParams(min_p=0.2, seed=6),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05, seed=7),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(params: SamplingParams) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(params.seed)) * 1.5
    tokens = draw(logits.expand(DRAWS, -1), [params] * DRAWS, range(DRAWS))
    expected = probabilities_of(logits, params)
    counts = np.bincount(tokens, minlength=10)
    possible = [i for i in range(10) if expected[i] > 0]
    assert sum(counts[i] for i in possible) == DRAWS
    chi_square = sum((counts[i] - DRAWS * expected[i]) ** 2 / (DRAWS * expected[i]) for i in possible)
    freedom = len(possible) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_a_neighbour_changes_no_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3000, generator=generator) * 2
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3], top_k=(0, 7, 2000)[i % 3 - i % 2], top_p=(1.0, 0.95)[i % 2], seed=i
        )
        for i in range(12)
    ]
    crowd = draw(logits, params, range(100, 112))
    single = [draw(logits[i : i + 1], params[i : i + 1], [100 + i])[0] for i in range(12)]
    assert crowd == single


def test_a_draw_depends_on_seed_choice_and_position() -> None:
    logits = torch.zeros(1, 50_000)
    draws = {
        draw(logits, [SamplingParams(seed=seed, choice_index=choice)], [position])[0]
        for seed in (1, 2)
        for choice in (0, 1)
        for position in (5, 6)
    }
    assert len(draws) == 8
    again = [draw(logits, [SamplingParams(seed=1)], [5])[0] for _ in range(2)]
    assert again[0] == again[1]


def test_a_wide_nucleus_looks_at_the_whole_vocabulary() -> None:
    probabilities = torch.softmax(torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * 0.1, -1)
    kept = probabilities.clone()
    keep_likely(kept, np.array([0, 0]), np.array([0.5, 0.99]), np.zeros(2, dtype=np.float32))
    for row, goal in enumerate((0.5, 0.99)):
        inside = kept[row] > 0
        assert kept[row].double().sum() >= goal
        assert kept[row].double().sum() - kept[row][inside].min() < goal
        assert probabilities[row][~inside].max() <= kept[row][inside].min()


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40), st.integers(0, 2**63), st.integers(0, 10**6))
def test_narrow_settings_are_greedy(values: list[float], seed: int, position: int) -> None:
    logits = torch.tensor([values])
    best = max(values)
    for params in (
        SamplingParams(temperature=0.0, seed=seed),
        SamplingParams(top_k=1, seed=seed),
        SamplingParams(top_p=0.0, seed=seed),
        SamplingParams(min_p=1.0, seed=seed),
    ):
        token = draw(logits, [params], [position])[0]
        # exp() of logits that differ in the last bit may be equal, and equals are kept together.
        assert values[token] == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures_are_no_error(temperature: float) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]])
    tokens = {draw(logits, [SamplingParams(temperature=temperature, seed=i)], [0])[0] for i in range(40)}
    assert tokens == ({1} if temperature < 1 else {0, 1, 2})


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = torch.zeros(4, 8)
    logits[1, 3] = math.nan
    logits[3, 3] = math.inf
    tokens = draw(logits, [SamplingParams(temperature=0.0)] * 2 + [SamplingParams(seed=1)] * 2, [0] * 4)
    assert [token >= 0 for token in tokens] == [True, False, True, False]


def test_stop_tokens_wait_for_their_place() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({1, 99}))
    assert [draw(logits, [params], [position], num_prompt_tokens=5)[0] for position in (5, 6, 7)] == [2, 2, 1]


def test_noise_is_even_and_uncorrelated() -> None:
    keys = np.array([noise_key(seed, choice) for seed in range(200) for choice in range(5)])
    table = np.stack([uniform(keys, np.full(len(keys), position)) for position in range(50)])
    assert table.min() >= 0
    assert table.max() < 1
    assert abs(table.mean() - 0.5) < 0.005
    counts = np.histogram(table, bins=64, range=(0, 1))[0]
    expected = table.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * math.sqrt(2 * 63)
    for one, other in ((table[0], table[1]), (table[:, 0], table[:, 1]), (table[:, 4], table[:, 5])):
        assert abs(statistics.correlation(one.tolist(), other.tolist())) < 4 / math.sqrt(len(one))
