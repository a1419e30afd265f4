"""What was computed once is found again, by those who may, and never anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_cache import PrefixCache
from engine.sequence import SamplingParams, Sequence
from tests.engine.simulate import Simulation
from tests.fakes import expected_output

PROMPT = tuple(range(10, 30))


def ask(simulation: Simulation, prompt: tuple[int, ...], max_tokens: int = 4, root: str = "") -> Sequence:
    sequence = simulation.add_prompt(prompt, SamplingParams(max_tokens=max_tokens), cache_root=root)
    simulation.run()
    assert simulation.outputs[sequence.sequence_id] == expected_output(prompt, max_tokens)
    return sequence


def test_the_second_asker_computes_only_what_is_new() -> None:
    simulation = Simulation(block_size=4)
    assert ask(simulation, PROMPT).num_cached_tokens == 0
    assert ask(simulation, (*PROMPT[:18], 99, 98)).num_cached_tokens == 16
    assert simulation.scheduler.counters.num_hit_tokens == 16
    assert simulation.scheduler.counters.num_queried_tokens == 40


def test_the_last_token_is_computed_even_on_a_full_hit() -> None:
    simulation = Simulation(block_size=4)
    ask(simulation, PROMPT)
    assert ask(simulation, PROMPT).num_cached_tokens == 16
    assert simulation.batches[-4].counts == (4,)


def test_a_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    simulation = Simulation(block_size=4)
    first = ask(simulation, PROMPT, max_tokens=9)
    second = ask(simulation, (*first.token_ids, 7, 7, 7))
    assert second.num_cached_tokens == 28


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    simulation = Simulation(block_size=4)
    ask(simulation, (1, 2, 3, 4, *PROMPT))
    assert ask(simulation, (5, 6, 7, 8, *PROMPT)).num_cached_tokens == 0


def test_roots_do_not_see_each_other() -> None:
    simulation = Simulation(block_size=4)
    ask(simulation, PROMPT, root="alice")
    assert ask(simulation, PROMPT, root="bob").num_cached_tokens == 0
    assert ask(simulation, PROMPT, root="alice").num_cached_tokens == 16


def test_switched_off_nothing_is_kept() -> None:
    simulation = Simulation(block_size=4, enable_prefix_caching=False)
    ask(simulation, PROMPT)
    assert ask(simulation, PROMPT).num_cached_tokens == 0
    assert simulation.scheduler.kv_cache.usage.cached == 0


def test_cached_blocks_are_evicted_before_anyone_is_preempted_or_made_to_wait() -> None:
    simulation = Simulation(num_blocks=20, block_size=4, max_model_len=80)
    for start in range(5):
        ask(simulation, tuple(range(start, start + 17)), max_tokens=3)
    assert simulation.scheduler.kv_cache.usage.cached >= 19
    ask(simulation, tuple(range(100, 170)), max_tokens=5)
    assert simulation.scheduler.counters.num_preemptions == 0
    assert simulation.scheduler.kv_cache.pool.num_evictions > 0


def test_the_one_used_least_recently_goes_first_and_from_its_end() -> None:
    simulation = Simulation(num_blocks=12, block_size=4, max_model_len=48)
    old, recent = tuple(range(17)), tuple(range(50, 67))
    ask(simulation, old, max_tokens=1)
    ask(simulation, recent, max_tokens=1)
    ask(simulation, tuple(range(100, 124)), max_tokens=1)
    assert ask(simulation, recent, max_tokens=1).num_cached_tokens == 16
    assert ask(simulation, old, max_tokens=1).num_cached_tokens < 16


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    simulation = Simulation(num_blocks=14, block_size=4)
    young = None
    for number in range(3):
        young = simulation.add_prompt(tuple(range(number, number + 9)), SamplingParams(max_tokens=20))
    simulation.run()
    assert young is not None
    assert simulation.scheduler.counters.num_preemptions > 0
    for sequence in simulation.sequences.values():
        assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 20)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_a_chain_is_found_exactly_as_it_was_put_in(chains: list[tuple[int, int]]) -> None:
    """Against a dict from whole prefixes: the uid stands for all that came before."""
    cache, whole, next_block = PrefixCache(), {}, 0
    for first, second in chains:
        parent: object = "root"
        prefix: tuple[int, ...] = ()
        for token in (first, second):
            prefix = (*prefix, token)
            found = cache.find(parent, (token,))
            assert (found is not None) == (prefix in whole)
            if found is None:
                parent = cache.add(next_block, parent, (token,))
                whole[prefix] = next_block
                next_block += 1
            else:
                assert found[0] == whole[prefix]
                parent = found[1]


def test_a_uid_is_never_used_twice() -> None:
    cache = PrefixCache()
    parent = cache.add(0, "root", (1,))
    child = cache.add(1, parent, (2,))
    cache.release(1)
    cache.release(0)
    assert cache.evict() == 1
    assert cache.evict() == 0
    again = cache.add(0, "root", (1,))
    assert again not in (parent, child)
    assert cache.find(again, (2,)) is None
    with pytest.raises(KeyError):
        cache.evict()


def test_after_a_flush_nothing_is_found_and_blocks_are_free() -> None:
    simulation = Simulation(block_size=4)
    ask(simulation, PROMPT)
    cache = simulation.scheduler.kv_cache
    cached = cache.usage.cached
    assert cached > 0
    cache.flush(simulation.scheduler.running)
    assert (cache.usage.cached, cache.usage.free, cache.pool.num_flushed) == (0, cache.usage.total, cached)
    simulation.scheduler.check_integrity()
    assert ask(simulation, PROMPT).num_cached_tokens == 0
    assert ask(simulation, PROMPT).num_cached_tokens == 16


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_flush_under_way_changes_no_answer_and_what_runs_leaves_nothing_that_cannot_be_found(steps: int) -> None:
    simulation = Simulation(block_size=4)
    sequence = simulation.add_prompt(PROMPT, SamplingParams(max_tokens=20))
    for _ in range(steps):
        simulation.step()
    cache = simulation.scheduler.kv_cache
    cache.flush(simulation.scheduler.running)
    simulation.scheduler.check_integrity()
    simulation.run()
    assert simulation.outputs[sequence.sequence_id] == expected_output(PROMPT, 20)
    assert cache.usage.free == cache.usage.total
    simulation.scheduler.check_integrity()


def test_switched_off_and_on_again_what_lay_there_is_found() -> None:
    """What is computed meanwhile is not kept, also by one that runs over both changes."""
    simulation = Simulation(block_size=4)
    cache = simulation.scheduler.kv_cache
    ask(simulation, PROMPT)
    kept = cache.usage.cached
    cache.enable_prefix_caching = False
    assert ask(simulation, PROMPT).num_cached_tokens == 0
    long = simulation.add_prompt((7, *PROMPT), SamplingParams(max_tokens=20))
    simulation.step()
    cache.enable_prefix_caching = True
    simulation.run()
    assert simulation.outputs[long.sequence_id] == expected_output((7, *PROMPT), 20)
    assert cache.usage.cached == kept
    assert ask(simulation, PROMPT).num_cached_tokens == 16
    simulation.scheduler.check_integrity()
