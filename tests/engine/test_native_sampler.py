"""Sampling on the native kernels against the plain version and against the definition in double precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.model_runner
from engine.models.native_llama import NativeLlama
from engine.sampler import GOLDEN_RATIO, SamplingRows, sample, sample_rows, uniform
from engine.sequence import SamplingParams
from kernels import build as building
from tests.engine.test_sampler import DRAWS, probabilities_of
from tests.fake_checkpoint import GREEDY, Table, make_checkpoint, make_runner
from tests.kernels.library import kernels_or_skip

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How far the weights of the two versions may be from the exact ones, relatively: both compute them in float32.
ROUNDING = 5e-7


class Draws(NamedTuple):
    """How rows are drawn: their seats, and where their tokens will stand."""

    rows: SamplingRows
    seats: NDArray[np.int64]
    positions: NDArray[np.int64]

    @staticmethod
    def of(asked: list[tuple[float, int, float, float, float]]) -> Draws:
        """A seat each with (temperature, top_k, top_p, min_p, noise)."""
        rows, positions = SamplingRows(len(asked), 1 << 20), np.arange(len(asked)) * 37
        for seat, (temperature, top_k, top_p, min_p, noise) in enumerate(asked):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            rows.set(seat, params, 0)
            rows.key[seat] = key_for(noise, int(positions[seat]))
        return Draws(rows, np.arange(len(asked)), positions)

    def take(self, rows: list[int]) -> Draws:
        return Draws(self.rows, self.seats[rows], self.positions[rows])

    @property
    def noise(self) -> NDArray[np.float64]:
        return uniform(self.rows.key[self.seats], self.positions)


def key_for(noise: float, position: int) -> int:
    """The key whose noise at `position` is this one, rounded down to a multiple of 2⁻⁵³: the hash backwards."""
    word = int(noise * 2**53) << 11
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        word ^= word >> shift ^ word >> 2 * shift
        word = word * pow(factor, -1, 2**64) % 2**64
    return (word - (position + 1) * int(GOLDEN_RATIO)) % 2**64


class Expected(NamedTuple):
    """What the definition draws; `is_sure` where no rounding can change it, else one of `possible` is right."""

    token_id: int
    is_sure: bool
    possible: NDArray[np.bool_]


@pytest.fixture(scope="module")
def model() -> NativeLlama:
    return make_model(2)


def make_model(num_threads: int) -> NativeLlama:
    kernels_or_skip()
    model = make_runner(make_checkpoint(num_layers=1), dtype="int8", num_threads=num_threads).model
    assert isinstance(model, NativeLlama)
    return model


def expect(row: NDArray[np.float32], draws: Draws, index: int) -> Expected:
    """One row by the definition."""
    rows, seat, noise = draws.rows, draws.seats[index], draws.noise[index]
    temperature, top_k, top_p, min_p = rows.temperature[seat], rows.top_k[seat], rows.top_p[seat], rows.min_p[seat]
    nothing = np.zeros(len(row), dtype=bool)
    best = row.max()
    if not np.isfinite(best):
        return Expected(-1, True, nothing)
    if temperature == 0:
        return Expected(int(row.argmax()), True, nothing)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp(((row - best) / temperature).astype(np.float64))
        low, high = kept_from(weights, int(top_k), float(top_p), float(min_p))
    certain, possible = weights >= high, (weights >= low) & (weights > 0)
    reached = np.where(certain, weights, 0.0).cumsum() / weights[certain].sum()
    token_id = int(np.searchsorted(reached, noise, side="right"))
    doubt = weights[possible & ~certain].sum() / weights[certain].sum()
    if token_id == len(row):
        return Expected(-1, False, possible)
    edges = [reached[token_id - 1] if token_id else 0.0, reached[token_id]]
    if doubt == 0:  # else a token of next to nothing may stand before the first or behind the last
        edges = [edge for edge in edges if 0 < edge < 1]
    return Expected(token_id, doubt < ROUNDING and all(abs(edge - noise) > 2 * ROUNDING for edge in edges), possible)


def kept_from(weights: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> tuple[float, float]:
    """Bounds of the smallest weight that is kept, whatever the rounding."""
    sorted_weights = np.sort(weights)[::-1][: top_k or None]
    reached = sorted_weights.cumsum()
    borders = [float(sorted_weights[-1])] * 2
    if top_p < 1:
        goals = top_p * reached[-1] * np.array([1 + ROUNDING, 1 - ROUNDING])
        borders = sorted_weights[np.searchsorted(reached, goals).clip(max=len(reached) - 1)].tolist()
    low, high = borders
    near = (np.abs(weights - high) <= ROUNDING * high) & (weights != high)
    if near.any():  # rounding may put them in another order
        high *= 1 + ROUNDING
    return max(low, min_p) * (1 - ROUNDING), min(1.0, max(high, min_p * (1 + ROUNDING)))


def check(model: NativeLlama, logits: torch.Tensor, draws: Draws) -> int:
    """Hold both versions to the definition; gives how many rows were beyond doubt."""
    found = model.sample_rows(logits, *draws)
    plain = sample_rows(logits.clone(), *draws)
    sure = 0
    for index, row in enumerate(logits.numpy()):
        expected = expect(row, draws, index)
        told = f"row {index}"
        if expected.is_sure:
            assert found[index] == plain[index] == expected.token_id, told
        else:
            assert expected.possible[found[index]], told
        sure += expected.is_sure
    return sure


def make_logits(kind: str, rows: int, size: int, source: np.random.Generator) -> torch.Tensor:
    values = source.standard_normal((rows, size))
    if kind == "peaked":
        values = values * 8
    elif kind == "flat":
        values = values * 1e-3
    elif kind == "equal":
        values = np.full((rows, size), 2.5)
    elif kind == "few values":
        values = np.round(values * 2)
    elif kind == "masked":
        values[source.random((rows, size)) < 0.9] = -math.inf
    elif kind == "broken":
        spoiled = source.random((rows, size)) < 1 / size
        values[spoiled] = source.choice([math.nan, math.inf, -math.inf], spoiled.sum())
    elif kind == "huge":
        values = values * 1e37
    return torch.from_numpy(values.astype(np.float32))


@st.composite
def drawings(draw: st.DrawFn, size: int) -> tuple[float, int, float, float, float]:
    return (
        draw(st.sampled_from([0.0, 1.0, 0.7, 2.0, 1e-30, 1e-3, 50.0, 1e30]) | st.floats(0.05, 2)),
        draw(st.just(0) | st.integers(1, size)),
        draw(st.sampled_from([1.0, 0.95, 0.5, 1e-9, 0.0]) | st.floats(0.001, 1)),
        draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]) | st.floats(0, 1, width=32)),
        draw(st.sampled_from([0.0, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)),
    )


KINDS = ("normal", "peaked", "flat", "equal", "few values", "masked", "broken", "huge")


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 300) | st.integers(1, 3000))
def test_it_draws_what_the_plain_version_draws(
    model: NativeLlama, data: st.DataObject, kind: str, rows: int, size: int
) -> None:
    draws = Draws.of(data.draw(st.lists(drawings(size), min_size=rows, max_size=rows)))
    source = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check(model, make_logits(kind, rows, size, source), draws)


@pytest.mark.parametrize("kind", ["normal", "peaked", "few values", "masked"])
def test_hardly_a_draw_is_in_doubt(model: NativeLlama, kind: str) -> None:
    """The comparison above means something, and holds for a vocabulary of the usual size."""
    source = np.random.default_rng(1)
    asked = [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.3, 50, 0.9, 0.0), (0.7, 3000, 1.0, 0.02), (1.0, 0, 0.5, 0.1)]
    draws = Draws.of([(*each, source.random()) for each in asked * 4])
    sure = check(model, make_logits(kind, 20, 49_152, source), draws)
    assert sure >= 17  # a token of 2e-5 is not much wider than rounding


def test_draws_have_the_noise_that_is_asked_for() -> None:
    noise = [0.0, 0.25, 1 - 2**-53, 3 * 2**-53]
    assert Draws.of([(1.0, 0, 1.0, 0.0, each) for each in noise]).noise.tolist() == noise


def test_a_neighbour_changes_no_draw(model: NativeLlama) -> None:
    """On any number of threads, in any order, and after rows of another length."""
    source = np.random.default_rng(4)
    logits = make_logits("peaked", 9, 2999, source)
    logits[3, 7] = math.nan
    asked = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.9, 40, 0.9, 0.0), (2.0, 0, 0.97, 0.01)]
    draws = Draws.of([(*asked[i % 4], source.random()) for i in range(9)])
    crowd = make_model(3).sample_rows(logits, *draws)
    for i in range(9):
        model.sample_rows(make_logits("equal", 2, 5000 - 600 * i, source), *draws.take([1, 2]))
        assert model.sample_rows(logits[i : i + 1], *draws.take([i])) == crowd[i]
    order = [8, 2, 5, 0, 7, 1, 3, 6, 4]
    assert model.sample_rows(logits[order], *draws.take(order)).tolist() == crowd[order].tolist()


def test_the_plain_form_draws_the_same(model: NativeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor without vectors computes: the same operations in the same order."""
    flags = tuple(flag.replace("-O3", "-O1") for flag in building.FLAGS if "march" not in flag)
    monkeypatch.setattr(building, "FLAGS", flags)
    plain, source = make_model(1), np.random.default_rng(8)
    for kind in KINDS:
        logits = make_logits(kind, 12, 1000, source)
        asked = [(0.8, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 30, 1.0, 0.01), (0.5, 500, 0.8, 0.0)]
        draws = Draws.of([(*each, source.random()) for each in asked * 3])
        assert plain.sample_rows(logits, *draws).tolist() == model.sample_rows(logits, *draws).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=40, seed=4),
        SamplingParams(top_p=0.7, seed=5),
        SamplingParams(min_p=0.2, seed=6),
        SamplingParams(temperature=1.5, top_k=60, top_p=0.8, min_p=0.05, seed=7),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(model: NativeLlama, params: SamplingParams) -> None:
    size = 150
    logits = torch.randn(size, generator=torch.Generator().manual_seed(params.seed)) * 1.5
    rows = SamplingRows(1, size)
    rows.set(0, params, 0)
    seats = np.zeros(DRAWS, dtype=np.int64)
    tokens = sample(logits.repeat(DRAWS, 1), rows, seats, np.arange(DRAWS), model.sample_rows)
    expected = np.array(probabilities_of(logits, params)) * DRAWS
    counts = np.bincount(tokens, minlength=size)
    assert counts[expected > 0].sum() == DRAWS
    often = expected > 5
    seldom = ~often
    expected = np.append(expected[often], expected[seldom].sum())
    counts = np.append(counts[often], counts[seldom].sum())
    chi_square = ((counts - expected) ** 2 / expected.clip(min=1e-9)).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_seats_are_drawn_with_the_noise_of_their_positions(model: NativeLlama) -> None:
    source = np.random.default_rng(9)
    rows = SamplingRows(6, 400)
    for seat, params in enumerate(
        (GREEDY, *[SamplingParams(top_p=0.9, top_k=80, seed=-seed * 10**17) for seed in range(5)])
    ):
        rows.set(seat, params, 0)
    for _ in range(20):
        logits = torch.from_numpy(source.standard_normal((9, 400), dtype=np.float32))
        seats, positions = source.integers(0, 6, 18)[::2], source.integers(0, 2**20, 18)[::2]  # neither lies close
        found = model.sample_rows(logits, rows, seats, positions)
        assert found.tolist() == sample_rows(logits.clone(), rows, seats, positions).tolist()
        narrow = model.sample_rows(logits, rows, seats.astype(np.int32), positions.astype(np.int32))
        assert narrow.tolist() == found.tolist()


