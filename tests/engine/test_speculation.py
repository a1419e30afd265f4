"""Drafts change how many steps an answer takes, and nothing else: the whole scheduler over a tiny real model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, Seated
from engine.config import EngineConfig
from engine.sequence import FinishReason, SamplingParams
from engine.startup import load_model
from tests.engine.simulate import Simulation
from tests.fake_checkpoint import GREEDY, FakeCheckpoint, make_checkpoint, make_runner
from tests.kernels.library import kernels_or_skip
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine.batch import StepOutput, StepUpdate, TokenLogprobs
    from engine.model_runner import ModelRunner

NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 64, 4, 96
VOCAB_SIZE = 24  # so few that answers repeat themselves soon, and change again


@pytest.fixture(scope="module")
def tiny() -> FakeCheckpoint:
    return make_checkpoint(vocab_size=VOCAB_SIZE, context_length=CONTEXT, tie_word_embeddings=False)


@pytest.fixture(scope="module", params=["float32", "int8"])
def runner(request: pytest.FixtureRequest, tiny: FakeCheckpoint) -> ModelRunner:
    """In float32 too, where a server drafts nothing: so small a model's rounding changes no token."""
    return make_runner(tiny, num_blocks=NUM_BLOCKS, dtype=request.param)


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    output: tuple[int, ...]
    reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...]


class Asking(Simulation):
    """Collects log-probabilities, and counts the steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: dict[int, list[TokenLogprobs]] = {}

    def apply(self, update: StepUpdate, step: int) -> None:
        super().apply(update, step)
        for sequence_id, entries in update.logprobs.items():
            self.told.setdefault(sequence_id, []).extend(entries)


def play(
    runner: ModelRunner, prompts: list[tuple[tuple[int, ...], SamplingParams]], *, drafts: int, **options: Any
) -> tuple[list[Outcome], Asking]:
    """Everybody comes at once; `options` are those of a simulation."""
    values: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": CONTEXT, **options}
    simulation = Asking(runner=runner, num_speculative_tokens=drafts, **values)
    sequences = [simulation.add_prompt(prompt, params) for prompt, params in prompts]
    simulation.run()
    outcomes = [
        Outcome(
            tuple(simulation.outputs[s.sequence_id]), s.finish_reason, tuple(simulation.told.get(s.sequence_id, ()))
        )
        for s in sequences
    ]
    return outcomes, simulation


def saved(simulation: Simulation) -> int:
    return simulation.scheduler.counters.num_accepted_tokens


PLAIN = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.5]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 3),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)),
    min_tokens=st.sampled_from([0, 0, 9]),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
)
WISHES: list[dict[str, Any]] = [{}, {}, {}, {"num_logprobs": 2}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}]
PARAMS = st.builds(lambda params, wish: replace(params, **wish), PLAIN, st.sampled_from(WISHES))
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=30).map(tuple), PARAMS), min_size=1, max_size=6
)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(
    prompts=PROMPTS,
    drafts=st.integers(1, 8),
    max_num_seqs=st.integers(1, 6),
    token_budget=st.sampled_from([3, 16, 64]),
    num_blocks=st.sampled_from([24, 30, NUM_BLOCKS]),
    enable_prefix_caching=st.booleans(),
    admission=st.sampled_from(["on_demand", "reserve", "predicted"]),
)
def test_every_token_is_the_same(
    runner: ModelRunner, prompts: list[tuple[tuple[int, ...], SamplingParams]], drafts: int, **options: Any
) -> None:
    without, _ = play(runner, prompts, drafts=0, **options)
    outcomes, _ = play(runner, prompts, drafts=drafts, **options)
    assert [(o.output, o.reason) for o in outcomes] == [(o.output, o.reason) for o in without]
    for outcome, expected in zip(outcomes, without, strict=True):
        assert [told.token_id for told in outcome.logprobs] == [told.token_id for told in expected.logprobs]
        assert [told.logprob for told in outcome.logprobs] == pytest.approx(
            [told.logprob for told in expected.logprobs], abs=1e-4
        )


def crowd(count: int, **params: Any) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts that repeat themselves; every second one is greedy."""
    found = []
    for number in range(count):
        prompt = tuple((number + i % (3 + number)) % VOCAB_SIZE for i in range(10 + 3 * number))
        values = {"temperature": 0.05 * (number % 2), "seed": number, "max_tokens": 50, **params}
        found.append((prompt, SamplingParams(**values)))
    return found


