"""The requests one by one: what is told of them, and the operator's way to end one."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import trio

from engine.place import line_of
from engine.request_log import MAX_FINISHED, as_life, as_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.door import Door
    from engine.handle import GenerationRequest
    from engine.loaded import TokenizerLike
    from engine.request_log import RequestLog
    from engine.scheduler import Scheduler

# Longer texts are told in part: what a page or a terminal can show.
MAX_TOLD_TOKENS: Final = 32_768


class RequestView:
    """Of one engine; answered from memory, true now."""

    def __init__(self, log: RequestLog, scheduler: Scheduler, door: Door, tokenizer: TokenizerLike) -> None:
        self.keeps_texts = log.keep_tokens
        self._log = log
        self._scheduler = scheduler
        self._door = door
        self._tokenizer = tokenizer

    def watch(self, added: Callable[[GenerationRequest], object] | None) -> None:
        """Have each request that comes in from now on told; `None` ends it. One at a time watches.

        Args:
            added: runs where the request is handed in: must not raise.
        """
        self._door.on_added = added

    def open(self) -> list[dict[str, Any]]:
        """Those that wait or run, in the order of arrival, each as in `active` of the statistics."""
        now = trio.current_time()
        return [line_of(sequence, self._scheduler, now) for sequence in self._scheduler.sequences]

    def finished(self, limit: int = MAX_FINISHED) -> list[dict[str, Any]]:
        """The last that ended, newest first."""
        now = trio.current_time()
        return [as_line(record, now) for record in islice(self._log.finished, limit)]

    def life(self, number: int) -> dict[str, Any] | None:
        """Everything that is known of one: `None` where there is none of that number any more."""
        record, now = self._log.find(number), trio.current_time()
        if record is None:
            return None
        sequence = record.sequence if record.closed is None else None
        state = {"state": "finished", "reason": None, "phase": None, "seat": None, "computed_tokens": None}
        if sequence is not None:
            line = line_of(sequence, self._scheduler, now)
            state = {name: line[name] for name in state}
        return {**as_life(record, now, self._log.last_step), **state}

    def tokens(self, number: int) -> Callable[[], dict[str, Any]] | None:
        """The tokens of one, ids and texts; `None` where they are not there, or not there any more.

        Spelling them out takes a while: that is left to the caller, who may do it on another thread.
        """
        found = self._log.find_tokens(number)
        return None if found is None else partial(self._spell, *found)

    def _spell(self, token_ids: list[int], num_prompt_tokens: int) -> dict[str, Any]:
        told = token_ids[:MAX_TOLD_TOKENS]
        pieces = [self._tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in told]
        return {
            "prompt_token_ids": told[:num_prompt_tokens],
            "prompt_pieces": pieces[:num_prompt_tokens],
            "output_token_ids": told[num_prompt_tokens:],
            "output_pieces": pieces[num_prompt_tokens:],
            "left_out": len(token_ids) - len(told),
        }

    def abort(self, number: int) -> bool:
        """End one in the operator's name; false where it is not open."""
        handle = self._door.find(number)
        if handle is None or handle.abort_cause is not None:
            return False
        handle.abort("admin")
        return True
