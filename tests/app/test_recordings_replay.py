"""Recordings as traces: what is read of them, and that a replay is what was recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from app.compare.load import Source
from app.compare.options import Options as Compared
from app.endings import Ending
from app.limit.options import Options, make_source
from app.recording.lines import CLASSES, line_of
from app.recording.recording import Recording
from app.traces import read_trace
from engine.config import SloTargets
from engine.errors import ConfigError
from engine.handle import GenerationRequest, TextPrompt, TokensPrompt
from engine.sequence import SamplingParams
from tests.fakes import fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trio.testing import MockClock

    from engine.engine import Engine
    from engine.handle import Handle
    from engine.workload import Workload


def recorded(**changes: Any) -> str:
    entry = {
        "timestamp": 0.0, "input_length": 40, "output_length": 7, "cached_length": 0, "class": "interactive",
        "end": "stop", **changes,
    }  # fmt: skip
    return json.dumps({name: value for name, value in entry.items() if value is not ...}) + "\n"


def test_a_recording_is_a_trace_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        recorded(timestamp=9000, output_length=0, end="client")
        + recorded(timestamp=1000, cached_length=32, **{"class": "background"})
        + recorded(timestamp=4500.5, cached_length=16)
        + recorded()[:40]
    )
    workload = read_trace(path)
    assert [item.arrival_seconds for item in workload.items] == pytest.approx([0.0, 3.5005, 8.0])
    assert [item.is_background for item in workload.items] == [True, False, False]
    assert [item.num_output_tokens for item in workload.items] == [7, 7, 1], "who left early asked for something"
    assert (workload.prefix_block_tokens, workload.num_skipped) == (16, 0)
    first, second, third = (workload.prompt_token_ids(place, 5000) for place in range(3))
    assert first[:16] == second[:16]
    assert first[16] != second[16]
    assert third[:4] != first[:4]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (recorded(**{"class": "urgent"}), "class is 'urgent', not one of interactive, background"),
        (recorded(**{"class": ...}), "lacks class"),
        (recorded(cached_length=-1), "cached_length is -1; it can be 0 to"),
        (recorded(output_length=-1), "output_length is -1; it can be 0 to"),
        (recorded(input_length=0), "input_length is 0; it can be 1 to"),
    ],
)
def test_a_bad_line_of_a_recording_is_named(tmp_path: Path, line: str, cause: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(recorded() + line)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert "line 2: " in str(caught.value)
    assert cause in str(caught.value)


def test_both_classes_of_a_recording_have_targets_of_their_own_and_keep_their_times(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    kinds = [CLASSES[place % 4 == 3] for place in range(200)]
    path.write_text("".join(recorded(timestamp=500 * n**1.1, **{"class": kind}) for n, kind in enumerate(kinds)))
    interactive, background = SloTargets(1.0, None, None), SloTargets(None, None, 60.0)
    source = make_source(Options(trace=path, targets=interactive, background_targets=background))
    assert [(one.name, one.share, one.targets, one.is_background) for one in source.classes] == [
        ("interactive", 0.75, interactive, False),
        ("background", 0.25, background, True),
    ]
    assert source.arrivals == "own"
    load = source.make(100, 2.0, 0)
    total = len(load.workload.items)
    assert load.classes == tuple([int(kind == "background") for kind in kinds[:total]])
    own = read_trace(path).items
    stretch = load.workload.items[1].arrival_seconds / own[1].arrival_seconds
    for ours, theirs in zip(load.workload.items, own, strict=False):
        assert ours.arrival_seconds == pytest.approx(theirs.arrival_seconds * stretch)
    # One class alone is no mix, whichever it is.
    path.write_text(recorded(**{"class": "background"}) + recorded(timestamp=10, **{"class": "background"}))
    (alone,) = make_source(Options(trace=path, targets=interactive)).classes
    assert (alone.targets, alone.is_background) == (interactive, True)


requests = st.lists(
    st.tuples(
        st.floats(0, 6e5),
        st.integers(1, 8192),
        st.integers(0, 8192),
        st.integers(0, 500),
        st.sampled_from(CLASSES),
        st.sampled_from([("stop", None), ("length", None), ("error", None), ("abort", "client")]),
    ),
    min_size=1,
    max_size=30,
)


@given(requests, st.floats(0, 1e9))
def test_whatever_was_written_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, asked: list[Any], began: float
) -> None:
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    with path.open("wb") as file:
        for arrival, prompt, answer, blocks, work_class, (reason, cause) in asked:
            ended = Ending(
                "", "", "", work_class, reason, cause, began + arrival, 0.0, prompt, 16 * blocks, answer
            )  # fmt: skip
            file.write(line_of(ended, began))
    items = read_trace(path).items
    assert sorted((item.num_prompt_tokens, item.num_output_tokens, item.is_background) for item in items) == sorted(
        (prompt, max(1, answer), work_class == CLASSES[1]) for _, prompt, answer, _, work_class, _ in asked
    )
    first = min(arrival for arrival, *_ in asked)
    arrivals = [item.arrival_seconds for item in items]
    assert arrivals == sorted(arrivals)
    assert arrivals == pytest.approx(sorted(arrival - first for arrival, *_ in asked), abs=2e-4)


async def record_of(engine: Engine, path: Path, requests: Sequence[tuple[float, GenerationRequest]]) -> list[Any]:
    """Hand requests in, each at its time, and record them in a file; gives the lines by their arrival."""
    began = trio.current_time()
    recording = Recording(path, began, 0.0, began + 1e6, "me", 10_000)

    def closed(handle: Handle, record: Any) -> None:
        recording.ended(handle.sequence_id, Ending.of(handle, record, "", trio.current_time()))

    async def read(handle: Handle) -> None:
        async for _ in read_deltas(handle):
            pass

    engine.on_closed = closed
    async with trio.open_nursery() as nursery:
        for due, request in requests:
            await trio.sleep_until(began + due)
            handle = engine.submit(request)
            recording.opened(handle)
            nursery.start_soon(read, handle)
    await engine.wait_idle()
    return written(recording)


def written(recording: Recording) -> list[Any]:
    """Bring its lines to the disk; gives them by their arrival."""
    recording.path.touch()
    recording.write(recording.take())
    lines = map(json.loads, recording.path.read_text().splitlines())
    return sorted(lines, key=lambda line: float(line["timestamp"]))


def asked(prompt: TextPrompt | TokensPrompt, num_tokens: int, *, background: bool) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_tokens)
    return GenerationRequest("r", prompt, params, ignore_eos=True, background=background)


def requests_of(workload: Workload) -> list[tuple[float, GenerationRequest]]:
    return [
        (
            item.arrival_seconds,
            asked(
                TokensPrompt(workload.prompt_token_ids(place, 250)),
                item.num_output_tokens,
                background=item.is_background,
            ),
        )
        for place, item in enumerate(workload.items)
    ]


async def test_a_replay_has_the_lengths_the_gaps_and_the_classes_of_what_was_recorded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A known schedule is recorded, read as a trace, replayed, and recorded again."""
    system = "You are the table. "
    schedule = [
        (0.0, system + "a", 9, False), (0.25, "short", 40, False), (0.26, system + "longer than that", 3, True),
        (1.5, "x" * 90, 12, False), (7.125, system, 1, True), (7.2, "y" * 30, 25, False),
    ]  # fmt: skip
    requests = [(due, asked(TextPrompt(text), number, background=flex)) for due, text, number, flex in schedule]
    async with open_fake_engine(fake_config(), step_seconds=0.02) as engine:
        first = await record_of(engine, tmp_path / "first.jsonl", requests)
    assert [(line["timestamp"], line["output_length"], line["class"]) for line in first] == [
        (1000 * due, number, CLASSES[flex]) for due, _, number, flex in schedule
    ]
    workload = read_trace(tmp_path / "first.jsonl")
    async with open_fake_engine(fake_config(), step_seconds=0.02) as engine:
        again = await record_of(engine, tmp_path / "again.jsonl", requests_of(workload))
    for line in (*first, *again):
        line.pop("cached_length")
    assert again == first
    # At another rate the same requests come in the same pattern.
    load = make_source(Options(trace=tmp_path / "first.jsonl")).make(1, 2 * workload.requests_per_second, 0)
    stretch = workload.items[1].arrival_seconds / load.workload.items[1].arrival_seconds
    for ours, theirs in zip(load.workload.items, workload.items, strict=False):
        assert ours.arrival_seconds * stretch == pytest.approx(theirs.arrival_seconds)
        assert (ours.num_prompt_tokens, ours.is_background) == (theirs.num_prompt_tokens, theirs.is_background)


