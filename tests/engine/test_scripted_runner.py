"""The scripted runner ends answers where it is told to and leaves everything else as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.batch import ScheduledBatch, Seated, StepOutput
from engine.scripted_runner import ScriptedRunner
from engine.sequence import FinishReason, SamplingParams
from tests.engine.simulate import Simulation
from tests.fake_device import FakeDevice
from tests.fakes import EOS, FakeRunner, expected_output

if TYPE_CHECKING:
    from engine.sequence import Sequence


def scripted(num_output_tokens: int, **changes: object) -> SamplingParams:
    values = {"max_tokens": 200, "min_tokens": num_output_tokens - 1, "stop_token_ids": frozenset({EOS}), **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


def check(simulation: Simulation, sequence: Sequence, num_output_tokens: int) -> None:
    output = simulation.outputs[sequence.sequence_id]
    assert output == [*expected_output(sequence.prompt_token_ids, num_output_tokens - 1), EOS]
    assert sequence.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("token_budget", [3, 64])
def test_each_answer_has_its_length_and_ends_by_a_stop_token(token_budget: int, overlaps: bool) -> None:
    inner = FakeDevice(64, 4, clock=lambda: 0.0, at_once=not overlaps)
    simulation = Simulation(token_budget=token_budget, runner=ScriptedRunner(inner))
    lengths = [1, 2, 7, 1, 30, 4]
    sequences = [
        simulation.add_prompt(tuple(range(10 * i, 10 * i + 5 + i)), scripted(n)) for i, n in enumerate(lengths)
    ]
    simulation.run()
    for sequence, length in zip(sequences, lengths, strict=True):
        check(simulation, sequence, length)


def test_a_preemption_changes_no_length() -> None:
    simulation = Simulation(num_blocks=9, runner=ScriptedRunner(FakeRunner(9, 4)), enable_prefix_caching=False)
    sequences = [simulation.add_prompt(tuple(range(20 * i, 20 * i + 6)), scripted(20)) for i in range(3)]
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions > 0
    for sequence in sequences:
        check(simulation, sequence, 20)


def test_each_step_is_told_after_it_was_computed() -> None:
    inner = FakeRunner(64, 4)
    told: list[tuple[int, int]] = []
    runner = ScriptedRunner(inner, lambda batch: told.append((batch.step, len(inner.batches))))
    simulation = Simulation(runner=runner)
    simulation.add_prompt((1, 2, 3), scripted(4))
    simulation.run()
    assert told == [(1, 1), (2, 2), (3, 3), (4, 4)]


class Failing(FakeRunner):
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        return StepOutput(batch.step, (-1,), {0: "not a number"})


def one_row(params: SamplingParams) -> ScheduledBatch:
    return ScheduledBatch(
        step=1,
        seats=(0,),
        sequence_ids=(1,),
        starts=(0,),
        counts=(2,),
        samples=(True,),
        decodes=(False,),
        seated=(Seated(0, 1, (5, 6), 2, params),),
    )


def test_a_row_that_failed_stays_failed() -> None:
    output = ScriptedRunner(Failing(1, 1)).execute(one_row(scripted(1)))
    assert output.token_ids == (-1,)
    assert output.failures == {0: "not a number"}


def test_without_a_stop_token_it_says_so() -> None:
    with pytest.raises(ValueError, match="no stop token"):
        ScriptedRunner(Failing(1, 1)).execute(one_row(SamplingParams()))


def test_drafts_have_no_place_there() -> None:
    with pytest.raises(ValueError, match="no drafts"):
        ScriptedRunner(Failing(1, 1)).execute(replace(one_row(scripted(1)), drafts={0: (1,)}))


def test_who_ends_is_told_when_the_step_is_launched_though_its_seat_is_another_s_by_then() -> None:
    runner = ScriptedRunner(FakeRunner(4, 4))
    first = replace(one_row(scripted(1)), new_blocks=((0, (0,)),))
    ticket = runner.launch(first)
    behind = replace(
        first, step=2, sequence_ids=(2,), seated=(Seated(0, 2, (5, 6), 2, scripted(9)),), new_blocks=((0, (1,)),)
    )
    other = runner.launch(behind)
    assert runner.collect(ticket).token_ids == (EOS,)
    assert runner.collect(other).token_ids != (EOS,)
