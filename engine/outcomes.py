"""What steps gave back, applied to their sequences: at once, or when the next step is under way already.

As soon as a step is launched its sequences count as computed up to where it takes them, and the tokens that it draws
stand behind those that are known: they are *pending*. So the next step can be planned before anybody has read them. A
token is not counted where nothing can be planned behind it without knowing it: where it is the last of an answer, and
where a constraint decides what may follow. Such a sequence has nothing to compute until its token is there.

That an answer ends with a stop token shows one step late. Its row in the step behind was computed for nothing; what
comes of it is dropped, as is what comes of a row whose sequence lost its seat, and drawn again with the same noise.
Blocks can be given away at once all the same: steps are computed in the order in which they are launched.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine.batch import Ending
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from engine.batch import ScheduledBatch, StepOutput, StepUpdate
    from engine.counters import Counters
    from engine.kv_cache import KVCache
    from engine.policy import Outlook
    from engine.sequence import Sequence


class _StepAhead(NamedTuple):
    """A step under way, and the sequences for which it is computed for nothing although they live."""

    step: int
    void: set[int]


class Outcomes:
    """Applies what came of steps.

    Args:
        live: by sequence id.
        outlook: told how long answers became.
        finish: frees what a sequence holds.
    """

    def __init__(
        self,
        live: Mapping[int, Sequence],
        kv_cache: KVCache,
        outlook: Outlook,
        counters: Counters,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._outlook = outlook
        self._counters = counters
        self._finish = finish
        self._under_way: deque[_StepAhead] = deque()

    @property
    def is_any_under_way(self) -> bool:
        """Whether a step was launched and what came of it is not known."""
        return bool(self._under_way)

    def launch(self, batch: ScheduledBatch) -> None:
        """A step is on its way; the next one is planned from where it will have come.

        Raises:
            ValueError: it has drafts: how far it comes depends on what is drawn.
        """
        if batch.drafts:
            raise ValueError(f"step {batch.step} has drafts, so nothing can be planned behind it")
        self._under_way.append(_StepAhead(batch.step, set()))
        live = self._live
        for sequence_id, start, count, samples in zip(
            batch.sequence_ids, batch.starts, batch.counts, batch.samples, strict=True
        ):
            sequence = live[sequence_id]
            sequence.num_computed_tokens = end = start + count
            if samples and end + 1 < sequence.end_length and sequence.params.constraint is None:
                sequence.num_pending_tokens += 1

    def void(self, sequence: Sequence) -> None:
        """A sequence loses its seat: what is under way is nothing to it any more."""
        for launched in self._under_way:
            launched.void.add(sequence.sequence_id)
        sequence.num_pending_tokens = 0

    def begin_anew(self) -> None:
        """Nothing is under way any more, whatever was."""
        self._under_way.clear()
        for sequence in self._live.values():
            sequence.num_pending_tokens = 0

    def check_integrity(self) -> None:
        """Hold what each sequence waits for against what is under way.

        Raises:
            RuntimeError: they contradict each other.
        """
        most, wrong = len(self._under_way), []
        for sequence in self._live.values():
            may_wait_for = most if sequence.seat >= 0 else 0
            is_ahead = sequence.num_computed_tokens > sequence.num_tokens
            if is_ahead or not 0 <= sequence.num_pending_tokens <= may_wait_for:
                wrong.append(sequence.sequence_id)
        if wrong:
            raise RuntimeError(f"sequences {wrong[:8]} wait for tokens that are not under way")

    def apply(self, batch: ScheduledBatch, output: StepOutput, now: float, update: StepUpdate) -> None:
        """Apply what a step gave back and fill `update` row by row.

        Args:
            batch: the oldest step under way; without any, the one that was planned last.

        Raises:
            RuntimeError: an older one is under way.
        """
        late, void = self._take(batch)
        told = update.logprobs
        live, failures, logprobs = self._live, output.failures, output.logprobs
        forced, accepted = output.forced, output.accepted
        has_more = bool(logprobs or forced or accepted)
        num_dropped = 0
        columns = zip(batch.sequence_ids, batch.starts, batch.counts, batch.samples, output.token_ids, strict=True)
        for row, (sequence_id, start, count, samples, token_id) in enumerate(columns):
            sequence = live.get(sequence_id)
            if sequence is None or (sequence_id in void if late else sequence.num_computed_tokens != start):
                num_dropped += 1
                continue
            if failures and row in failures:
                self.end(sequence, FinishReason.ERROR, update, failures[row])
                continue
            end = start + count
            if not late:
                sequence.num_computed_tokens = end
            elif samples and sequence.num_pending_tokens:
                sequence.num_pending_tokens -= 1
            if end >= sequence.next_full:
                self._kv_cache.remember(sequence, end)
            if sequence.first_token_time is None:
                self._counters.count_prompt(sequence, end)
                if samples:
                    sequence.first_token_time = now
            if samples:
                sequence.token_ids.append(token_id)
                update.tokens.append((sequence_id, token_id))
                if token_id in sequence.stop_token_ids or end + 1 >= sequence.end_length:
                    self.end_if_due(sequence, update)
                if has_more:
                    if row in logprobs:
                        told[sequence_id] = [logprobs[row]]
                    self._add_more(sequence, forced.get(row, ()), update)
                    self._add_more(sequence, accepted.get(row, ()), update, were_drafted=True)
        self._counters.count_step(batch, num_dropped)

    def end_if_due(self, sequence: Sequence, update: StepUpdate) -> None:
        """End a sequence whose last token ends it."""
        reason = sequence.end_reason
        if reason is not None:
            self._outlook.admission.observe(sequence)
            self.end(sequence, reason, update)

    def end(self, sequence: Sequence, reason: FinishReason, update: StepUpdate, error: str | None = None) -> None:
        """End a sequence; `error` is why it failed, if it did."""
        self._finish(sequence, reason)
        update.endings.append(Ending(sequence.sequence_id, reason, error))

    def _take(self, batch: ScheduledBatch) -> tuple[bool, Collection[int]]:
        """Whether a step was launched before, and whose rows of it mean nothing then."""
        if not self._under_way:
            return False, ()
        if self._under_way[0].step != batch.step:
            raise RuntimeError(f"step {batch.step} came back before step {self._under_way[0].step}")
        return True, self._under_way.popleft().void

    def _add_more(
        self, sequence: Sequence, token_ids: Iterable[int], update: StepUpdate, *, were_drafted: bool = False
    ) -> None:
        """Add what came with a drawn token, up to the end; with each that was drafted one more has been computed."""
        for token_id in token_ids:
            if sequence.is_finished:
                return
            if were_drafted:
                sequence.num_computed_tokens += 1
                if sequence.num_computed_tokens >= sequence.next_full:
                    self._kv_cache.remember(sequence, sequence.num_computed_tokens)
                self._counters.num_accepted_tokens += 1
            sequence.token_ids.append(token_id)
            update.tokens.append((sequence.sequence_id, token_id))
            self.end_if_due(sequence, update)
