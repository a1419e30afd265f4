"""The GPU step's books, which need no GPU: what is kept of the seats, what goes to the device, which graph is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Padding, ScheduledBatch, Seated
from engine.errors import ConfigError
from engine.gpu.columns import columns_of
from engine.gpu.graphs import graph_size, sizes_for
from engine.gpu.rows import Changes, GpuRows, Layout
from engine.gpu.seat_extras import SeatExtras
from engine.sampler import noise_key
from engine.sequence import MAX_LOGPROBS, SamplingParams
from kernels.draws import MOST
from tests.alone import needs_triton

SEATS, CONTEXT, BLOCK = 3, 20, 4


def make_rows() -> GpuRows:
    return GpuRows(
        max_num_seqs=SEATS, max_model_len=CONTEXT, block_size=BLOCK, vocab_size=50, device=torch.device("cpu")
    )


def apply(rows: GpuRows, batch: ScheduledBatch) -> int:
    """As the device does; gives how many numbers were written."""
    places, values = rows.apply(batch, columns_of(batch)[0])
    rows.state[torch.from_numpy(places).long()] = torch.from_numpy(values)
    return len(places)


def batch_of(*rows: tuple[int, int, int, int], **changes: Any) -> ScheduledBatch:
    """Rows of (seat, sequence id, start, count); all sample unless told otherwise."""
    seats, ids, starts, counts = zip(*rows, strict=True) if rows else ((), (), (), ())
    return ScheduledBatch(1, seats, ids, starts, counts, **{"samples": (True,) * len(rows), **changes})


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(-5, 5), max_size=8), st.booleans()), max_size=12))
def test_of_a_place_the_last_word_counts_and_each_is_written_once(writes: list[tuple[int, list[int], bool]]) -> None:
    changes, expected = Changes(), {}
    for first, values, many in writes:
        if many:
            changes.add_many(first, np.array(values, dtype=np.int32))
        else:
            changes.add(first, values)
        expected |= {first + index: value for index, value in enumerate(values)}
    places, values_taken = changes.take()
    assert len(set(places.tolist())) == len(places)
    assert dict(zip(places.tolist(), values_taken.tolist(), strict=True)) == expected
    assert (places.dtype, values_taken.dtype) == (np.int32, np.int32)
    assert len(changes.take()[0]) == 0, "they were taken"


def test_parts_of_the_buffer_lie_one_behind_the_other() -> None:
    layout = Layout(max_num_seqs=3, width=21, num_blocks=5)
    assert (layout.tables, layout.sampling, layout.size) == (63, 78, 78 + 3 * 6)


def test_a_seat_holds_what_was_said_of_its_sequence_and_of_no_other() -> None:
    rows = make_rows()
    params = SamplingParams(temperature=0.5, top_k=70, top_p=0.9, min_p=0.1, seed=7, choice_index=2)
    seated = (Seated(2, 11, (5, 6, 7), 3, params), Seated(0, 12, (8,), 1, SamplingParams(temperature=0.0)))
    apply(rows, batch_of((2, 11, 0, 3), (0, 12, 0, 1), seated=seated, new_blocks=((2, (4,)), (0, (9,)))))
    assert rows.token_ids.tolist() == [[8] + [0] * 20, [0] * 21, [5, 6, 7] + [0] * 18]
    assert rows.block_tables[:, 0].tolist() == [9, 0, 4]
    columns = rows.columns
    assert columns.temperature.tolist() == [0.0, 0.0, 0.5]
    assert columns.top_k.tolist() == [0, 0, 50], "no more than there are tokens"
    assert columns.top_p[2].item() == pytest.approx(0.9)
    assert columns.min_p[2].item() == pytest.approx(0.1)
    assert columns.keys[2].numpy().view(np.uint64)[0] == noise_key(7, 2)
    assert rows.extras.filters.tolist() == [False, False, True]


def test_blocks_come_behind_those_there_are_and_a_newcomer_begins_anew() -> None:
    rows = make_rows()
    first = Seated(1, 11, (1, 2, 3), 3, SamplingParams())
    apply(rows, batch_of((1, 11, 0, 3), seated=(first,), new_blocks=((1, (4,)),)))
    assert apply(rows, batch_of((1, 11, 4, 1), new_blocks=((1, (6, 2)),))) == 2, "only what is new goes to the device"
    assert rows.block_tables[1].tolist() == [4, 6, 2, 0, 0]
    assert apply(rows, batch_of((1, 11, 5, 1))) == 0
    apply(rows, batch_of((1, 12, 0, 1), seated=(Seated(1, 12, (9,), 1, SamplingParams()),), new_blocks=((1, (3,)),)))
    assert rows.block_tables[1, 0] == 3
    assert rows.token_ids[1, 0] == 9


@pytest.mark.parametrize("row", [(1, 12, 3, 1), (0, 11, 0, 1), (1, 11, 4, 1), (1, 11, 0, 5)])
def test_a_batch_that_does_not_match_the_seats_is_refused(row: tuple[int, int, int, int]) -> None:
    rows = make_rows()
    seated = Seated(1, 11, (1, 2, 3), 3, SamplingParams())
    apply(rows, batch_of((1, 11, 0, 3), seated=(seated,), new_blocks=((1, (4,)),)))
    with pytest.raises(RuntimeError, match=r"rows \[0\] do not match what the seats were told"):
        apply(rows, batch_of(row))
    rows.clear()
    with pytest.raises(RuntimeError, match="do not match"):
        apply(rows, batch_of((1, 11, 3, 1)))


def test_tokens_that_follow_without_a_draw_end_with_the_context() -> None:
    rows = make_rows()
    rows.append(2, 19, (7, 8, 9))
    places, values = rows.apply(batch_of(), columns_of(batch_of())[0])
    assert (places.tolist(), values.tolist()) == ([2 * 21 + 19, 2 * 21 + 20], [7, 8])


def test_stop_tokens_that_cannot_be_drawn_are_dropped_and_bind_until_min_tokens() -> None:
    rows = make_rows()
    params = SamplingParams(min_tokens=4, stop_token_ids=frozenset({3, 49, 50, 10_000}))
    apply(rows, batch_of((0, 1, 0, 2), seated=(Seated(0, 1, (1, 2), 2, params),), new_blocks=((0, (0,)),)))
    assert rows.extras.stop_ids[0].tolist() == [3, 49]
    assert rows.extras.stops_from[0] == 6


def test_what_a_seat_asks_for_is_there_until_it_changes_hands() -> None:
    rows = make_rows()
    params = SamplingParams(
        min_tokens=3, stop_token_ids=frozenset({7, 9}), logit_bias=((9, 5.0), (4, -1.0), (50, 2.0)),
        presence_penalty=0.5, num_logprobs=200,
    )  # fmt: skip
    apply(rows, batch_of((1, 1, 0, 2), seated=(Seated(1, 1, (1, 2), 2, params),), new_blocks=((1, (0,)),)))
    extras = rows.extras
    assert (extras.is_plain[1], extras.is_biased[1], extras.is_penalized[1]) == (False, True, True)
    assert extras.penalties[1].tolist() == [1.0, 0.0, 0.5]
    assert extras.num_logprobs[1] == MOST, "no more than there is room for"
    assert MAX_LOGPROBS <= MOST, "what may be asked for is told"
    token_ids, values, early_values = (column.tolist() for column in extras.biases[1])
    assert (token_ids, values) == ([9, 4, 7], [5.0, -1.0, 0.0])
    assert early_values == [-np.inf, -1.0, -np.inf], "whatever its bias, a stop token is not drawn"
    apply(rows, batch_of((1, 2, 0, 1), seated=(Seated(1, 2, (1,), 1, SamplingParams()),), new_blocks=((1, (0,)),)))
    assert extras.is_plain[1]
    assert not any((extras.is_biased[1], extras.is_penalized[1], extras.stops_from[1]))
    assert extras.num_logprobs[1] == -1


def test_biases_go_to_the_device_when_they_change_and_not_with_every_step() -> None:
    extras, brought = SeatExtras(3, 50), list[int]()

    def starts_and_ids() -> tuple[list[int], list[int]]:
        biases = extras.biases_there(bring)
        return biases.starts.tolist(), biases.token_ids.tolist()

    def bring(*arrays: np.ndarray) -> list[torch.Tensor]:
        brought.append(len(arrays))
        return list(map(torch.from_numpy, arrays))

    bound = SamplingParams(min_tokens=3, stop_token_ids=frozenset({7, 9}))
    extras.set(1, bound, (1, 2), 2)
    assert starts_and_ids() == ([0, 0, 2, 2], [7, 9])
    extras.set(0, SamplingParams(stop_token_ids=frozenset({7, 9})), (1,), 1)
    extras.set(1, SamplingParams(), (1,), 1)
    extras.set(1, bound, (3,), 1)
    assert starts_and_ids() == ([0, 0, 2, 2], [7, 9]), "as the one before"
    assert len(brought) == 1
    extras.set(2, replace(bound, logit_bias=((4, 1.0),)), (3,), 1)
    assert starts_and_ids() == ([0, 0, 2, 5], [7, 9, 4, 7, 9])
    assert len(brought) == 2


def test_contexts_that_do_not_fit_into_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_num_seqs or max_model_len lower"):
        GpuRows(max_num_seqs=1 << 12, max_model_len=1 << 20, block_size=16, vocab_size=50, device=torch.device("meta"))


def test_a_batch_becomes_columns_with_its_padding_behind_it() -> None:
    batch = batch_of(
        (2, 11, 0, 3), (0, 12, 7, 1), (1, 13, 2, 2), samples=(False, True, True), padding=(Padding(0, 5, 2),)
    )
    columns, rows = columns_of(batch)
    assert columns.seats.tolist() == [2, 0, 1, -1], "what is computed for padding is written nowhere"
    assert columns.table_seats.tolist() == [2, 0, 1, 0]
    assert columns.seq_lens.tolist() == [3, 8, 4, 7]
    assert columns.query_start_loc.tolist() == [0, 3, 4, 6, 8]
    assert columns.sample_tokens.tolist() == [3, 5], "the last of each row that samples"
    assert (columns.sample_seats.tolist(), columns.sample_positions.tolist()) == ([0, 1], [8, 4])
    assert rows.tolist() == [1, 2]
    assert (columns.num_rows, columns.num_tokens, columns.max_query_len) == (4, 8, 3)


def test_a_decode_step_is_filled_up_with_rows_that_stand_for_nothing() -> None:
    columns, _ = columns_of(batch_of((2, 11, 5, 1), (0, 12, 7, 1)))
    assert columns.padded(2) is columns
    padded = columns.padded(4)
    assert padded.seats.tolist() == [2, 0, -1, -1]
    assert padded.seq_lens.tolist() == [6, 8, 0, 0], "they read nothing"
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.sample_positions.tolist() == [6, 8, -1, -1], "what is drawn for them goes nowhere"
    assert padded.sample_tokens.tolist() == [0, 1, 0, 0]
    assert all(column.dtype == np.int32 for column in padded)


@given(st.integers(1, 600))
def test_a_graph_is_never_much_larger_than_the_step(max_num_seqs: int) -> None:
    sizes = sizes_for(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_num_seqs)
    for rows in range(1, max_num_seqs + 1):
        taken = min(size for size in sizes if size >= rows)
        assert taken - rows < 16
        assert taken <= 2 * rows


def test_only_steps_in_which_every_row_decodes_and_samples_take_a_graph() -> None:
    def size(batch: ScheduledBatch) -> int | None:
        return graph_size(columns_of(batch)[0], [1, 2, 4])

    row = (0, 1, 5, 1)
    assert size(batch_of(row)) == 1
    assert size(batch_of(*[(seat, seat, 5, 1) for seat in range(3)])) == 4
    assert size(batch_of(*[(seat, seat, 5, 1) for seat in range(5)])) is None, "there is none so large"
    assert size(batch_of(row, (1, 2, 0, 3))) is None
    assert size(batch_of(row, (1, 2, 0, 1), samples=(True, False))) is None
    assert size(batch_of(row, padding=(Padding(1, 3, 1),))) is None
    assert size(batch_of(row, padding=(Padding(1, 3, 1, samples=True),))) == 2


def test_what_padding_draws_goes_nowhere() -> None:
    padding = (Padding(2, 3, 1, samples=True), Padding(3, 0, 4))
    columns, rows = columns_of(batch_of((0, 1, 5, 1), (1, 2, 0, 3), samples=(True, False), padding=padding))
    assert rows.tolist() == [0]
    assert columns.sample_tokens.tolist() == [0, 4]
    assert columns.sample_seats.tolist() == [0, 0]
    assert columns.sample_positions.tolist() == [6, -1]
    assert all(column.dtype == np.int32 for column in columns)


@needs_triton
def test_more_rows_than_there_is_room_for_are_refused() -> None:
    from engine.gpu.events import Past
    from engine.gpu.mailbox import Mailbox

    columns, _ = columns_of(batch_of(*[(seat, seat, 5, 1) for seat in range(5)]))
    nothing = np.zeros(0, np.int32)
    with pytest.raises(RuntimeError, match="5 rows came where 4"):
        Mailbox(4, torch.device("cpu"), Past).send(columns, nothing, nothing, torch.zeros(1, dtype=torch.int32))
