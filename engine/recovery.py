"""What is done about a step that failed, or a state that contradicts itself. Rules alone: the actor makes the calls."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.batch import Ending
from engine.faults import IntegrityError, Notice, lacks_memory, smaller_steps
from engine.sequence import FinishReason, SamplingParams, Sequence
from engine.trials import CONTROL, CONTROL_TOKENS, MAX_FAILED_CONTROLS, Trials, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.batch import ScheduledBatch, StepUpdate
    from engine.scheduler import Scheduler
    from engine.stats import Stats

log = logging.getLogger("relevo.engine")

MAX_EVIDENCE_CHARACTERS = 2000


class Recovery:
    """Brings a scheduler back after a fault, and loses as few requests by it as can be.

    Whatever failed, the state is made anew: everybody waits, and what is known of each is computed again. The noise of
    a draw depends on its place alone, so answers go on as if nothing had happened. Then:

    - where memory ran out, the limits are lowered, as long as there is anything to lower;
    - where the state contradicted itself, that was all;
    - else the sequences of the step are tried apart (`engine.trials`).

    Args:
        notify: told of what people want to know.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, notify: Callable[[Notice], None]) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._notify = notify
        self._trials = Trials()
        self._cause = ""

    @property
    def is_trying(self) -> bool:
        """Whether somebody is tried, while all others are set aside."""
        return bool(self._trials.group)

    @property
    def is_hopeless(self) -> bool:
        """Whether no request is to blame and nothing can be computed any more."""
        return self._trials.is_hopeless

    def begin_anew(self, error: Exception, batch: ScheduledBatch | None, update: StepUpdate) -> list[int]:
        """Make the state anew and decide who may go on now.

        Args:
            batch: the step that failed; `None` where it could not even be planned.
            update: what was applied of it; those that had come to their end are added.

        Returns:
            Those who lose their seat by it.
        """
        self._cause = type(error).__name__
        if isinstance(error, IntegrityError):
            self._note_violation(error)
        else:
            self._note_failure(error, batch)
            lowered = smaller_steps(self._scheduler.limits) if lacks_memory(error) else {}
            suspects = self._suspects(batch)
            if lowered:
                self._lower(lowered, f"a step ran out of memory ({self._cause})")
            elif suspects or batch is None:
                self._trials.fail(suspects)
        lost = self._scheduler.begin_anew(update)
        self._scheduler.admit_only(self._trials.group or None)
        if CONTROL not in self._trials.group:
            self._scheduler.abort(CONTROL, FinishReason.ERROR)  # where it had failed
        elif CONTROL not in [sequence.sequence_id for sequence in self._scheduler.sequences]:
            self._scheduler.add(make_control())
        return lost

    def look(self, update: StepUpdate, *, is_stuck: bool = False) -> list[int]:
        """A step did not fail while somebody is tried; the accused may have to end, which is added to `update`.

        Args:
            is_stuck: of those that are tried nobody can sit.

        Returns:
            Those who lose their seat by it: they have passed, and others are to be tried.
        """
        computed = {sequence.sequence_id: sequence.num_computed_tokens for sequence in self._scheduler.sequences}
        group = self._trials.group
        verdict = self._trials.look(computed.get, is_stuck=is_stuck)
        if verdict is Verdict.GUILTY:
            self._convict(update)
        elif verdict is not None:
            self._acquit(verdict)
        return [] if self._trials.group is group else self._scheduler.admit_only(self._trials.group or None)

    def why_hopeless(self, error: Exception) -> str:
        """One line for the end of the process."""
        return (
            f"nothing can be computed any more: the engine's own request failed too, {MAX_FAILED_CONTROLS} times in a "
            f"row, the last time with: {type(error).__name__}"
        )

    def _suspects(self, batch: ScheduledBatch | None) -> dict[int, int]:
        """Who may be at fault, with the tokens that each would have computed, and one more."""
        live = {sequence.sequence_id: sequence.num_tokens + 1 for sequence in self._scheduler.sequences}
        if batch is None:
            group = self._trials.group
            return {sequence_id: goal for sequence_id, goal in live.items() if not group or sequence_id in group}
        rows = zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
        return {sequence_id: start + count + 1 for sequence_id, start, count in rows if sequence_id in live}

    def _convict(self, update: StepUpdate) -> None:
        sequence = self._scheduler.abort(self._trials.accused, FinishReason.ERROR)
        if sequence is None:
            return  # its caller has left meanwhile
        why = f"The model failed in each step with this request: {self._cause}."
        update.endings.append(Ending(sequence.sequence_id, FinishReason.ERROR, why))
        self._notify(Notice("fault", f"A request failed each step it was in ({self._cause}) and ended with an error"))

    def _acquit(self, verdict: Verdict) -> None:
        num_apart = self._trials.num_apart
        if verdict is Verdict.TOO_MANY and num_apart < self._scheduler.limits.max_num_seqs:
            self._lower({"max_num_seqs": num_apart}, f"steps fail with more requests at once ({self._cause})")
            return
        log.warning("what failed with %s does not fail again; no request was lost", self._cause)
        self._notify(Notice("fault", f"A step failed ({self._cause}); computed again it did not, and nothing was lost"))

    def _lower(self, lowered: Mapping[str, int], why: str) -> None:
        limits = self._scheduler.limits
        changes = {name: (getattr(limits, name), value) for name, value in lowered.items()}
        values: dict[str, Any] = {**lowered}
        self._scheduler.set_limits(replace(limits, generation=limits.generation + 1, **values))
        told = ", ".join([f"{name} {old} to {new}" for name, (old, new) in changes.items()])
        log.error("%s: lowered %s", why, told)
        self._notify(Notice("memory", why, changes))

    def _note_failure(self, error: Exception, batch: ScheduledBatch | None) -> None:
        self._stats.num_failed_steps += 1
        what = "planning a step" if batch is None else f"step {batch.step} with sequences {batch.sequence_ids[:64]}"
        log.error("%s failed; its state is made anew", what, exc_info=error)

    def _note_violation(self, error: IntegrityError) -> None:
        self._stats.num_integrity_violations += 1
        scheduler, usage = self._scheduler, self._scheduler.kv_cache.usage
        tables = {sequence.sequence_id: sequence.block_ids for sequence in scheduler.sequences if sequence.block_ids}
        log.error(
            "the state contradicts itself and is made anew: %s (%s; %d run, %d wait; tables %s)",
            error, usage, scheduler.num_running, scheduler.num_waiting, str(tables)[:MAX_EVIDENCE_CHARACTERS],
        )  # fmt: skip
        self._notify(Notice("integrity", f"The engine's state contradicted itself and was made anew: {error}"))


def make_control() -> Sequence:
    """The engine's own request: a token is read, and two are drawn. It has what every request has, a way to stop."""
    params = SamplingParams(temperature=0.0, max_tokens=CONTROL_TOKENS, min_tokens=1, stop_token_ids=frozenset({0}))
    return Sequence(CONTROL, "the engine's own", (0,), params, arrival_time=0.0)
