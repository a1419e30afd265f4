"""Everything that can go wrong and that a user can mend, as one tree.

    RelevoError
    ├── ConfigError                  a setting is unknown or out of range
    ├── ModelError                   a model cannot be found, read or run
    │   ├── ModelNotFoundError
    │   ├── ModelFileError           truncated, wrong checksum, not what it claims to be
    │   └── UnsupportedModelError    architecture, tensor type or RoPE kind that is not known here
    ├── RequestError                 this one request cannot be served as it stands
    │   ├── InvalidRequestError
    │   └── ContextLengthError
    ├── UnavailableError             the same request may succeed later
    │   ├── QueueFullError
    │   ├── LateError                its first token would come too late
    │   ├── QueueTimeoutError        it has waited for a seat for as long as it may
    │   ├── BusyError                the server has too much in hand to look at it
    │   ├── DrainingError
    │   └── CutError                 the server ended before its answer did
    └── EngineError                  a request that was accepted could not be finished
        └── ConstraintError          for its answer cannot be continued under its constraint

Each message is one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class RelevoError(Exception):
    """Base of every error that is meant for a user."""


class ConfigError(RelevoError):
    """A setting is unknown, out of range or contradicts another."""


class ModelError(RelevoError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no such model here, and it could not be fetched."""


class ModelFileError(ModelError):
    """A model file is damaged, incomplete or of another kind than its name says."""


class UnsupportedModelError(ModelError):
    """The file is fine, but this architecture, tensor type or option is not supported."""


class RequestError(RelevoError):
    """One request cannot be served as it stands.

    Args:
        message: what is wrong and what would be right.
        param: the request field at fault, or `None`.
        code: a stable word for programs, or `None`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    """A field has a value that makes no sense or is not supported."""


class ContextLengthError(RequestError):
    """The prompt alone is longer than the usable capacity, in tokens (`at_least`: it was not counted to its end)."""

    def __init__(
        self, num_prompt_tokens: int, capacity: int, *, param: str | None = None, at_least: bool = False
    ) -> None:
        super().__init__(
            f"The prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, "
            f"but at most {capacity} fit here. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.capacity = capacity


class UnavailableError(RelevoError):
    """The server cannot take the request now; the same request may succeed later.

    Args:
        retry_after_seconds: when to come back; at least 1.
        facts: what a program may want to know beside that.
    """

    code = "unavailable"

    def __init__(
        self, message: str, *, retry_after_seconds: int, facts: Mapping[str, int | float | str] | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = max(1, retry_after_seconds)
        self.facts = {**(facts or {}), "retry_after_seconds": self.retry_after_seconds}


class QueueFullError(UnavailableError):
    """Too many requests, or too many prompt tokens, wait already.

    Args:
        what: `requests` or `prompt tokens`; `depth` and `limit` are so many of them.
    """

    code = "queue_full"

    def __init__(self, what: str, depth: int, limit: int, *, retry_after_seconds: int) -> None:
        super().__init__(
            f"The queue is full: {depth} {what} wait, the limit is {limit}. Try again in {retry_after_seconds} s.",
            retry_after_seconds=retry_after_seconds,
            facts={"what": what.replace(" ", "_"), "depth": depth, "limit": limit},
        )
        self.depth = depth
        self.limit = limit


class LateError(UnavailableError):
    """The first token would come later than the request, or its class of work, can wait for it.

    Args:
        predicted, allowed: seconds.
        of_seat: these are of the wait for a seat, which alone takes too long.
    """

    code = "late"

    def __init__(self, predicted: float, allowed: float, *, retry_after_seconds: int, of_seat: bool = False) -> None:
        what, name = ("A seat", "queue") if of_seat else ("The first token", "ttft")
        facts = {f"predicted_{name}_seconds": round(predicted, 3), f"allowed_{name}_seconds": round(allowed, 3)}
        super().__init__(
            f"{what} is expected after {predicted:.2f} s, and {allowed:.6g} s are allowed. "
            f"Try again in {retry_after_seconds} s.",
            retry_after_seconds=retry_after_seconds,
            facts=facts,
        )


class QueueTimeoutError(UnavailableError):
    """No seat became free for the request in the time that it may wait for one."""

    code = "queue_timeout"

    def __init__(self, *, retry_after_seconds: int) -> None:
        message = f"The request waited for a seat for as long as it may. Try again in {retry_after_seconds} s."
        super().__init__(message, retry_after_seconds=retry_after_seconds)


class BusyError(UnavailableError):
    """So much is being read, or so many connections are open, that this one would be more than may be held."""

    code = "busy"


class DrainingError(UnavailableError):
    """The server finishes what it has and takes nothing new."""

    code = "draining"

    def __init__(self, *, is_ending: bool = True, retry_after_seconds: int = 5) -> None:
        why = "is shutting down" if is_ending else "was told by its operator to finish what it has"
        super().__init__(f"The server {why} and takes no new requests.", retry_after_seconds=retry_after_seconds)


class CutError(UnavailableError):
    """The server ends, and an answer took longer than it waits for."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("The answer was cut because the server is stopping.", retry_after_seconds=5)


class EngineError(RelevoError):
    """An accepted request could not be finished; it is not the request's fault."""


class ConstraintError(EngineError):
    """One answer cannot be continued under its constraint.

    Args:
        own_fault: the constraint itself cannot be followed, however often it is tried.
    """

    def __init__(self, message: str, *, own_fault: bool = False) -> None:
        super().__init__(message)
        self.own_fault = own_fault

    @property
    def cause(self) -> str:
        """For the answer's ending."""
        return OwnFault(self) if self.own_fault else str(self)


class OwnFault(str):
    """Why an answer did not reach its end, where that lies in its request."""

    __slots__ = ()
