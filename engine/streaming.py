"""The actor that turns tokens into text, finds stop strings and closes each request's outbox exactly once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.detokenizer import Detokenizer
from engine.messages import End, Opened, StepResult
from engine.outbox import Timing, Usage
from engine.sequence import FinishReason
from engine.stats import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from engine.batch import TokenLogprobs
    from engine.handle import GenerationRequest, Handle
    from engine.loaded import TokenizerLike
    from engine.messages import Command, Result
    from engine.request_log import RequestLog
    from engine.stats import Stats

log = logging.getLogger("relevo.engine")

NO_TEXT = "Something went wrong while this answer was turned into text."


class _Stream:
    """One open request: where its text goes and how far it is."""

    def __init__(self, handle: Handle, tokenizer: TokenizerLike) -> None:
        self.handle = handle
        self.times = RequestTimes(handle.arrival_time, handle.request.background)
        self.num_cached_tokens = 0
        self.detokenizer = Detokenizer(tokenizer.token_bytes, skip=tokenizer.is_control)
        self._end_token_ids: frozenset[int] = frozenset()
        self._stop_token_ids: frozenset[int] = frozenset()

    def begin(self, tokenizer: TokenizerLike) -> None:
        """Its tokens are about to come: from here on what is wrong with the request can show."""
        request = self.handle.request
        self.detokenizer = Detokenizer(tokenizer.token_bytes, skip=_hidden(request, tokenizer), stop=request.stop)
        self._end_token_ids = frozenset() if request.ignore_eos else tokenizer.stop_token_ids
        self._stop_token_ids = request.params.stop_token_ids | self._end_token_ids

    def ends_with(self, token_id: int) -> bool:
        """Whether the next token is the one that stopped the sequence, by the rule of `Sequence.end_reason`."""
        early = self.times.num_output_tokens < self.handle.request.params.min_tokens
        return token_id in (self._end_token_ids if early else self._stop_token_ids)


class Streaming:
    """Follows the scheduling actor step by step, while the next step already runs.

    Here a request ends, seen from the outside: with the token that completes a stop string, whatever the scheduler
    had generated beyond it, so that the ending does not depend on timing.

    Args:
        tokenizer: of the model.
        results: openings and step results, in order.
        commands: to tell the scheduler that a stop string was found.
        stats: counts tokens and endings.
        requests: told how each request ended.
        slow_client_seconds: a reader that leaves text unread for so long is aborted.
        on_closed: told about each handle that ended.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        results: trio.MemoryReceiveChannel[Result],
        commands: trio.MemorySendChannel[Command],
        stats: Stats,
        requests: RequestLog,
        slow_client_seconds: float,
        on_closed: Callable[[Handle], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._results = results
        self._commands = commands
        self._stats = stats
        self._requests = requests
        self._slow_client_seconds = slow_client_seconds
        self._on_closed = on_closed
        self._streams: dict[int, _Stream] = {}

    async def run(self) -> None:
        """Take in one result after the other, for ever."""
        async for result in self._results:
            match result:
                case Opened(handle):
                    self._streams[handle.sequence_id] = _Stream(handle, self._tokenizer)
                case StepResult():
                    self._apply(result)

    @property
    def num_streams(self) -> int:
        """Requests whose ending has not been seen yet."""
        return len(self._streams)

    def _apply(self, result: StepResult) -> None:
        """Whatever is wrong with one request ends that request alone."""
        for sequence_id, num_cached_tokens in result.seated:
            stream = self._streams.get(sequence_id)
            if stream is not None and stream.times.seated is None:
                try:
                    self._sit_down(stream, num_cached_tokens, result.planned)
                except Exception:
                    self._fail(stream, result.finished)
            elif stream is not None:
                stream.times.sit_again(result.planned)
        for sequence_id in result.preempted:
            stream = self._streams.get(sequence_id)
            if stream is not None:
                stream.times.num_preemptions += 1
                stream.times.preempted = result.planned
        update = result.update
        told = {sequence_id: iter(entries) for sequence_id, entries in update.logprobs.items()}
        stopped = {ending.sequence_id for ending in update.endings if ending.reason is FinishReason.STOP}
        for sequence_id, token_id in update.tokens:
            stream = self._streams.get(sequence_id)
            if stream is None:
                continue
            try:
                if sequence_id in stopped and stream.ends_with(token_id):
                    # The token that ends an answer is no part of its text, whatever it stands for.
                    self._stats.record_token(stream.times, result.finished)
                    stream.handle.outbox.append("", token_id, result.finished)
                else:
                    entry = next(told[sequence_id], None) if sequence_id in told else None
                    self._advance(stream, token_id, entry, result.finished)
            except Exception:
                self._fail(stream, result.finished)
        for sequence_id, reason, error in update.endings:
            stream = self._streams.get(sequence_id)
            if stream is not None:
                try:
                    self._close(stream, reason, result.finished, error)
                except Exception:
                    self._fail(stream, result.finished)

    def _sit_down(self, stream: _Stream, num_cached_tokens: int, now: float) -> None:
        stream.num_cached_tokens = num_cached_tokens
        self._stats.record_seated(stream.times, now)
        stream.begin(self._tokenizer)

    def _fail(self, stream: _Stream, now: float) -> None:
        """Called while an error is handled."""
        log.exception("request %s met a fault while its text was made, or its end told", stream.handle.request_id)
        if stream.handle.sequence_id in self._streams:
            self._commands.send_nowait(End(stream.handle.sequence_id, FinishReason.ERROR))
            self._close(stream, FinishReason.ERROR, now, NO_TEXT)

    def _advance(self, stream: _Stream, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        handle, detokenizer = stream.handle, stream.detokenizer
        self._stats.record_token(stream.times, now)
        may_stop = stream.times.num_output_tokens > handle.request.params.min_tokens
        text = detokenizer.push(token_id, may_stop=may_stop, logprobs=logprobs)
        handle.outbox.append(text, token_id, now, detokenizer.take_logprobs() if logprobs is not None else ())
        if detokenizer.stopped is not None:
            self._commands.send_nowait(End(handle.sequence_id, FinishReason.STOP))
            self._close(stream, FinishReason.STOP, now, None)
        elif self._is_slow(handle, now):
            handle.abort("slow_client")

    def _close(self, stream: _Stream, reason: FinishReason, now: float, error: str | None) -> None:
        """Tell the end. Where something of it cannot be told the request's place is free all the same."""
        handle = stream.handle
        del self._streams[handle.sequence_id]
        try:
            reason, error = self._close_outbox(stream, reason, error)
            try:
                self._stats.record_finish(stream.times, now, reason.value, handle.abort_cause)
            finally:
                self._requests.close(
                    handle.sequence_id,
                    now,
                    reason=reason.value,
                    cause=handle.abort_cause,
                    error=error if reason is FinishReason.ERROR else None,
                    num_output_tokens=stream.times.num_output_tokens,
                    last_token=stream.times.last_token,
                )
        except Exception:
            log.exception("the end of request %s could not be told everywhere", handle.request_id)
        finally:
            self._on_closed(handle)

    def _close_outbox(
        self, stream: _Stream, reason: FinishReason, error: str | None
    ) -> tuple[FinishReason, str | None]:
        """Give the last text. Gives how the request has ended, which is an error where there is something wrong."""
        handle, times, detokenizer = stream.handle, stream.times, stream.detokenizer
        times.num_prompt_tokens = handle.num_prompt_tokens
        usage = Usage(times.num_prompt_tokens, times.num_output_tokens, stream.num_cached_tokens, _timing(times))
        try:
            text = detokenizer.finish()
            handle.outbox.close(text, reason, usage, error, detokenizer.take_logprobs(), detokenizer.stopped)
        except Exception:
            log.exception("request %s met a fault while its last text was made", handle.request_id)
            if handle.outbox.last is None:
                reason, error = FinishReason.ERROR, NO_TEXT
                handle.outbox.close("", reason, usage, error)
        if handle.abort_cause is not None:
            reason = FinishReason.ABORT  # it came to an end by itself after the caller had left
        return reason, error

    def _is_slow(self, handle: Handle, now: float) -> bool:
        since = handle.outbox.unread_since
        return since is not None and now - since > self._slow_client_seconds


def _hidden(request: GenerationRequest, tokenizer: TokenizerLike) -> Callable[[int], bool]:
    """Which tokens are left out of the answer's text."""
    shown = request.shown_token_ids
    if not request.skip_special_tokens:
        return lambda _token_id: False
    if not shown:
        return tokenizer.is_control
    return lambda token_id: tokenizer.is_control(token_id) and token_id not in shown


def _timing(times: RequestTimes) -> Timing:
    """What the caller is told of a request's times. What it never came to took no time."""
    seated = times.arrival if times.seated is None else times.seated
    first = seated if times.first_token is None else times.first_token
    last = first if times.last_token is None else times.last_token
    return Timing(seated - times.arrival, first - seated, last - first, times.num_preemptions)
