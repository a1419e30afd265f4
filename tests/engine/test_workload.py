"""The generators hold what was measured on their traces; prompts are alike only where they should be."""

from __future__ import annotations

import math
import subprocess
import sys
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.fitted_lengths import FITS
from engine.workload import WorkItem, Workload, at_rate, choose_factor, generate, scaled

NUM = 20_000
# Of each trace: mean, p50 and p95 of the prompts and of the answers.
MEASURED = {
    "azure-conversation": ((1155, 1020, 4083), (211, 129, 451)),
    "azure-code": ((2048, 1469, 7303), (28, 13, 90)),
    "mooncake": ((12035, 6909, 39550), (343, 350, 698)),
}


def expected_longest(lengths: list[int], num: int) -> float:
    """E[longest of `num` of them] / mean, exactly, for draws with replacement."""
    ordered, count = sorted(lengths), len(lengths)
    shares = [((i + 1) / count) ** num - (i / count) ** num for i in range(count)]
    return sum(share * length for share, length in zip(shares, ordered, strict=True)) / fmean(ordered)


@pytest.mark.parametrize("name", MEASURED)
def test_lengths_are_those_of_the_trace(name: str) -> None:
    """Mean within 3 %, median within 5 % (they step), p95 within 5 %."""
    items = generate(name, NUM, seed=3).items
    columns = [item.num_prompt_tokens for item in items], [item.num_output_tokens for item in items]
    for lengths, (mean, p50, p95) in zip(columns, MEASURED[name], strict=True):
        assert fmean(lengths) == pytest.approx(mean, rel=0.03)
        assert median(lengths) == pytest.approx(p50, rel=0.05)
        assert sorted(lengths)[int(0.95 * NUM)] == pytest.approx(p95, rel=0.05)


def test_the_longest_of_a_batch_is_as_long_as_in_the_trace() -> None:
    """What bounds static batching: it must not come out of the fit better or worse than it is (3 %)."""
    items = generate("azure-conversation", NUM, seed=3).items
    answers = [item.num_output_tokens for item in items]
    for seats, ratio in ((16, 2.41), (32, 2.67), (64, 2.98)):
        assert expected_longest(answers, seats) == pytest.approx(ratio, rel=0.03)
    assert expected_longest([item.num_prompt_tokens for item in items], 16) == pytest.approx(3.29, rel=0.03)


