"""What rows ask for of a step that is read when its seats may be others' already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.batch import ScheduledBatch, Seated
from engine.gpu.columns import columns_of
from engine.gpu.rows import GpuRows
from engine.sequence import SamplingParams
from tests.alone import run_interpreted
from tests.fakes import EOS, VOCAB_SIZE, OneOf

pytest.importorskip("triton")

if TYPE_CHECKING:
    from engine.gpu.step_extras import StepExtras

NO_TOKENS = np.zeros(0, dtype=np.int64)


def sit(rows: GpuRows, sequence_id: int, *options: bytes) -> None:
    """Give the one seat there is to a sequence that must answer one of these."""
    params = SamplingParams(constraint=OneOf(options), stop_token_ids=frozenset({EOS}))
    seated = Seated(0, sequence_id, (5, 6), 2, params)
    batch = ScheduledBatch(step=sequence_id, seated=(seated,), new_blocks=((0, (sequence_id,)),))
    rows.apply(batch, columns_of(batch)[0])


def launch(rows: GpuRows) -> StepExtras:
    """A step of that seat, up to where its token is drawn."""
    from engine.gpu.step_extras import StepExtras

    columns, own = columns_of(ScheduledBatch(0, (0,), (0,), (0,), (2,), (True,)))
    step = StepExtras(columns, own, rows.extras, lambda *arrays: list(map(torch.from_numpy, arrays)))
    rows.extras.constraints[0].allow(VOCAB_SIZE, NO_TOKENS)
    return step


def make_rows() -> GpuRows:
    return GpuRows(max_num_seqs=1, max_model_len=64, block_size=4, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))


def test_a_token_is_taken_by_the_constraint_that_it_was_drawn_under() -> None:
    rows = make_rows()
    sit(rows, 1, b"abc", b"abd")
    step = launch(rows)
    assert step.take([ord("a")]) == ({}, {0: (ord("b"),)})


def test_what_is_read_late_is_nothing_to_who_has_the_seat_by_then() -> None:
    rows = make_rows()
    sit(rows, 1, b"abc", b"abd")
    step = launch(rows)
    sit(rows, 2, b"xyz")
    behind = launch(rows)
    assert step.take([ord("a")]) == ({}, {})
    assert not step.failures
    assert behind.take([ord("x")]) == ({}, {0: (ord("y"), ord("z"), EOS)})


def test_rows_that_stand_for_nothing_ask_for_nothing() -> None:
    from engine.gpu.step_extras import StepExtras

    columns, own = columns_of(ScheduledBatch(0, (0,), (0,), (0,), (2,), (True,)))
    padding = columns._replace(sample_positions=np.full(1, -1, dtype=np.int32))
    extras = make_rows().extras
    assert not StepExtras(padding, own, extras, list)
    extras.set(0, SamplingParams(min_tokens=1, stop_token_ids=frozenset({EOS})), (5, 6), 2)
    assert not StepExtras(padding, own, extras, list)
    assert StepExtras(columns, own, extras, list), "the first token may not be the last"


@pytest.mark.long
def test_log_probabilities_are_those_that_the_processor_tells_whatever_else_rows_ask_for() -> None:
    assert run_interpreted("tests.engine.interpreted_extras") == "35 log-probabilities agree\n"
