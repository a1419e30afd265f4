"""The real model against an independent implementation: greedy ids, likelihoods, and what bfloat16 costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.sequence import SamplingParams
from tests.fake_checkpoint import Table, make_runner

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint
    from engine.model_runner import ModelRunner

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS = 16, 160


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> ModelRunner:
    return make_runner(
        checkpoint, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=512, max_model_len=1024
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("chunks", "max_tokens"), [((512,), None), ((1, 3, 7, 29), 12)], ids=["whole prompts", "odd chunks"]
)
def test_greedy_ids_when_all_prompts_run_together(
    runner: ModelRunner, reference: dict[str, Any], chunks: tuple[int, ...], max_tokens: int | None
) -> None:
    """In chunks only the prompts are read otherwise, so that the first tokens of each answer say it."""
    runner.allocate_cache(NUM_BLOCKS)
    table = Table(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seats=12, chunks=chunks)
    answers = [case["output_ids"][:max_tokens] for case in reference["greedy"]]
    guests = [
        table.seat(case["prompt_ids"], len(answer)) for case, answer in zip(reference["greedy"], answers, strict=True)
    ]
    table.run()
    for guest, answer, case in zip(guests, answers, reference["greedy"], strict=True):
        assert guest.output == answer, case["name"]


def test_likeliest_tokens_and_their_log_probabilities(runner: ModelRunner, reference: dict[str, Any]) -> None:
    case = min(reference["greedy"], key=lambda case: len(case["prompt_ids"]))
    first = len(case["prompt_ids"]) - 1
    token_ids = case["prompt_ids"] + case["output_ids"]
    logits = torch.cat([part for _, part in runner.logits_of(token_ids)])[first:-1]
    rows = torch.log_softmax(logits, dim=-1)
    assert len(rows) == len(case["top5_logprobs"])
    for row, expected in zip(rows, case["top5_logprobs"], strict=True):
        ids = torch.tensor([token_id for token_id, _ in expected])
        values = torch.tensor([logprob for _, logprob in expected])
        torch.testing.assert_close(row[ids], values, rtol=0, atol=1e-3)


def test_an_answer_tells_the_log_probabilities_of_the_reference(runner: ModelRunner, reference: dict[str, Any]) -> None:
    case = min(reference["greedy"], key=lambda case: len(case["prompt_ids"]))
    runner.allocate_cache(8)
    table = Table(runner, num_blocks=8, block_size=BLOCK_SIZE, seats=1, chunks=(3, 512))
    guest = table.seat(case["prompt_ids"], 4, SamplingParams(temperature=0.0, num_logprobs=5))
    table.run()
    assert guest.output == case["output_ids"][:4]
    assert len(guest.logprobs) == 4
    for told, expected in zip(guest.logprobs, case["top5_logprobs"], strict=False):
        assert [token_id for token_id, _ in told.top] == [token_id for token_id, _ in expected]
        assert [logprob for _, logprob in told.top] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)
        assert (told.token_id, told.logprob) == told.top[0]


def test_likelihood_of_ordinary_text(runner: ModelRunner, reference: dict[str, Any]) -> None:
    scores = runner.score(reference["score"]["ids"])
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(reference["score"]["nll"]), rtol=0, atol=1e-2)
    assert sum(scores) / len(scores) == pytest.approx(reference["score"]["mean_nll"], rel=1e-3)


def test_bfloat16_costs_less_than_one_per_cent_of_likelihood(checkpoint: Checkpoint, reference: dict[str, Any]) -> None:
    runner = make_runner(checkpoint, dtype="bfloat16", max_num_batched_tokens=512, block_size=BLOCK_SIZE)
    scores = runner.score(reference["score"]["ids"])
    assert sum(scores) / len(scores) == pytest.approx(reference["score"]["mean_nll"], rel=1e-2)
