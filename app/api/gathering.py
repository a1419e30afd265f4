"""The choices of one answer: handed to the engine together, read as one, and added up."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from app.api.envelope import Ending, Written
from app.api.parts import CallBegun
from engine.outbox import Timing, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.api.deadlines import Deadlines
    from app.api.parts import Part
    from app.api.planning import Plan
    from engine.batch import TokenLogprobs
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.outbox import Delta

# Of a token's text, in characters, where it was not counted.
TOKEN_SIZE: Final = 4
# Of what is told about one token, its text and its log-probability; there may be twenty others beside it.
_ENTRY_SIZE: Final = 64


class Gathering:
    """Reads several handles as one.

    Args:
        handles: a choice each, in the order of their indices.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.handles: list[Handle] = []
        self._news = trio.Event()
        self._at_once: Callable[[int], bool] | None = None
        for handle in handles:
            self.add(handle)

    def add(self, handle: Handle) -> None:
        """One more choice."""
        index = len(self.handles)
        self.handles.append(handle)
        handle.outbox.on_news = partial(self._ring, index)
        self._ring(index)  # something may have come before

    async def take(
        self, until: float = math.inf, at_once: Callable[[int], bool] | None = None
    ) -> list[tuple[int, Delta]]:
        """Wait for news of any choice and take all there is, by index; nothing when `until` has come first.

        Args:
            at_once: called with the index of a choice as soon as there is news of it, while this waits. Says whether
                that was all there is to do; then this goes on waiting. It runs in the engine's task: must not raise.
        """
        self._at_once = at_once
        try:
            with trio.move_on_at(until):
                await self._news.wait()
        finally:
            self._at_once = None
        self._news = trio.Event()
        found = [(index, handle.outbox.take_now()) for index, handle in enumerate(self.handles)]
        return [(index, delta) for index, delta in found if delta is not None]

    def abort(self, cause: str) -> None:
        """End all that have not ended."""
        for handle in self.handles:
            handle.abort(cause)

    def _ring(self, index: int) -> None:
        if self._news.is_set():
            return
        if self._at_once is None or not self._at_once(index):
            self._news.set()


class Choices:
    """What has become of each choice so far.

    Args:
        plan: what was asked.
    """

    def __init__(self, plan: Plan) -> None:
        self._num_choices = plan.body.n
        self._readers = [plan.make_reader() for _ in plan.requests]
        self._usages: dict[int, Usage] = {}

    @property
    def all_ended(self) -> bool:
        """Whether every choice has come to its end."""
        return len(self._usages) == len(self._readers)

    def take(self, index: int, delta: Delta) -> tuple[list[Part], list[TokenLogprobs]]:
        """The parts and the log-probabilities that a piece of a choice holds."""
        reader = self._readers[index]
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *reader.finish()]
            if delta.usage is not None:
                self._usages[index] = delta.usage
        return parts, list(delta.logprobs)

    def ending(self, index: int, delta: Delta) -> Ending:
        """How a choice ended whose last piece this is."""
        reason = "" if delta.finish_reason is None else delta.finish_reason.value
        return Ending(self._readers[index].reason(reason), delta.stop)

    def usage(self) -> Usage:
        """Of the whole answer: a prompt counts once, however many choices it has; of times the longest is told."""
        usages = [self._usages[index] for index in range(len(self._readers))]
        firsts = usages[:: self._num_choices]
        timings = [usage.timing for usage in usages]
        return Usage(
            sum([usage.prompt_tokens for usage in firsts]),
            sum([usage.completion_tokens for usage in usages]),
            sum([usage.cached_tokens for usage in firsts]),
            Timing(
                max([timing.queue_seconds for timing in timings]),
                max([timing.prefill_seconds for timing in timings]),
                max([timing.decode_seconds for timing in timings]),
                sum([timing.preemptions for timing in timings]),
            ),
        )


class Whole:
    """Gathers an answer that is told in one piece."""

    def __init__(self, plan: Plan) -> None:
        self.choices = Choices(plan)
        self._parts: list[list[Part]] = [[] for _ in plan.requests]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in plan.requests]
        self._endings = [Ending("")] * len(plan.requests)

    def add(self, index: int, delta: Delta) -> None:
        """A piece of a choice."""
        parts, entries = self.choices.take(index, delta)
        self._parts[index] += parts
        self._entries[index] += entries
        if delta.finish_reason is not None:
            self._endings[index] = self.choices.ending(index, delta)

    def written(self) -> list[Written]:
        """All choices, once they have ended."""
        columns = zip(self._parts, self._entries, self._endings, strict=True)
        return [Written(index, *column) for index, column in enumerate(columns)]


def size_of(choice: Written) -> int:
    """How long it is when it is told, in characters, without what every answer has."""
    texts = [len(part.text) for part in choice.parts if not isinstance(part, CallBegun)]
    return sum(texts) + _ENTRY_SIZE * sum([1 + len(entry.top) for entry in choice.entries])


def submit_choices(
    engine: Engine, plan: Plan, deadlines: Deadlines, opened: Callable[[Handle], object]
) -> list[Handle]:
    """Hand in every choice. Never waits. The prompt is computed for the first; the others wait for that.

    Args:
        deadlines: of the answer.
        opened: told of each handle at once, so that none is forgotten when a later one is refused.

    Raises:
        UnavailableError: the queue is full, or the server is draining.
    """
    handles: list[Handle] = []
    for index, request in enumerate(plan.requests):
        first = index - index % plan.body.n
        handle = engine.submit(deadlines.bind(request), after=handles[first] if first < index else None)
        opened(handle)
        handles.append(handle)
    return handles
