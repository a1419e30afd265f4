"""An answer does not depend on its neighbours: the real model, greedy, against an independent implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engine.model_runner import ModelRunner
from engine.sequence import SamplingParams
from tests.engine.simulate import Simulation

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint

BLOCK_SIZE = 16
MAX_BLOCKS = 40
FEW_BLOCKS = 16
# Of each answer, where nobody needs to be preempted. Whole answers are held to the reference in test_smollm2.py, too.
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def small_pool_runner(checkpoint: Checkpoint) -> ModelRunner:
    """The real model over so few blocks that a crowd must be preempted."""
    runner = ModelRunner(
        checkpoint,
        dtype="float32",
        num_threads=2,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=512,
        block_size=BLOCK_SIZE,
    )
    runner.load()
    runner.allocate_cache(MAX_BLOCKS)
    return runner


@pytest.mark.parametrize(
    ("token_budget", "policy", "admission", "num_cases", "max_tokens"),
    [
        (16, "continuous", "on_demand", 12, None),
        (512, "continuous", "on_demand", 6, MAX_TOKENS),
        (64, "static", "reserve", 4, MAX_TOKENS),
        (64, "dynamic", "predicted", 4, MAX_TOKENS),
    ],
)
def test_prompts_among_strangers(
    token_budget: int,
    policy: str,
    admission: str,
    num_cases: int,
    max_tokens: int | None,
    small_pool_runner: ModelRunner,
    reference: dict[str, Any],
) -> None:
    simulation = Simulation(
        max_num_seqs=16,
        token_budget=token_budget,
        num_blocks=FEW_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        runner=small_pool_runner,
        policy=policy,
        admission=admission,
        enable_prefix_caching=admission != "predicted",
    )
    wanted = {}
    for number, case in enumerate(reference["greedy"][:num_cases]):
        output_ids = case["output_ids"][:max_tokens]
        params = SamplingParams(temperature=0, max_tokens=len(output_ids))
        sequence = simulation.add_prompt(tuple(case["prompt_ids"]), params)
        wanted[sequence.sequence_id] = output_ids
        if number % 2 == 0:
            stranger = tuple((number * 131 + i * 17) % 40_000 + 20 for i in range(5 + 7 * number))
            simulation.add_prompt(stranger, SamplingParams(temperature=1.0, seed=number, max_tokens=16, min_tokens=16))
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions > 0 or num_cases < 12
    for sequence_id, output_ids in wanted.items():
        assert simulation.outputs[sequence_id] == output_ids


def test_hit_or_miss_the_answer_is_the_same(small_pool_runner: ModelRunner, reference: dict[str, Any]) -> None:
    simulation = Simulation(
        max_num_seqs=4,
        token_budget=512,
        num_blocks=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        runner=small_pool_runner,
    )
    cases = [case for case in reference["greedy"] if len(case["prompt_ids"]) > 2 * BLOCK_SIZE][:3]
    cached = []
    for _ in range(2):
        for case in cases:
            output_ids = case["output_ids"][:MAX_TOKENS]
            params = SamplingParams(temperature=0, max_tokens=len(output_ids))
            sequence = simulation.add_prompt(tuple(case["prompt_ids"]), params)
            simulation.run()
            assert simulation.outputs[sequence.sequence_id] == output_ids
            cached.append(sequence.num_cached_tokens)
    # All chats begin with the same system prompt; the second time everything but the last block is found.
    assert cached[0] == 0
    assert all(num_tokens >= 2 * BLOCK_SIZE for num_tokens in cached[3:])