@pytest.mark.parametrize(("name", "rate", "cv"), [("azure-conversation", 5.53, 1.09), ("mooncake", 3.4, 1.5)])
def test_arrivals_vary_as_in_the_trace(name: str, rate: float, cv: float) -> None:
    workload = generate(name, NUM, seed=3)
    gaps = [b.arrival_seconds - a.arrival_seconds for a, b in pairwise(workload.items)]
    assert min(gaps) >= 0
    assert workload.requests_per_second == pytest.approx(rate, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_code_arrives_in_bursts() -> None:
    workload = generate("azure-code", NUM, seed=3)
    gaps = [b.arrival_seconds - a.arrival_seconds for a, b in pairwise(workload.items)]
    assert workload.requests_per_second == pytest.approx(2.57, rel=0.15)  # a few long silences make the mean
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(13.2, rel=0.15)
    counts: dict[int, int] = {}
    for item in workload.items:
        counts[int(item.arrival_seconds)] = counts.get(int(item.arrival_seconds), 0) + 1
    assert 6 < max(counts.values()) / workload.requests_per_second < 40


def test_mooncake_prompts_repeat_earlier_blocks() -> None:
    seen: set[int] = set()
    hits = total = 0
    for item in generate("mooncake", 12_000, seed=3).items:
        names = item.prefix_ids
        assert len(names) == math.ceil(item.num_prompt_tokens / 512)
        hits += next((i for i, name in enumerate(names) if name not in seen), len(names))
        total += len(names)
        seen.update(names)
    assert hits / total == pytest.approx(0.37, abs=0.03)


def test_the_same_seed_gives_the_same_requests_at_every_rate_and_number() -> None:
    slow, fast = (generate("azure-conversation", 200, seed=5, rate=rate) for rate in (1.0, 4.0))
    few = generate("azure-conversation", 50, seed=5, rate=1.0)
    assert few.items == slow.items[:50]
    assert [i.num_prompt_tokens for i in slow.items] == [i.num_prompt_tokens for i in fast.items]
    for one, other in zip(slow.items, at_rate(fast, slow.requests_per_second).items, strict=True):
        assert one.arrival_seconds == pytest.approx(other.arrival_seconds)
    assert generate("azure-conversation", 50, seed=6, rate=1.0).items != few.items


@given(st.floats(0.1, 500), st.integers(2, 5000), st.sampled_from(sorted(FITS)))
def test_scaled_lengths_fit_and_are_never_empty(factor: float, context: int, name: str) -> None:
    whole = generate(name, 40, seed=1)
    small = scaled(whole, factor, context)
    for before, after in zip(whole.items, small.items, strict=True):
        assert after.num_prompt_tokens >= 1
        assert after.num_output_tokens >= 1
        assert after.num_prompt_tokens + after.num_output_tokens <= context
        assert after.arrival_seconds == before.arrival_seconds
    assert small.factor == pytest.approx(factor)
    assert small.max_output_tokens == max(item.num_output_tokens for item in small.items)
    exact = scaled(whole, factor)
    changed = [a != b for a, b in zip(exact.items, small.items, strict=True)]
    assert small.num_shortened == sum(changed)


def test_the_factor_makes_nearly_all_fit_and_no_smaller_one_does() -> None:
    whole = generate("mooncake", 2000, seed=1)
    factor = choose_factor(whole, 8192)
    assert scaled(whole, factor, 8192).num_shortened <= 20
    assert scaled(whole, factor * 0.9, 8192).num_shortened > 20
    assert choose_factor(generate("azure-conversation", 2000), 8192) == 1.0
    bounded = choose_factor(whole, 8192, max_tokens=200_000)
    assert scaled(whole, bounded).num_tokens <= 200_000 * 1.01
    assert float(f"{bounded:.2g}") == bounded


def test_prompts_differ_unless_their_blocks_have_equal_names() -> None:
    items = (
        WorkItem(0.0, 20, 1, (7, 8, 9)),
        WorkItem(0.0, 22, 1, (7, 8, 10)),
        WorkItem(0.0, 20, 1),
        WorkItem(0.0, 20, 1),
    )
    workload = Workload("made up", items, prefix_block_tokens=8)
    first, second, third, fourth = (workload.prompt_token_ids(index, 1000) for index in range(4))
    assert [len(ids) for ids in (first, second, third, fourth)] == [20, 22, 20, 20]
    assert first[:16] == second[:16]
    assert first[16:] != second[16:20]
    assert len({first[:4], third[:4], fourth[:4]}) == 3
    assert workload.prompt_token_ids(0, 1000) == first
    assert workload.prompt_token_ids(0, 1000, salt=1)[:4] != first[:4]


@pytest.mark.parametrize("vocab_size", [259, 49_152, 128_256])
def test_no_two_prompts_begin_with_the_same_block_and_all_ids_are_ordinary(vocab_size: int) -> None:
    workload = Workload("made up", (WorkItem(0.0, 16, 1),) * 5000)
    prompts = [workload.prompt_token_ids(i, vocab_size, salt) for i in range(5000) for salt in (0, 1)]
    assert len(set(prompts)) == 10_000
    low, high = vocab_size // 8, vocab_size - vocab_size // 8
    assert all(low <= token_id < high for prompt in prompts for token_id in prompt)


def test_a_prompt_longer_than_the_table_of_tokens_is_complete() -> None:
    workload = Workload("made up", (WorkItem(0.0, 300_000, 1),))
    assert len(workload.prompt_token_ids(0, 1000)) == 300_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "azure-conversatoin"}, "did you mean azure-conversation"),
        ({"num_requests": 0}, "at least one request"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"factor": -1.0}, "above 0"),
        ({"max_model_len": 1}, "at least 2"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(**{"name": "azure-code", "num_requests": 3, **arguments})  # type: ignore[arg-type]


def test_a_crowd_that_arrives_at_once_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="no rate to change"):
        at_rate(Workload("made up", (WorkItem(0.0, 1, 1),) * 3), 2.0)


@pytest.mark.parametrize("name", FITS)
def test_the_tables_never_fall_and_know_their_mean(name: str) -> None:
    fit = FITS[name]
    for table in (fit.prompts, fit.answers, *([fit.gaps] if fit.gaps else [])):
        assert len(table.shares) == len(table.values)
        assert (table.shares[0], table.shares[-1]) == (0.0, 1.0)
        assert all(a < b for a, b in pairwise(table.shares))
        assert all(a <= b for a, b in pairwise(table.values))
        drawn = [table.at((i + 0.5) / 200_000) for i in range(200_000)]
        assert fmean(drawn) == pytest.approx(table.mean, rel=0.01)
        assert bisect_left(drawn, table.values[20]) / 200_000 <= table.shares[20] + 1e-5


def test_a_workload_needs_only_the_standard_library() -> None:
    code = "import sys, engine.workload; print({'torch', 'trio', 'numpy'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
