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
FEW_BLOCKS = 10
# Of each answer; whole answers are held to the reference in test_smollm2.py.
MAX_TOKENS = 12
PREEMPTED_TOKENS = 32  # so many that memory does not last for all


@pytest.fixture(scope="module")
def small_pool_runner(checkpoint: Checkpoint) -> ModelRunner:
    """The real model over so few blocks that a crowd must be preempted."""
    runner = ModelRunner(
        checkpoint,
        dtype="float32",
        num_threads=1,  # threads that wait for each other stand still where others have the cores
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=512,
        block_size=BLOCK_SIZE,
    )
    runner.load()
    runner.allocate_cache(MAX_BLOCKS)
    return runner


@pytest.mark.long
@pytest.mark.parametrize(
    ("token_budget", "policy", "admission", "part", "max_tokens"),
    [
        (16, "continuous", "on_demand", slice(8, 12), PREEMPTED_TOKENS),
        (512, "continuous", "on_demand", slice(4), MAX_TOKENS),
        (64, "static", "reserve", slice(3), MAX_TOKENS),
        (64, "dynamic", "predicted", slice(3), MAX_TOKENS),
    ],
    ids=["preempted", "continuous", "static", "dynamic"],
)
def test_prompts_among_strangers(
    token_budget: int,
    policy: str,
    admission: str,
    part: slice,
    max_tokens: int,
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
    for number, case in enumerate(reference["greedy"][part]):
        output_ids = case["output_ids"][:max_tokens]
        params = SamplingParams(temperature=0, max_tokens=len(output_ids))
        sequence = simulation.add_prompt(tuple(case["prompt_ids"]), params)
        wanted[sequence.sequence_id] = output_ids
        if number % 2 == 0:
            stranger = tuple((number * 131 + i * 17) % 40_000 + 20 for i in range(5 + 7 * number))
            simulation.add_prompt(stranger, SamplingParams(temperature=1.0, seed=number, max_tokens=16, min_tokens=16))
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions > 0 or max_tokens < PREEMPTED_TOKENS
    for sequence_id, output_ids in wanted.items():
        assert simulation.outputs[sequence_id] == output_ids


@pytest.mark.long
def test_hit_or_miss_the_answer_is_the_same(small_pool_runner: ModelRunner, reference: dict[str, Any]) -> None:
    simulation = Simulation(
        max_num_seqs=4,
        token_budget=512,
        num_blocks=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        runner=small_pool_runner,
    )
    cases = [case for case in reference["greedy"] if len(case["prompt_ids"]) > 2 * BLOCK_SIZE][:2]
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
    assert all(num_tokens >= 2 * BLOCK_SIZE for num_tokens in cached[2:])