def test_the_policies_are_compared_under_a_recording_too(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(recorded() + recorded(timestamp=500, cached_length=16, **{"class": "background"}))
    workload = Source(Compared(trace=path), max_requests=10).take(2, 2.0, 512)
    assert [(item.num_prompt_tokens, item.num_output_tokens) for item in workload.items] == [(20, 4), (20, 4)]
    assert (workload.items[1].prefix_ids, workload.prefix_block_tokens) == ((0,), 8)


async def test_a_replay_finds_in_the_cache_about_what_was_found(tmp_path: Path, autojump_clock: MockClock) -> None:
    system = "You are the table, and answer in one word. " * 3
    requests = [(2.0 * n, asked(TextPrompt(f"{system}{n:03}"), 3, background=False)) for n in range(20)]
    async with open_fake_engine(fake_config(), step_seconds=0.02) as engine:
        first = await record_of(engine, tmp_path / "first.jsonl", requests)
    async with open_fake_engine(fake_config(), step_seconds=0.02) as engine:
        again = await record_of(engine, tmp_path / "again.jsonl", requests_of(read_trace(tmp_path / "first.jsonl")))
    found, replayed = (sum(line["cached_length"] for line in lines) for lines in (first, again))
    assert found > 15 * len(system) * 0.9
    # The first that has a prefix in common has nobody before it in the replay.
    assert 0.9 * found < replayed <= found