def test_drafts_save_steps(runner: ModelRunner) -> None:
    """What the properties compare has drafts that are right, and such that are not."""
    without, slow = play(runner, crowd(4), drafts=0)
    outcomes, fast = play(runner, crowd(4), drafts=7)
    assert outcomes == without
    assert len(fast.batches) < 0.9 * len(slow.batches)
    counters = fast.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_drafts < counters.num_draft_tokens
    assert counters.num_draft_tokens == sum(batch.num_draft_tokens for batch in fast.batches)
    assert slow.scheduler.counters.num_draft_tokens == 0


def test_preemptions_and_the_prefix_cache_change_nothing(runner: ModelRunner) -> None:
    prompts = crowd(6)
    prompts += prompts[3:]
    without, _ = play(runner, prompts, drafts=0, max_num_seqs=6)
    for enable_prefix_caching in (True, False):
        options = {"max_num_seqs": 6, "num_blocks": 30, "enable_prefix_caching": enable_prefix_caching}
        outcomes, simulation = play(runner, prompts, drafts=7, **options)
        assert outcomes == without
        assert saved(simulation) > 0
        assert simulation.scheduler.counters.num_preemptions > 0
        assert bool(simulation.scheduler.counters.num_hit_tokens) == enable_prefix_caching


def test_blocks_that_were_drafted_into_are_read_again(runner: ModelRunner) -> None:
    """A second turn finds the first answer's blocks: they hold what was accepted, and nothing that was not."""
    prompts = crowd(3)
    without, _ = play(runner, prompts, drafts=0)
    simulation = Asking(
        runner=runner, num_speculative_tokens=7, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=CONTEXT
    )
    for (prompt, _), expected in zip(prompts, without, strict=True):
        first = simulation.add_prompt(prompt, SamplingParams(temperature=0.0, max_tokens=40))
        simulation.run()
        turn = (*prompt, *simulation.outputs[first.sequence_id], 1, 2)
        second = simulation.add_prompt(turn, SamplingParams(temperature=0.0, max_tokens=20))
        simulation.run()
        assert second.num_cached_tokens >= len(prompt) + 39 - BLOCK_SIZE
        cold = (turn, SamplingParams(temperature=0.0, max_tokens=20))
        (answer,), _ = play(runner, [cold], drafts=0, enable_prefix_caching=False)
        assert tuple(simulation.outputs[second.sequence_id]) == answer.output
        assert expected.output
    assert saved(simulation) > 0


def test_a_stop_token_ends_the_answer_within_what_was_accepted(runner: ModelRunner) -> None:
    (free,), _ = play(runner, crowd(1), drafts=0)
    ends = 0
    for index, token_id in enumerate(free.output):
        if token_id in free.output[:index]:
            continue
        # The token is told again and again by then: a draft has it.
        for min_tokens in (index, index + 1, 30):
            params = SamplingParams(temperature=0.0, max_tokens=50, min_tokens=min_tokens)
            stop = replace(params, stop_token_ids=frozenset({token_id}))
            (without,), _ = play(runner, [(crowd(1)[0][0], stop)], drafts=0)
            (outcome,), simulation = play(runner, [(crowd(1)[0][0], stop)], drafts=7)
            assert outcome == without
            ends += saved(simulation)
    assert ends > 0


@pytest.mark.parametrize("max_tokens", [*range(1, 12), None])
def test_an_answer_is_as_long_as_it_may_be(runner: ModelRunner, max_tokens: int | None) -> None:
    """To the token, and to the last one of the context."""
    prompt = (1, 2, 3) * 12
    without, _ = play(runner, [(prompt, replace(GREEDY, max_tokens=max_tokens))], drafts=0)
    outcomes, simulation = play(runner, [(prompt, replace(GREEDY, max_tokens=max_tokens))], drafts=7)
    assert outcomes == without
    assert len(outcomes[0].output) == (max_tokens or CONTEXT - len(prompt) + 1)
    assert outcomes[0].reason is FinishReason.LENGTH
    assert all(batch.num_draft_tokens < (max_tokens or CONTEXT) for batch in simulation.batches)


