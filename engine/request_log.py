"""What became of each request, as spans of steps: while it is open, and of the last ones for a while after.

A request that decodes takes part in every step, so nothing is written down until that changes: a step costs what it
changes, not what it computes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from engine.batch import ScheduledBatch
    from engine.sequence import Sequence

MAX_FINISHED: Final = 200
MAX_SPANS: Final = 256  # of one request, at most 9 MB of those that have ended
MAX_KEPT_TOKENS: Final = 1 << 20  # of those that have ended, 4 bytes each, where they are kept at all


@dataclass(slots=True)
class Span:
    """Neighbouring steps in which a request did the same.

    Attributes:
        phase: `queued` and `preempted` without a seat; `idle` on one without tokens; `prefill`, `recompute` (tokens
            that a preemption threw away), `forced` (that followed without a draw) a chunk each; `decode`.
        seat: -1 without one; of a preemption the one that was lost.
        first_step, last_step: -1 for the last one while it goes on.
        tokens: computed; of a decode those that the answer had from it, but for one a step while it goes on.
        began, ended: seconds on the engine's clock; `None` while it goes on.
    """

    phase: str
    seat: int
    first_step: int
    began: float
    last_step: int = -1
    ended: float | None = None
    tokens: int = 0


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, from its arrival in the queue.

    Attributes:
        number: its sequence id, which no other request of this process has.
        sequence: while the scheduler has it.
        spans: in order, the last one open until it ends. Of very many those in the middle are left out.
        prefill_stall, decode_stall: seconds without a seat after a preemption, up to where it sat again.
        reason, cause, error: how it ended for whoever asked, who aborted it, and why it failed.
        closed: when that was; `None` while it is open.
        tokens: prompt and answer, where texts are kept.
    """

    number: int
    request_id: str
    key_name: str
    class_name: str
    arrival: float
    num_prompt_tokens: int
    sequence: Sequence | None
    spans: list[Span]
    seat: int = -1
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_spans_left_out: int = 0
    prefill_stall: float = 0.0
    decode_stall: float = 0.0
    first_seated: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    reason: str | None = None
    cause: str | None = None
    error: str | None = None
    closed: float | None = None
    tokens: array[int] = field(default_factory=lambda: array("I"))

    def begin(self, span: Span, step: int, time: float) -> None:
        """End what went on with the step before `step` and go on with `span`."""
        self.finish_span(step - 1, time)
        if len(self.spans) >= MAX_SPANS:
            del self.spans[MAX_SPANS // 2]
            self.num_spans_left_out += 1
        self.spans.append(span)

    def finish_span(self, last_step: int, time: float) -> None:
        """End what goes on; a decode that never came to a step is forgotten."""
        span = self.spans[-1] if self.spans else None
        if span is None or span.ended is not None:
            return
        if last_step < span.first_step and span.phase != "queued":
            self.spans.pop()
            return
        span.last_step, span.ended = last_step, time
        if span.phase == "decode":
            span.tokens += last_step - span.first_step + 1

    def sit_down(self, seat: int, step: int, time: float) -> None:
        """It has a seat from `step` on, for the first time or again."""
        waited = self.spans[-1]
        if waited.phase == "preempted" and self.sequence is not None:
            if self.sequence.first_token_time is None:
                self.prefill_stall += time - waited.began
            else:
                self.decode_stall += time - waited.began
        self.finish_span(step - 1, time)
        self.seat = seat

    def copy_counts(self, sequence: Sequence) -> None:
        """Take over what the scheduler counted."""
        self.num_cached_tokens = sequence.num_cached_tokens
        self.num_preemptions = sequence.num_preemptions
        if self.closed is None:  # else it ended with a stop string, and what was computed beyond was told to nobody
            self.num_output_tokens = sequence.num_output_tokens
        self.first_seated = sequence.first_seated_time
        self.first_token = sequence.first_token_time


class RequestLog:
    """The open requests and the last that ended.

    Args:
        keep_tokens: keep the tokens of those that have ended, too.
    """

    def __init__(self, *, keep_tokens: bool = False) -> None:
        self.keep_tokens = keep_tokens
        self.last_step = 0
        self._last_time = 0.0
        self._open: dict[int, RequestRecord] = {}
        self._left: dict[int, RequestRecord] = {}  # the scheduler has no more of these, whoever asked is to be told
        self._finished: dict[int, RequestRecord] = {}
        self._behind: set[int] = set()  # those that sit and whose last row did not lead to a new token
        self._num_tokens = 0

    def open(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._open[sequence.sequence_id] = RequestRecord(
            number=sequence.sequence_id,
            request_id=sequence.request_id,
            key_name=sequence.key_name,
            class_name=sequence.class_name,
            arrival=sequence.arrival_time,
            num_prompt_tokens=sequence.num_prompt_tokens,
            sequence=sequence,
            spans=[Span("queued", -1, self.last_step + 1, sequence.arrival_time)],
        )

    def step(
        self,
        batch: ScheduledBatch,
        planned: float,
        finished: float,
        *,
        idle: Iterable[Sequence] = (),
        accepted: Mapping[int, tuple[int, ...]],
    ) -> None:
        """A step was computed.

        Args:
            idle: those that sit and had no tokens.
            accepted: as in `StepOutput`.
        """
        step = batch.step
        for sequence_id in batch.preempted:
            if (record := self._open.get(sequence_id)) is not None:
                record.begin(Span("preempted", record.seat, step, planned), step, self._last_time)
        for seated in batch.seated:
            if (record := self._open.get(seated.sequence_id)) is not None:
                record.sit_down(seated.seat, step, planned)
        behind = set() if all(batch.decodes) else self._read(batch, planned, finished)
        for sequence in idle:
            behind.add(sequence.sequence_id)
            self._wait(sequence.sequence_id, step, planned)
        for sequence_id in self._behind.union([seated.sequence_id for seated in batch.seated]) - behind:
            self._go_on(sequence_id, step, planned)
        self._behind = behind
        for row, draft in batch.drafts.items():
            if (record := self._open.get(batch.sequence_ids[row])) is not None:
                record.num_draft_tokens += len(draft)
                record.num_accepted_tokens += len(accepted.get(row, ()))
                if record.spans:
                    record.spans[-1].tokens += len(accepted.get(row, ()))
        self.last_step, self._last_time = step, finished

    def skip(self, sequence_ids: Iterable[int]) -> None:
        """Of those that decode these got no token from the last step, as they do from every other."""
        for sequence_id in sequence_ids:
            record = self._open.get(sequence_id)
            if record is not None and record.spans[-1].phase == "decode" and record.spans[-1].ended is None:
                record.spans[-1].tokens -= 1

    def preempt(self, sequence_ids: Iterable[int], now: float) -> None:
        """These have lost their seat between two steps, or in one that was never told of."""
        step = self.last_step + 1
        for sequence_id in sequence_ids:
            record = self._open.get(sequence_id)
            if record is not None and (record.spans[-1].phase != "preempted" or record.spans[-1].ended is not None):
                record.begin(Span("preempted", record.seat, step, now), step, now)
                self._behind.discard(sequence_id)

    def leave(self, sequence_id: int, now: float) -> None:
        """The scheduler has let go of it."""
        record = self._open.pop(sequence_id, None)
        if record is None or record.sequence is None:
            return
        self._behind.discard(sequence_id)
        record.finish_span(self.last_step, now)
        sequence, record.sequence = record.sequence, None
        record.copy_counts(sequence)
        if self.keep_tokens:
            end = record.num_prompt_tokens + record.num_output_tokens
            record.tokens = array("I", sequence.token_ids[:end])
        if record.closed is None:
            self._left[sequence_id] = record
        else:
            self._keep(record)

    def close(
        self,
        number: int,
        now: float,
        *,
        reason: str,
        cause: str | None,
        error: str | None,
        num_output_tokens: int,
        last_token: float | None,
    ) -> None:
        """It has ended for whoever asked, a moment before or after the scheduler let go of it."""
        record = self._left.pop(number, None) or self._open.get(number)
        if record is None:
            return
        record.reason, record.cause, record.error = reason, cause, error
        record.closed, record.last_token = now, last_token
        record.num_output_tokens = num_output_tokens
        self._keep(record)

    def find(self, number: int) -> RequestRecord | None:
        """The request of that number, if it is open or has not been forgotten."""
        record = self._open.get(number) or self._left.get(number) or self._finished.get(number)
        if record is not None and record.sequence is not None:
            record.copy_counts(record.sequence)
        return record

    def find_tokens(self, number: int) -> tuple[list[int], int] | None:
        """Its tokens, and how many of them are prompt; `None` where they are not there any more, or were not kept."""
        record = self.find(number)
        if record is None or record.sequence is not None:
            return None if record is None or record.sequence is None else _tokens_of(record.sequence)
        return (record.tokens.tolist(), record.num_prompt_tokens) if record.tokens else None

    @property
    def finished(self) -> Iterator[RequestRecord]:
        """Those that have ended, the last one first."""
        return reversed(self._finished.values())

    def _read(self, batch: ScheduledBatch, planned: float, finished: float) -> set[int]:
        """Rows that do more than to continue an answer by one token: each is a span of its own.

        Returns:
            Those that did not come to their last known token.
        """
        behind = set()
        for row, decodes in enumerate(batch.decodes):
            record = None if decodes else self._open.get(batch.sequence_ids[row])
            if record is None or record.sequence is None:
                continue
            start, count = batch.starts[row], batch.counts[row]
            again = min(start + count, record.sequence.num_tokens_thrown_away) - start
            record.num_recomputed_tokens += max(0, again)
            phase = "recompute" if again > 0 else "prefill" if start < record.num_prompt_tokens else "forced"
            chunk = Span(phase, record.seat, batch.step, planned, batch.step, finished, count)
            record.begin(chunk, batch.step, planned)
            if batch.samples[row]:
                record.begin(Span("decode", record.seat, batch.step + 1, finished), batch.step + 1, finished)
            else:
                behind.add(record.number)
        return behind

    def _wait(self, sequence_id: int, step: int, planned: float) -> None:
        """It sits and has no tokens."""
        record = self._open.get(sequence_id)
        if record is None:
            return
        if record.spans[-1].phase != "idle" or record.spans[-1].ended is not None:
            record.begin(Span("idle", record.seat, step, planned), step, planned)

    def _go_on(self, sequence_id: int, step: int, planned: float) -> None:
        """It was behind, or had no seat, and is no more: it decodes, unless a chunk was its last or its seat went."""
        record = self._open.get(sequence_id)
        if record is not None and (record.spans[-1].ended is not None or record.spans[-1].phase == "idle"):
            record.begin(Span("decode", record.seat, step, planned), step, planned)

    def _keep(self, record: RequestRecord) -> None:
        """It has ended for whoever asked. Let go of what is beyond the bounds, the oldest first."""
        self._finished[record.number] = record
        self._num_tokens += len(record.tokens)
        while len(self._finished) > MAX_FINISHED:
            self._num_tokens -= len(self._finished.pop(next(iter(self._finished))).tokens)
        if self._num_tokens > MAX_KEPT_TOKENS:
            for record in self._finished.values():
                self._num_tokens -= len(record.tokens)
                record.tokens = array("I")
                if self._num_tokens <= MAX_KEPT_TOKENS:
                    return


def _tokens_of(sequence: Sequence) -> tuple[list[int], int]:
    return list(sequence.token_ids), sequence.num_prompt_tokens


def as_line(record: RequestRecord, now: float) -> dict[str, Any]:
    """A request in a line: who, how long, how much, and how it ended where it did."""
    ttft = None if record.first_token is None else record.first_token - record.arrival
    return {
        "number": record.number,
        "request_id": record.request_id,
        "key": record.key_name or None,
        "class": record.class_name,
        "finish_reason": record.reason,
        "abort_cause": record.cause,
        "error": record.error,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "num_preemptions": record.num_preemptions,
        "age_seconds": _told(now - record.arrival),
        "ttft_seconds": None if ttft is None else _told(ttft),
        "e2e_seconds": None if record.closed is None else _told(record.closed - record.arrival),
    }


def as_life(record: RequestRecord, now: float, last_step: int) -> dict[str, Any]:
    """The same and what it did in each step, times in seconds after its arrival; what goes on has no end.

    Args:
        last_step: the last one that was computed.
    """
    arrival = record.arrival
    return {
        **as_line(record, now),
        "times": _times(record, now if record.closed is None else record.closed),
        "recomputed_tokens": record.num_recomputed_tokens,
        "drafts": {"made": record.num_draft_tokens, "accepted": record.num_accepted_tokens},
        "spans": [
            {
                "phase": span.phase,
                "seat": None if span.seat < 0 else span.seat,
                "steps": [span.first_step, None if span.ended is None else span.last_step],
                "tokens": span.tokens + _tokens_of_open(span, last_step),
                "at_seconds": _told(span.began - arrival),
                "seconds": None if span.ended is None else _told(span.ended - span.began),
            }
            for span in record.spans
        ],
        "spans_left_out": record.num_spans_left_out,
    }


def _times(record: RequestRecord, until: float) -> dict[str, float | None]:
    """Where its time went, up to `until`; what it spent without a seat after a preemption is told apart."""
    span, lost = record.spans[-1], 0.0
    if span.phase == "preempted":  # it has not sat again
        lost = (until if span.ended is None else span.ended) - span.began

    def spent(begin: float | None, end: float | None, stall: float = 0.0) -> float | None:
        if begin is None:
            return None
        return _told(max(0.0, (until - lost if end is None else end) - begin - stall))

    return {
        "queue_seconds": spent(record.arrival, record.first_seated),
        "prefill_seconds": spent(record.first_seated, record.first_token, record.prefill_stall),
        "decode_seconds": spent(record.first_token, record.last_token, record.decode_stall),
        "preempted_seconds": _told(record.prefill_stall + record.decode_stall + lost),
    }


def _tokens_of_open(span: Span, last_step: int) -> int:
    """What a decode that goes on has given in its steps, one in each."""
    return max(0, last_step - span.first_step + 1) if span.phase == "decode" and span.ended is None else 0


def _told(seconds: float) -> float:
    """In microseconds: pages round to what they show, and what was rounded before would be another number there."""
    return round(seconds, 6)
