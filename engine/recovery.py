"""What is done about a step that failed, or a state that contradicts itself. Rules alone: the actor makes the calls."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.batch import Ending
from engine.faults import IntegrityError, Notice, Seldom, lacks_memory, let_go, smaller_steps
from engine.relief import Relief
from engine.sequence import FinishReason, SamplingParams, Sequence
from engine.trials import CONTROL, MAX_FAILED_CONTROLS, Trials, Verdict

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

    - where the state contradicted itself, that was all;
    - else the sequences of the step are tried again as they were, and apart if it fails again (`engine.trials`);
    - where it is memory that runs out again, the limits are lowered first, as long as there is anything to lower. They
      come back: at once when one request alone was the cause, else step by step (`engine.relief`).

    Args:
        notify: told of what people want to know.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, notify: Callable[[Notice], None]) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._notify = notify
        self._trials = Trials()
        self._relief = Relief()
        self._seldom = Seldom()
        self._cause = ""
        self._why = ""  # something was lowered

    @property
    def is_trying(self) -> bool:
        """Whether somebody is tried, while all others are set aside."""
        return bool(self._trials.group)

    @property
    def is_hopeless(self) -> bool:
        """Whether no request is to blame and nothing can be computed any more."""
        return self._trials.is_hopeless

    @property
    def raises_at(self) -> float:
        """When limits that were lowered are raised again, in seconds on the engine's clock."""
        return math.inf if self.is_trying else self._relief.due

    def raise_limits(self, now: float) -> None:
        """Take back a step of what was lowered, once that is due."""
        if now >= self.raises_at:
            changes = self._set(self._relief.step_back(self._scheduler.limits, now))
            self._tell_changes(changes, "steps failed with more a while ago, and it is tried again")

    def begin_anew(self, error: Exception, batch: ScheduledBatch | None, update: StepUpdate, now: float) -> list[int]:
        """Make the state anew and decide who may go on now.

        Args:
            error: what was raised; its frames are cleared, so that they hold no memory any more.
            batch: the step that failed; `None` where it could not even be planned.
            update: what was applied of it; those that came to their end are added.

        Returns:
            Those who lose their seat by it.
        """
        self._cause = type(error).__name__
        if isinstance(error, IntegrityError):
            self._note_violation(error)
        else:
            self._note_failure(error, batch, now)
        let_go(error)
        lost = self._scheduler.begin_anew(update)
        if not isinstance(error, IntegrityError):
            self._judge(error, batch, update, now)
        self._scheduler.admit_only(self._trials.group or None)
        if CONTROL not in self._trials.group:
            self._scheduler.abort(CONTROL, FinishReason.ERROR)  # where it had failed
        elif CONTROL not in [sequence.sequence_id for sequence in self._scheduler.sequences]:
            self._scheduler.add(make_control(self._trials.group[CONTROL]))
        return lost

    def look(self, now: float, *, is_stuck: bool = False) -> list[int]:
        """A step did not fail while somebody is tried.

        Args:
            is_stuck: of those that are tried nobody can sit.

        Returns:
            Those who lose their seat by it: they have passed, and others are to be tried.
        """
        group = self._trials.group
        computed = {sequence.sequence_id: sequence.num_computed_tokens for sequence in self._scheduler.sequences}
        if self._trials.look(computed.get, is_stuck=is_stuck) is not None:
            self._acquit(now)
        if self._trials.group is group:
            return []
        return self._scheduler.admit_only(self._trials.group or None)

    def why_hopeless(self, error: Exception) -> str:
        """One line for the end of the process."""
        return (
            f"nothing can be computed any more: the engine's own request failed too, {MAX_FAILED_CONTROLS} times in a "
            f"row, the last time with: {type(error).__name__}"
        )

    def _judge(self, error: Exception, batch: ScheduledBatch | None, update: StepUpdate, now: float) -> None:
        """Lower the limits or try somebody apart, and act upon what comes out."""
        if not self.is_trying:
            self._relief.begin()
            self._why = ""
        elif lacks_memory(error) and (lowered := smaller_steps(self._scheduler.limits)):
            self._lower(lowered, f"a step ran out of memory ({self._cause})", now)
            return
        suspects = self._suspects(batch)
        match self._trials.fail(suspects):
            case Verdict.GUILTY:
                self._convict(update, now)
            case Verdict.TOO_MANY:
                num_apart = (len(suspects) + 1) // 2
                if num_apart < self._scheduler.limits.max_num_seqs:
                    why = f"steps fail with more requests at once ({self._cause})"
                    self._lower({"max_num_seqs": num_apart}, why, now)
                self._acquit(now)
            case Verdict.INNOCENT:
                self._acquit(now)

    def _suspects(self, batch: ScheduledBatch | None) -> dict[int, int]:
        """Who may be at fault, with the tokens that each would have computed."""
        live = {sequence.sequence_id: sequence.num_tokens for sequence in self._scheduler.sequences}
        if batch is None:
            group = self._trials.group
            return {sequence_id: known for sequence_id, known in live.items() if not group or sequence_id in group}
        rows = zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
        return {sequence_id: start + count for sequence_id, start, count in rows if sequence_id in live}

    def _convict(self, update: StepUpdate, now: float) -> None:
        self._set(self._relief.undo(self._scheduler.limits))
        sequence = self._scheduler.abort(self._trials.accused, FinishReason.ERROR)
        if sequence is None:
            return  # its caller has left meanwhile
        why = f"The model failed in each step with this request: {self._cause}."
        update.endings.append(Ending(sequence.sequence_id, FinishReason.ERROR, why))
        self._tell(f"A request failed each step it was in ({self._cause}) and ended with an error", "guilty", now)

    def _acquit(self, now: float) -> None:
        """Nobody is to blame. What was lowered on the way here is told now, as one change."""
        changes = self._relief.changes(self._scheduler.limits)
        if changes:
            self._tell_changes(changes, self._why)
        else:
            text = f"A step failed ({self._cause}); computed again it did not, and nothing was lost"
            self._tell(text, "innocent", now)

    def _tell(self, text: str, kind: str, now: float) -> None:
        """Give notice of a fault, not more than once a second."""
        num_untold = self._seldom.ask(kind, now)
        if num_untold is None:
            return
        if num_untold:
            text += f" (and {num_untold} times more since that was last told)"
        log.warning("%s", text)
        self._notify(Notice("fault", text))

    def _tell_changes(self, changes: Mapping[str, tuple[int, int]], why: str) -> None:
        if not changes:
            return
        log.error("%s: %s", why, ", ".join([f"{name} {old} to {new}" for name, (old, new) in changes.items()]))
        self._notify(Notice("memory", why, changes))

    def _lower(self, lowered: Mapping[str, int], why: str, now: float) -> None:
        self._why = why
        self._relief.lower(self._scheduler.limits, lowered, now)
        self._set(lowered)

    def _set(self, values: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Set limits; gives old and new values."""
        limits = self._scheduler.limits
        if values:
            new: dict[str, Any] = {**values}
            self._scheduler.set_limits(replace(limits, generation=limits.generation + 1, **new))
        return {name: (getattr(limits, name), value) for name, value in values.items()}

    def _note_failure(self, error: Exception, batch: ScheduledBatch | None, now: float) -> None:
        self._stats.num_failed_steps += 1
        num_untold = self._seldom.ask(self._cause, now)
        if num_untold is not None:
            what = "planning a step" if batch is None else f"step {batch.step} with sequences {batch.sequence_ids[:64]}"
            told = "%s failed; its state is made anew (%d more with %s since the last such line)"
            log.error(told, what, num_untold, self._cause, exc_info=error)

    def _note_violation(self, error: IntegrityError) -> None:
        self._stats.num_integrity_violations += 1
        scheduler, usage = self._scheduler, self._scheduler.kv_cache.usage
        tables = {sequence.sequence_id: sequence.block_ids for sequence in scheduler.sequences if sequence.block_ids}
        log.error(
            "the state contradicts itself and is made anew: %s (%s; %d run, %d wait; tables %s)",
            error, usage, scheduler.num_running, scheduler.num_waiting, str(tables)[:MAX_EVIDENCE_CHARACTERS],
        )  # fmt: skip
        self._notify(Notice("integrity", f"The engine's state contradicted itself and was made anew: {error}"))


def make_control(num_tokens: int) -> Sequence:
    """The engine's own request: a token is read, and some are drawn. It has what every request has, a way to stop."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=1, stop_token_ids=frozenset({0}))
    return Sequence(CONTROL, "the engine's own", (0,), params, arrival_time=0.0)
