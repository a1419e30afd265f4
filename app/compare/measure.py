"""Runs on the engine: real requests through `Engine.submit`, timed where their tokens come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from app.compare.runs import Answer, Counts, Run
from engine.errors import EngineError
from engine.handle import GenerationRequest, TokensPrompt
from engine.sequence import FinishReason, SamplingParams
from engine.step_log import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.batch import ScheduledBatch
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.workload import Workload

NUM_PICTURED_STEPS: Final = 120
# Under it nobody sits down beside somebody who sits, and one alone need not wait for company.
GATHERING_POLICY: Final = "static_dropped"


class StepWatch:
    """Sees each step on its way through the runner: counts it, and keeps the first ones for the picture."""

    def __init__(self, max_kept: int = NUM_PICTURED_STEPS) -> None:
        self._max_kept = max_kept
        self.begin()

    def begin(self, *, without: int | None = None) -> None:
        """Start from nothing; to be called when no step is under way.

        Args:
            without: a sequence whose steps do not count.
        """
        self._without = without
        self.kept: list[ScheduledBatch] = []
        self.steps = self.rows = self.padded_rows = self.padding_tokens = 0

    def __call__(self, batch: ScheduledBatch) -> None:
        """A step was computed. Called on the thread that computes."""
        if self._without in batch.sequence_ids:
            return
        self.steps += 1
        self.rows += len(batch.seats) + len(batch.padding)
        self.padded_rows += len(batch.padding)
        self.padding_tokens += batch.num_padding_tokens
        if len(self.kept) < self._max_kept:
            self.kept.append(batch)


@dataclass(slots=True)
class _Seen:
    """What has been seen of one request so far; times on the engine's clock."""

    scheduled: float
    submitted: float
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    num_slow_gaps: int = 0


@dataclass(frozen=True, slots=True)
class Requests:
    """A workload as the engine takes it.

    Attributes:
        lengths: tokens of each answer.
        arrivals: seconds from the start of a run; `None` for a backlog, which is there at its start.
        first: not counted; it keeps the engine busy, token by token, while a backlog gathers behind it.
    """

    made: Sequence[GenerationRequest] = field(repr=False)
    lengths: Sequence[int]
    arrivals: Sequence[float] | None
    first: GenerationRequest = field(repr=False)


