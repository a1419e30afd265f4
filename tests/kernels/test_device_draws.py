"""Draws as a device makes them, in their plain version: by the Gumbel-max trick, with noise that is a hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logprobs import ModelLogits
from engine.sampler import keep_likely
from kernels.draws import WIDTH, Logprobs, SamplingColumns
from kernels.noise import spread, words_of
from kernels.reference_sampling import drawn_logprobs, sample, top_logprobs


def make_columns(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, key: int = 7
) -> SamplingColumns:
    """One seat."""
    halves = np.array([[key & 0xFFFFFFFF, key >> 32]], dtype=np.uint32).view(np.int32)
    return SamplingColumns(
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
        torch.from_numpy(halves),
    )


def draws(logits: list[float], columns: SamplingColumns, count: int) -> np.ndarray:
    """Tokens at so many positions."""
    rows = torch.tensor(logits).expand(count, -1)
    seats = torch.zeros(count, dtype=torch.int32)
    return sample(rows, columns, seats, torch.arange(count, dtype=torch.int32)).numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probabilities_say(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 2.0]
    count = 20_000
    found = np.bincount(draws(logits, make_columns(temperature), count), minlength=6)
    expected = count * torch.softmax(torch.tensor(logits) / temperature, -1).numpy()
    # Of chi-square with five degrees of freedom one in a thousand is above 20.5.
    assert ((found - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.long
def test_an_unlikely_token_is_drawn_about_as_seldom_as_it_should_be() -> None:
    """What a noise of 24 bits would cut off: one of many tokens, each of which is a million times less likely."""
    logits = [np.log(1e6), *[0.0] * 20_000]
    seldom = np.count_nonzero(draws(logits, make_columns(), 2000))
    assert 20 < seldom < 62  # 2000 · 0.0196 ± four standard deviations


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=12),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
)
def test_what_is_kept_is_what_the_processors_draws_keep(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    probabilities = torch.softmax(torch.tensor([logits]), -1)
    keep_likely(probabilities, np.array([top_k]), np.array([top_p]), np.array([min_p], dtype=np.float32))
    kept = set(torch.nonzero(probabilities[0]).flatten().tolist())
    assert set(draws(logits, make_columns(1.0, top_k, top_p, min_p), 60)) <= kept


def test_a_draw_depends_on_its_key_and_its_position_alone() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(6, -1)
    columns = SamplingColumns(*[torch.cat(pair) for pair in zip(make_columns(key=3), make_columns(key=4), strict=True)])

    def at(seats: list[int], positions: list[int]) -> list[int]:
        chosen = [torch.tensor(column, dtype=torch.int32) for column in (seats, positions)]
        return sample(logits[: len(seats)], columns, *chosen).tolist()

    together = at([0, 1, 0, 1, 0, 1], [5, 5, 6, 6, 1 << 20, 1 << 20])
    assert together == [at([seat], [position])[0] for position in (5, 6, 1 << 20) for seat in (0, 1)]
    assert len(set(together)) > 2


def test_rows_without_a_token_that_may_be_drawn_have_none() -> None:
    inf = float("inf")
    rows = torch.tensor([[0.0, float("nan")], [-inf, -inf], [0.0, inf], [-inf, 0.0]])
    for temperature in (0.0, 1.0):
        chosen = sample(rows, make_columns(temperature), torch.zeros(4, dtype=torch.int32), torch.arange(4))
        assert chosen.tolist() == [-1, -1, -1, 1]


def test_every_bit_of_the_noise_is_as_often_one_as_zero() -> None:
    words = spread(words_of(np.full(64, 9, dtype=np.uint64), np.arange(64)), 1000)
    shares = [(words >> np.uint32(bit) & 1).mean() for bit in range(32)]
    assert np.abs(np.array(shares) - 0.5).max() < 0.01  # 64,000 draws: five standard deviations
    # Neighbours, in the vocabulary and in the sequence, have nothing in common.
    assert abs(np.corrcoef(words[:, :-1].ravel(), words[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(words[:-1].ravel(), words[1:].ravel())[0, 1]) < 0.02


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_what_is_told_of_the_likeliest_is_what_the_processor_tells(vocab_size: int, num_top: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((3, vocab_size), generator=generator).mul_(4).round_()  # many are equal
    found = Logprobs.of(torch.zeros((2, WIDTH), dtype=torch.int32))
    rows = torch.tensor([2, 0], dtype=torch.int32)
    top_logprobs(logits, rows, num_top, found)
    drawn = torch.tensor([vocab_size - 1, 0, vocab_size // 2], dtype=torch.int32)
    changed = logits.clone()
    changed[0] -= 1.0
    drawn_logprobs(changed, logits[:1], torch.tensor([-1, 0], dtype=torch.int32), rows, drawn, found)
    own, count = ModelLogits(logits, [0, 2]), min(num_top, vocab_size)
    for line, row in enumerate(rows.tolist()):
        expected = own.tell(row, int(drawn[row]), num_top)
        assert found.token_ids[line, :count].tolist() == [token_id for token_id, _ in expected.top]
        assert found.logprobs[line, :count].tolist() == pytest.approx([value for _, value in expected.top], abs=1e-5)
        assert found.drawn[line].item() == pytest.approx(expected.logprob, abs=1e-5)
