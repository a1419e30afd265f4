"""How much an API key may ask for: requests at once, requests a minute, tokens a minute. Time comes in as an argument.

*When what is charged.* A request when it comes in, its prompt when it has been accepted, its answer as it comes, token
by token; all of it is brought to account whenever somebody looks. A request that was at fault has cost its checking and
stays charged; one that the server could not take is given back. A request is let in while anything is left, however
much it will take: nobody knows how long an answer will be, and a stream that runs is never cut. What goes over is paid
back: until then the key's next request is refused. So the average holds exactly, and `Retry-After` says when the debt
will be paid, if nothing that still runs adds to it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from app.errors import ApiError
from app.keys import NO_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.config_schema import KeyLimits
    from app.keys import KeyRecord
    from engine.handle import Handle

MINUTE: Final = 60.0
# Nobody knows when one of the running requests will end.
CONCURRENT_RETRY_SECONDS: Final = 1
# An answer of this status says that nothing was done: the queue is full, or the server is shutting down.
UNAVAILABLE: Final = 503


class RateLimitError(ApiError):
    """A key has had what it may have for now."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(429, f"{message} Try again in {retry_after_seconds} s.", code="rate_limit_exceeded")
        self.headers["Retry-After"] = str(retry_after_seconds)


class Bucket:
    """Holds what may be had; fills evenly, to a minute's worth at most; may be overdrawn, and is then filled up first.

    Args:
        per_minute: how much runs in, and how much it holds.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def take(self, amount: float, now: float) -> None:
        """Take out what is used now."""
        self._level, self._time = self.level(now) - amount, now

    def account(self, amount: float, now: float) -> None:
        """Take out what was used evenly since the last look, while more ran in."""
        self._level -= amount
        self.take(0, now)

    def level(self, now: float) -> float:
        """How much there is; below zero is debt."""
        return min(float(self.per_minute), self._level + (now - self._time) * self.per_minute / MINUTE)

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until so much is there, if nothing is taken."""
        # Rounded, so that what is there after exactly that time is seen to be there.
        return max(0.0, round((amount - self.level(now)) * MINUTE / self.per_minute, 6))


class Permit:
    """One request's leave to be answered; holds its place until it is closed.

    Args:
        handles: what the request has in the engine; the caller goes on adding to it.
    """

    def __init__(self, meter: Meter, handles: Sequence[Handle]) -> None:
        self._meter = meter
        self._num_charged = 0
        self._is_given_back = False
        self.handles = handles

    def take_uncharged(self) -> int:
        """Tokens that came since the last look. Several answers to one prompt have read it once."""
        prompts: dict[int, int] = {}
        for handle in self.handles:
            prompt = id(handle.request.prompt)
            prompts[prompt] = max(prompts.get(prompt, 0), handle.num_prompt_tokens)
        total = sum(prompts.values()) + sum([handle.outbox.num_tokens for handle in self.handles])
        fresh, self._num_charged = total - self._num_charged, total
        return fresh

    def give_back(self, now: float) -> None:
        """The server could not take the request: it does not count, unless the engine has taken some of it."""
        if not self._is_given_back and not any(handle.num_prompt_tokens for handle in self.handles):
            self._is_given_back = True
            self._meter.count_request(-1, now)

    def close(self, now: float) -> None:
        """The request is over. Harmless the second time."""
        self._meter.release(self, now)


class Meter:
    """What one key has had."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self._permits: set[Permit] = set()
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {what: Bucket(rate, now) for what, rate in rates.items() if rate is not None}

    def admit(self, handles: Sequence[Handle], now: float) -> Permit:
        """Let a request in that will have these handles.

        Raises:
            RateLimitError: one of the limits is reached.
        """
        self._settle(now)
        limit = self.limits.max_concurrent
        if limit is not None and len(self._permits) >= limit:
            message = (
                f"Rate limit reached for this API key: as many requests as may be at once ({limit}) are answered now."
            )
            raise RateLimitError(message, CONCURRENT_RETRY_SECONDS)
        seconds, why = max(((b.seconds_until(1, now), what) for what, b in self._buckets.items()), default=(0.0, ""))
        if seconds > 0:
            per_minute = self._buckets[why].per_minute
            message = f"Rate limit reached for this API key: {per_minute:,} {why} a minute."
            raise RateLimitError(message, math.ceil(seconds))
        self.count_request(1, now)
        permit = Permit(self, handles)
        self._permits.add(permit)
        return permit

    def release(self, permit: Permit, now: float) -> None:
        """A request is over: bring it to account and free its place."""
        self._settle(now)
        self._permits.discard(permit)

    def count_request(self, number: int, now: float) -> None:
        """Charge requests; below zero gives back."""
        if "requests" in self._buckets:
            self._buckets["requests"].take(number, now)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's `x-ratelimit-…` headers: the limit, what is left of it, and when it will be whole again."""
        self._settle(now)
        found = {}
        for what, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
            found[f"x-ratelimit-reset-{what}"] = span(bucket.seconds_until(bucket.per_minute, now))
        return found

    def is_as_new(self, now: float) -> bool:
        """Whether a fresh one would say the same: nothing runs, and all that was had has run in again."""
        full = all(bucket.level(now) >= bucket.per_minute for bucket in self._buckets.values())
        return full and not self._permits

    def _settle(self, now: float) -> None:
        if "tokens" in self._buckets:
            self._buckets["tokens"].account(sum([permit.take_uncharged() for permit in self._permits]), now)


class Limits:
    """The meters of all keys that have limits and were used lately.

    Args:
        find: the valid key of a name.
    """

    def __init__(self, find: Callable[[str], KeyRecord | None]) -> None:
        self._find = find
        self._meters: dict[str, Meter] = {}

    def admit(self, who: str, handles: Sequence[Handle], now: float) -> Permit | None:
        """Let a request of that key in, which will have these handles; `None` where the key has no limits.

        Raises:
            RateLimitError: one of the limits is reached.
        """
        meter = self._meter(who, now)
        return None if meter is None else meter.admit(handles, now)

    def headers(self, who: str, now: float) -> dict[str, str]:
        """What an answer tells the key about its limits; nothing where it has none."""
        meter = self._meter(who, now)
        return {} if meter is None else meter.headers(now)

    @property
    def num_meters(self) -> int:
        """How many keys are remembered."""
        return len(self._meters)

    def _meter(self, who: str, now: float) -> Meter | None:
        record = self._find(who)
        if record is None or record.limits == NO_LIMITS:
            return None
        meter = self._meters.get(record.identity)
        if meter is None:
            # Keys come and go; what nobody has used for a while is not kept for ever.
            self._meters = {key: one for key, one in self._meters.items() if not one.is_as_new(now)}
            meter = self._meters[record.identity] = Meter(record.limits, now)
        return meter


def span(seconds: float) -> str:
    """A time span as OpenAI writes it: `120ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes or hours else "") + f"{rest}s"