def make_requests(engine: Engine, workload: Workload, *, salt: int, open_loop: bool) -> Requests:
    """Greedy requests with scripted lengths; another salt gives other prompts, which no earlier run has cached."""
    vocab_size = engine.tokenizer.vocab_size
    # A model without an end token of its own ends with the last token of its vocabulary: somewhere it must.
    stop_token_ids = engine.tokenizer.stop_token_ids or frozenset({vocab_size - 1})
    longest = workload.max_output_tokens

    def request(name: str, prompt: tuple[int, ...], length: int) -> GenerationRequest:
        params = SamplingParams(temperature=0, max_tokens=longest, min_tokens=length - 1, stop_token_ids=stop_token_ids)
        return GenerationRequest(name, TokensPrompt(prompt), params)

    lengths = [item.num_output_tokens for item in workload.items]
    made = [
        request(f"r{index + 1}", workload.prompt_token_ids(index, vocab_size, salt), length)
        for index, length in enumerate(lengths)
    ]
    arrivals = [item.arrival_seconds for item in workload.items] if open_loop else None
    # Never ends by itself before it has filled the context.
    endless = SamplingParams(temperature=0, min_tokens=engine.model.context_length, stop_token_ids=stop_token_ids)
    first = GenerationRequest("first", TokensPrompt(((vocab_size // 4 + salt) % vocab_size,)), endless)
    return Requests(made, lengths, arrivals, first)


async def run_policy(
    engine: Engine,
    watch: StepWatch,
    requests: Requests,
    *,
    policy: str,
    round_: int = 0,
    on_answer: Callable[[], object] = lambda: None,
) -> Run:
    """Hand in all requests when they are due and read every answer to its end. The engine must be idle.

    Args:
        watch: is told about the engine's steps by its runner.
        on_answer: called whenever an answer has ended.

    Raises:
        EngineError: an answer did not come as scripted.
    """
    names: dict[int, str] = {}
    seen: list[_Seen] = []

    def submit(request: GenerationRequest) -> Handle:
        handle = engine.submit(request)
        names[handle.sequence_id] = request.request_id
        return handle

    def follow(handle: Handle, due: float) -> None:
        seen.append(_Seen(due, max(due, trio.current_time())))
        length, target = requests.lengths[len(seen) - 1], engine.config.slo.itl_p95_seconds
        nursery.start_soon(_read, handle, seen[-1], length, target, on_answer)

    async with trio.open_nursery() as nursery:
        if requests.arrivals is None:
            handles = await _gather(engine, watch, requests, policy, submit)
            before, start = engine.snapshot(), trio.current_time()
            for handle in handles:
                follow(handle, start)
        else:
            await engine.set_limits({"policy": policy})
            watch.begin()
            before, start = engine.snapshot(), trio.current_time()
            for arrival, request in zip(requests.arrivals, requests.made, strict=True):
                await trio.sleep_until(start + arrival)
                follow(submit(request), start + arrival)
    await engine.wait_idle()
    return Run(
        policy=policy,
        round=round_,
        seconds=max(one.last_token for one in seen) - start,
        answers=tuple([_answer(one, start) for one in seen]),
        counts=_counts(watch, before, engine.snapshot()),
        table=_table(watch.kept, names),
    )


async def _gather(
    engine: Engine,
    watch: StepWatch,
    requests: Requests,
    policy: str,
    submit: Callable[[GenerationRequest], Handle],
) -> list[Handle]:
    """Let a backlog gather behind a request that does not count; without it the first batch would be of one.

    Nobody sits down beside that request. When all the others wait, its end and the policy to be measured reach the
    scheduler together, between two steps; the next step is the first that counts.

    Raises:
        EngineError: that request ended before the others were there.
    """
    await engine.set_limits({"policy": GATHERING_POLICY})
    first = submit(requests.first)
    watch.begin(without=first.sequence_id)
    await first.take()  # its first token: it sits
    handles = [submit(request) for request in requests.made]
    for handle in handles:
        await handle.accepted()
    if first.outbox.last is not None:
        raise EngineError("The engine did not stay busy while the requests were handed in; ask for fewer --requests.")
    first.abort("shutdown")
    await engine.set_limits({"policy": policy})
    return handles


async def _read(
    handle: Handle, seen: _Seen, length: int, target: float | None, on_answer: Callable[[], object]
) -> None:
    """Follow one answer to its end."""
    try:
        while True:
            delta = await handle.take()
            now, count = trio.current_time(), len(delta.token_ids)
            if count and seen.first_token is None:
                seen.first_token = now
            elif count and target is not None and (now - seen.last_token) / count > target:
                seen.num_slow_gaps += count
            if count:
                seen.last_token = now
                seen.num_tokens += count
            if delta.finish_reason is not None:
                break
    finally:
        handle.abort("shutdown")  # harmless after the last piece
    if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise EngineError(f"Request {handle.request_id} failed: {delta.error or delta.finish_reason.value}")
    if seen.num_tokens != length:
        raise EngineError(f"Request {handle.request_id} got {seen.num_tokens} tokens instead of {length}.")
    on_answer()


def _answer(seen: _Seen, start: float) -> Answer:
    first = seen.last_token if seen.first_token is None else seen.first_token
    return Answer(
        scheduled=seen.scheduled - start,
        submitted=seen.submitted - start,
        first_token=first - start,
        finished=seen.last_token - start,
        num_output_tokens=seen.num_tokens,
        num_slow_gaps=seen.num_slow_gaps,
    )


def _counts(watch: StepWatch, before: Mapping[str, Any], after: Mapping[str, Any]) -> Counts:
    """Steps and rows as the runner saw them; the rest from the engine's own counters."""
    waste = {key: after["kv_waste"][key] - before["kv_waste"][key] for key in ("set_aside_slots", "unwritten_slots")}
    return Counts(
        steps=watch.steps,
        rows=watch.rows,
        padded_rows=watch.padded_rows,
        padding_tokens=watch.padding_tokens,
        preemptions=after["preemptions"] - before["preemptions"],
        recomputed_tokens=after["recomputed_tokens"] - before["recomputed_tokens"],
        **waste,
    )


def _table(batches: Sequence[ScheduledBatch], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The steps as `/ops/stats.json` has them, without their times."""
    sits: dict[int, int] = {}  # seat to sequence
    last_position: dict[int, int] = {}
    steps: list[dict[str, Any]] = []
    for batch in batches:
        sits = {seat: sequence_id for seat, sequence_id in sits.items() if sequence_id not in batch.preempted}
        for seated in batch.seated:
            sits[seated.seat] = seated.sequence_id
            last_position[seated.sequence_id] = seated.num_prompt_tokens + seated.params.min_tokens
        record = StepRecord(
            batch,
            request_ids=tuple([names[sequence_id] for sequence_id in batch.sequence_ids]),
            preempted=tuple([names[sequence_id] for sequence_id in batch.preempted]),
            idle=tuple([(seat, names[sequence_id]) for seat, sequence_id in sits.items() if seat not in batch.seats]),
            time=0.0,
        )
        steps.append(record.as_json())
        columns = zip(batch.seats, batch.sequence_ids, batch.starts, batch.counts, strict=True)
        for seat, sequence_id, start, count in columns:
            if start + count == last_position.get(sequence_id):
                sits.pop(seat, None)
    return steps
