"""How many may wait, and who is told to come back later. Decided from memory, before anything is tokenized.

Each class of work has a room of its own: background work keeps no interactive work out. Within a room no key keeps the
others out: where it is full, one that has less than its share in it still gets in. The share is the limit divided by
the keys that have something open, so of `n` keys no more than `limit * (1 + 1/2 + … + 1/n)` wait.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import DrainingError, LateError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.handle import GenerationRequest, Handle
    from engine.scheduler import Scheduler
    from engine.stats import ClassStats, Rate, Stats

MAX_RETRY_AFTER_SECONDS = 60
UNKNOWN_RETRY_AFTER_SECONDS = 5  # nothing has finished yet
# Half of the first tokens come later than the rate of reading says, for that is a mean. In simulated overloads of few
# seats, the worst case, nineteen in twenty came within so many times of it.
CERTAINTY = 1.5
# Where everybody answered for hours and nobody was read, the rate is next to nothing.
FARTHEST_SECONDS = 86_400.0


class Forecast(NamedTuple):
    """Within so many seconds a request has a seat and its first token, nineteen times in twenty."""

    seat: float
    first_token: float


class Door:
    """The open requests, and whether another one may come in.

    Args:
        step_started: when the step under way began; `None` between two steps.

    Attributes:
        on_added: told of each request that comes in; must not raise.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, step_started: Callable[[], float | None]) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._step_started = step_started
        self.on_added: Callable[[GenerationRequest], object] | None = None
        self._ends_at: float | None = None
        self._open: tuple[dict[int, Handle], dict[int, Handle]] = ({}, {})  # interactive, background
        self._num_open: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # by key

    def __len__(self) -> int:
        return len(self._open[0]) + len(self._open[1])

    def __iter__(self) -> Iterator[Handle]:
        return chain(*[opened.values() for opened in self._open])

    def add(self, handle: Handle) -> None:
        """It came in."""
        self._open[handle.request.background][handle.sequence_id] = handle
        self._num_open[handle.request.background][handle.request.key] += 1
        if self.on_added is not None:
            self.on_added(handle.request)

    def remove(self, handle: Handle) -> None:
        """It has ended."""
        background, key = handle.request.background, handle.request.key
        del self._open[background][handle.sequence_id]
        self._num_open[background][key] -= 1
        if not self._num_open[background][key]:
            del self._num_open[background][key]

    def find(self, number: int) -> Handle | None:
        """The open request of that sequence id."""
        return self._open[0].get(number) or self._open[1].get(number)

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._ends_at is not None

    def end(self, at: float) -> None:
        """Let nobody in any more; the server will have ended by then."""
        self._ends_at = at

    def check_open(self, *, background: bool, key: str, now: float) -> None:
        """Say whether a request of that class and key may come in, whatever else it is.

        Raises:
            DrainingError: nobody may.
            QueueFullError: as many of its class wait as may, and of its key as many as is its share.
        """
        if self._ends_at is not None:
            raise DrainingError(retry_after_seconds=_whole(self._ends_at - now))
        if self._scheduler.limits.draining:
            raise DrainingError(is_ending=False)
        depth, limit = self._depth(background), self._scheduler.limits.max_waiting
        if depth < limit or self._num_waiting(background, key) < self._share(limit, background, key):
            return
        raise QueueFullError("requests", depth, limit, retry_after_seconds=self.retry_after(background, now))

    def check_tokens(self, handle: Handle, token_ids: tuple[int, ...], now: float) -> None:
        """Look at a handle whose prompt has these tokens. One alone of its key is never too long.

        Raises:
            QueueFullError: it cannot wait beside those of its class.
            LateError: `Limits.slo_admission` is on, and its first token would come too late.
        """
        background, key, num_tokens = handle.request.background, handle.request.key, len(token_ids)
        waiting, limit = self._waiting_tokens(background), self._scheduler.limits.max_waiting_tokens
        depth, own = waiting.total(), waiting[key]
        if own and depth + num_tokens > limit and own + num_tokens > self._share(limit, background, key):
            seconds = self._seconds_until_half(depth, self._class_stats(background).finish_token_rate, background, now)
            raise QueueFullError("prompt tokens", depth, limit, retry_after_seconds=seconds)
        if self._scheduler.limits.slo_admission and handle.after is None:
            self._check_in_time(handle, token_ids, now)

    def retry_after(self, background: bool, now: float) -> int:
        """Whole seconds until about half of the requests of a class that wait will be gone."""
        return self._seconds_until_half(
            self._depth(background), self._class_stats(background).finish_rate, background, now
        )

    def predict(self, handle: Handle, token_ids: tuple[int, ...], now: float) -> Forecast | None:
        """When an open request with these prompt tokens has its first one.

        What comes before it is to be read, and itself. Where it has to wait for a seat, that is at the rate at which
        prompts were read lately while seats were short. Else it is as fast as by steps that had more to read than they
        could, for others do not show it. What was measured long ago keeps nobody out who would be read at once: who is
        refused is never read, so it would stay so. Between keys the queue is fair: of another key's work no more comes
        first than this one's key has.

        Returns:
            `None` while nothing is measured.
        """
        scheduler, stats, background = self._scheduler, self._stats, handle.request.background
        unread = sum([max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in scheduler.running])
        waiting = self._waiting_tokens(background, with_followers=False)
        own = len(token_ids)
        most = waiting[handle.request.key] + own
        before = unread + sum([min(tokens, most) for tokens in waiting.values()])
        if background:
            before += self._waiting_tokens(False, with_followers=False).total()
        depth = self._depth(background)
        rate = stats.full_prompt_rate.per_second if depth else None
        if not rate:
            rate = stats.reading_rate.per_second
            is_first = before <= scheduler.limits.max_num_batched_tokens
            if not rate or (is_first and not stats.knows_reading(now)):
                return None
            own -= scheduler.kv_cache.num_cached(handle.request.cache_root, token_ids)
        seat, last, longest = (before if depth else 0), before + own, FARTHEST_SECONDS
        return Forecast(min(CERTAINTY * seat / rate, longest), min(CERTAINTY * last / rate, longest))

    def _check_in_time(self, handle: Handle, token_ids: tuple[int, ...], now: float) -> None:
        request, forecast = handle.request, self.predict(handle, token_ids, now)
        if forecast is None:
            return
        allowed = request.timeout_seconds
        if allowed is None:
            allowed = self._class_stats(request.background).slo.ttft_p95_seconds or math.inf
        for seconds, most, of_seat in (
            (forecast.seat, request.seated_within_seconds, True),
            (forecast.first_token, min(allowed, request.ends_within_seconds), False),
        ):
            predicted = now - handle.arrival_time + seconds
            if predicted > most:
                raise LateError(predicted, most, retry_after_seconds=_whole(predicted - most), of_seat=of_seat)

    def _depth(self, background: bool) -> int:
        """Requests of a class beyond those that run and those that the next step will seat."""
        scheduler = self._scheduler
        work, other = scheduler.classes[background], scheduler.classes[not background]
        seats = len(work.running)
        if work.wait_reason is None:
            seats = max(seats, scheduler.limits.max_num_seqs - len(other.running))
        return max(0, len(self._open[background]) - seats)

    def _num_waiting(self, background: bool, key: str) -> int:
        """Open requests of a key that do not run."""
        account = self._scheduler.classes[background].fairness.accounts.get(key)
        return self._num_open[background][key] - (0 if account is None else account.num_seats)

    def _share(self, limit: int, background: bool, key: str) -> int:
        return limit // len(self._num_open[background].keys() | {key})

    def _waiting_tokens(self, background: bool, *, with_followers: bool = True) -> Counter[str]:
        """Prompt tokens of those that came in and do not run, by key.

        Args:
            with_followers: also those that wait for another one of their prompt and will read next to nothing of it.
        """
        found: Counter[str] = Counter()
        for handle in self._open[background].values():
            sequence = handle.sequence
            waits = sequence is None or (sequence.seat < 0 and not sequence.is_finished)
            if waits and (with_followers or handle.after is None):
                found[handle.request.key] += handle.num_prompt_tokens
        return found

    def _class_stats(self, background: bool) -> ClassStats:
        return self._stats.background if background else self._stats.interactive

    def _seconds_until_half(self, depth: int, rate: Rate, background: bool, now: float) -> int:
        """Until about half of what waits is gone, if as much goes in a second as lately.

        Where nothing has ended in that time, as long again as the one that came first has been here; and as long again
        as the step under way has taken, which is next to nothing unless it hangs.
        """
        per_second = rate.per_second(now)
        first = next(iter(self._open[background].values()), None)
        unknown = max(UNKNOWN_RETRY_AFTER_SECONDS, 0 if first is None else now - first.arrival_time)
        seconds = depth / 2 / per_second if per_second else unknown
        started = self._step_started()
        return _whole(seconds if started is None else max(seconds, now - started))


def _whole(seconds: float) -> int:
    """As `Retry-After` has it."""
    return max(1, math.ceil(min(round(seconds, 6), MAX_RETRY_AFTER_SECONDS)))