def test_no_token_is_drawn_where_there_is_none(model: NativeLlama) -> None:
    logits = torch.full((6, 70), -math.inf)
    logits[1, 69] = math.nan
    logits[2, 5], logits[2, 6] = math.inf, 1.0
    logits[3, 66] = -3e38
    logits[4] = 3e38
    logits[5, 3], logits[5, 68] = math.nan, 9.0
    for temperature in (0.0, 1.0):
        draws = Draws.of([(temperature, 0, 0.9, 0.0, 0.999)] * 6)
        found = model.sample_rows(logits, *draws).tolist()
        assert found == [-1, -1, -1, 66, 0 if temperature == 0 else 69, -1]
    assert model.sample_rows(logits, *Draws.of([(math.nan, 3, 0.9, 0.0, 0.5)] * 6))[3] == 66
    assert model.sample_rows(logits, *Draws.of([(math.inf, 3, 0.9, 0.0, 0.5)] * 6))[3] == -1


def test_what_does_not_fit_together_is_refused(model: NativeLlama) -> None:
    draws = Draws.of([(1.0, 0, 1.0, 0.0, 0.5)] * 2)
    with pytest.raises(ValueError, match="expected float32"):
        model.sample_rows(torch.zeros(3, 8), *draws)
    with pytest.raises(ValueError, match="expected float32"):
        model.sample_rows(torch.zeros(2, 8, dtype=torch.float64), *draws)
    rows = SamplingRows(2, 8)
    with pytest.raises(ValueError, match="expected float32"):
        model.sample_rows(torch.zeros(2, 8), rows, np.arange(2), np.arange(3))
    assert model.sample_rows(torch.zeros(8, 2).T, *draws).tolist() == [4, 4]
    assert model.sample_rows(torch.zeros(0, 8), *draws.take([])).tolist() == []


@pytest.mark.usefixtures("model")
def test_a_model_on_the_kernels_is_sampled_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torch chose")

    monkeypatch.setattr(engine.model_runner, "sample_rows", fail)
    for dtype in ("int8", "float32"):
        table = Table(make_runner(make_checkpoint(), dtype=dtype), num_blocks=64, block_size=4, seats=2, chunks=(64,))
        guests = [table.seat([1, 2, 3], 4, params) for params in (GREEDY, SamplingParams(top_p=0.9))]
        if dtype == "int8":
            table.run()
            assert [len(guest.output) for guest in guests] == [4, 4]
        else:
            with pytest.raises(RuntimeError, match="torch chose"):
                table.run()
