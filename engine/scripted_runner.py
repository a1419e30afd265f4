"""A runner whose answers are as long as they are told to be, for measuring: the work is real, the endings are scripted.

A measurement wants answers whose lengths are those of a workload, and every policy must be given the same ones. So the
length travels with the request as `min_tokens`: before it the sampler holds the stop tokens back, and the token after
it is replaced by one. Everything else is the wrapped runner's own work, paid in full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.batch import ScheduledBatch, StepOutput
    from engine.stepper import Runner, Ticket


class _ScriptedStep(NamedTuple):
    """A step under way: its batch, the tokens that it is to end with by row, and what the runner knows it by."""

    batch: ScheduledBatch
    ends: dict[int, int]
    inner: Ticket


class ScriptedRunner:
    """Ends each answer at `min_tokens + 1` tokens, by a stop token.

    Args:
        runner: does the work.
        on_step: told about each batch after it was computed, on the thread that computes.
    """

    def __init__(self, runner: Runner, on_step: Callable[[ScheduledBatch], None] | None = None) -> None:
        self._runner = runner
        self._on_step = on_step
        # Seat to (where the last token of the answer stands in its sequence, the token that ends it).
        self._endings: dict[int, tuple[int, int]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether the runner that does the work does."""
        return self._runner.overlaps

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch; rows that reach their last token get a stop token for the one that was drawn.

        Raises:
            ValueError: a sequence has no stop token, or a row has drafts, behind which an answer could end unseen.
        """
        return self.collect(self.launch(batch))

    def launch(self, batch: ScheduledBatch) -> _ScriptedStep:
        """Begin a step; raises as `execute` does."""
        if batch.drafts:
            raise ValueError("scripted answers have no drafts: set num_speculative_tokens to 0")
        for seated in batch.seated:
            last = seated.num_prompt_tokens + seated.params.min_tokens
            if not seated.params.stop_token_ids:
                raise ValueError(f"sequence {seated.sequence_id} has no stop token to end with")
            self._endings[seated.seat] = (last, min(seated.params.stop_token_ids))
        # Before the next step is launched, in which a seat may be another's.
        return _ScriptedStep(batch, self._ends_of(batch), self._runner.launch(batch))

    def collect(self, ticket: _ScriptedStep) -> StepOutput:
        """What came of a step that was launched."""
        output = self._runner.collect(ticket.inner)
        if self._on_step is not None:
            self._on_step(ticket.batch)
        ends = {row: token_id for row, token_id in ticket.ends.items() if row not in output.failures}
        if not ends:
            return output
        return replace(output, token_ids=tuple([ends.get(row, i) for row, i in enumerate(output.token_ids)]))

    def reset(self) -> None:
        """Forget every sequence."""
        self._endings.clear()
        self._runner.reset()

    def _ends_of(self, batch: ScheduledBatch) -> dict[int, int]:
        """Rows that come to the end of their answer, with the token that ends it."""
        columns = zip(batch.seats, batch.starts, batch.counts, batch.samples, strict=True)
        ends: dict[int, int] = {}
        for row, (seat, start, count, samples) in enumerate(columns):
            last, stop_token_id = self._endings[seat]
            if samples and start + count == last:
                ends[row] = stop_token_id
        return ends