@pytest.mark.parametrize("policy", ["static", "static_dropped", "dynamic"])
def test_fixed_batches_have_no_drafts(runner: ModelRunner, policy: str) -> None:
    outcomes, simulation = play(runner, crowd(4), drafts=7, policy=policy)
    assert simulation.scheduler.counters.num_draft_tokens == 0
    assert outcomes == play(runner, crowd(4), drafts=0)[0]


def test_a_server_drafts_where_no_batch_changes_a_token(tmp_path: Path) -> None:
    """On the native kernels; elsewhere it says at the start that it does not."""
    kernels_or_skip()
    config = make_config()
    path = str(write_gguf(tmp_path / "tiny.gguf", config, make_tensors(config)))
    for dtype, most, drafts, told in (("int8", 7, True, 0), ("float32", 7, False, 1), ("float32", 0, False, 0)):
        wanted = EngineConfig(path, dtype, num_threads=1, cache_memory_bytes=1 << 20, num_speculative_tokens=most)
        model = load_model(wanted)
        assert model.is_batch_invariant is drafts
        assert sum(remark.startswith("nothing is drafted") for remark in model.remarks) == told


def test_the_switch_works_while_it_runs(runner: ModelRunner) -> None:
    simulation = Asking(runner=runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=CONTEXT)
    sequences = [simulation.add_prompt(prompt, params) for prompt, params in crowd(4)]
    for step in range(1000):
        if not simulation.scheduler.num_running and step:
            break
        drafts = 7 * (step // 5 % 2)
        simulation.set_limits(4, 64, num_speculative_tokens=drafts)
        assert bool(simulation.step().drafts) <= bool(drafts)
    assert saved(simulation) > 0
    expected, _ = play(runner, crowd(4), drafts=0)
    assert [tuple(simulation.outputs[s.sequence_id]) for s in sequences] == [o.output for o in expected]


def step_with(runner: ModelRunner, prompt: tuple[int, ...], draft: tuple[int, ...], *, step: int = 2) -> StepOutput:
    """The prompt without its last token, then that with drafts behind it."""
    seated = (Seated(0, step, prompt, len(prompt), GREEDY),)
    blocks = ((0, tuple(range(10))),)
    count = len(prompt) - 1
    runner.execute(ScheduledBatch(1, (0,), (step,), (0,), (count,), (False,), seated=seated, new_blocks=blocks))
    return runner.execute(
        ScheduledBatch(2, (0,), (step,), (count,), (1,), (True,), decodes=(True,), drafts={0: draft} if draft else {})
    )


def test_the_runner_accepts_up_to_the_first_draft_that_is_wrong(runner: ModelRunner) -> None:
    prompt = (5, 6, 7, 5, 6)
    (answer,), _ = play(runner, [(prompt, replace(GREEDY, max_tokens=8))], drafts=0)
    right = answer.output
    for num_right in range(6):
        wrong = (right[num_right] + 1) % VOCAB_SIZE
        output = step_with(runner, prompt, (*right[:num_right], wrong, *right[num_right + 1 : 6]))
        assert output.token_ids == right[:1]
        assert output.accepted.get(0, ()) == right[1 : num_right + 1]
    assert step_with(runner, prompt, right[:6]).accepted == {0: right[1:7]}
    assert not step_with(runner, prompt, ()).accepted


def test_a_draft_that_can_have_no_token_behind_it_is_left_to_the_next_step(tiny: FakeCheckpoint) -> None:
    """Where nothing can be drawn behind a draft, the answer goes up to there, and fails there as without drafts."""
    runner = make_runner(tiny)
    prompt = (5, 6, 7, 5, 6)
    right = step_with(runner, prompt, ()).token_ids[0]
    fill = runner.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = fill(hidden)
        logits[1] = float("nan")
        return logits

    runner.model.logits = broken  # type: ignore[method-assign]
    output = step_with(runner, prompt, (right, 1))
    assert (output.token_ids, dict(output.accepted), dict(output.failures)) == ((right,), {}, {})


def test_drafts_without_blocks_are_an_error(runner: ModelRunner) -> None:
    with pytest.raises(RuntimeError, match="do not match"):
        step_with(runner, (1,) * 38, (1, 1, 1))
