"""Opens the actors and is what the outside holds: submit, look, limit, drain."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import trio

from engine.batching import make_batching
from engine.config import MAX_WAITING, SWITCHES, live_range
from engine.door import Door
from engine.errors import UnavailableError
from engine.experience import Course, all_experience, course
from engine.faults import Notice
from engine.handle import Handle
from engine.ingress import Ingress
from engine.kv_cache import KVCache
from engine.messages import Command, Drain, Result, SetLimits
from engine.place import place_of
from engine.policy import make_admission
from engine.report import Report, reason_of
from engine.request_log import RequestLog
from engine.request_view import RequestView
from engine.scheduler import Scheduler
from engine.scheduling import Scheduling
from engine.stats import RequestTimes, Stats
from engine.stepper import open_stepper
from engine.streaming import Streaming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from contextlib import AbstractAsyncContextManager
    from typing import Any

    from engine.config import EngineConfig, Limits
    from engine.errors import RelevoError
    from engine.gpu.device import Device
    from engine.grammar.compiler import GrammarCompiler
    from engine.handle import GenerationRequest
    from engine.loaded import ChatTemplateLike, LoadedModel, TokenizerLike
    from engine.place import Place
    from engine.report import MetricsView
    from engine.request_log import RequestRecord
    from engine.stepper import Stepper

log = logging.getLogger("relevo.engine")

# So many times the queue's limit may wait at most: where as many keys as it holds come one after the other.
MAX_OVERFLOW = 15
# So many notices wait for whoever keeps them; without one they are in the log alone.
MAX_NOTICES = 64
RESTART_SECONDS = 5  # whoever comes to an engine that ends is told to come back then
IS_ENDING = "draining: finishing what runs, taking nothing new"
IS_DRAINING = "draining: an operator has it take nothing new; what is inside goes on"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is being served; `context_length` is the usable capacity in tokens."""

    name: str
    context_length: int
    dtype: str
    device: Device
    weights_kind: str
    num_blocks: int
    block_size: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether new requests are served, and if not, why."""

    ready: bool
    reason: str | None = None


class Engine:
    """A running engine; made by `open_engine`.

    Attributes:
        on_closed: told of each request that ended, with what was written down of it (`None` where it came no further
            than the door). It runs in the engine's task: must not raise.
        notices: faults, and what the engine did about them.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, grammars: GrammarCompiler, stepper: Stepper) -> None:
        self.config = config
        self.tokenizer: TokenizerLike = loaded.tokenizer
        self.chat_template: ChatTemplateLike | None = loaded.chat_template
        # A running sequence holds a block at least: more seats than blocks could never be filled.
        self.capacity = replace(
            config.capacity, max_num_seqs=max(config.max_num_seqs, min(config.capacity_num_seqs, loaded.num_blocks))
        )
        self._scheduler = Scheduler(
            KVCache(loaded.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
            limits=config.limits,
            num_seats=self.capacity.max_num_seqs,
            max_model_len=loaded.max_model_len,
            may_draft=loaded.is_batch_invariant,
        )
        self.model = ModelInfo(
            name=loaded.name,
            context_length=self._scheduler.usable_capacity,
            dtype=loaded.dtype,
            device=loaded.device,
            weights_kind=loaded.weights_kind,
            num_blocks=loaded.num_blocks,
            block_size=config.block_size,
            remarks=loaded.remarks,
        )
        self._stats = Stats(config.slo, config.slo_background)
        self._requests = RequestLog(keep_tokens=config.keep_request_texts)
        self.on_closed: Callable[[Handle, RequestRecord | None], None] | None = None
        self._door = Door(self._scheduler, self._stats, lambda: self._scheduling.step_started)
        self._idle = trio.Event()
        self._idle.set()
        self._ids = count(1)
        self._connect(loaded, grammars, stepper)
        self._report = Report(self._scheduler, self._scheduling, self._stats, config, started=trio.current_time())
        self.requests = RequestView(self._requests, self._scheduler, self._door, self.tokenizer)

    def _connect(self, loaded: LoadedModel, grammars: GrammarCompiler, stepper: Stepper) -> None:
        """Make the channels and the actors. No channel that is sent to without waiting can ever be full.

        An open request has sent an Add and three Ends at most, and is open until they are seen. There is one Drain.
        """
        config = self.config
        max_open = 2 * (MAX_OVERFLOW * MAX_WAITING + config.capacity_num_seqs) + 1
        self._arrivals, arrivals = trio.open_memory_channel[Handle](max_open)
        self._commands, commands = trio.open_memory_channel[Command](4 * max_open + 1)
        send_result, results = trio.open_memory_channel[Result](16)
        self._ingress = Ingress(
            loaded.tokenizer,
            loaded.chat_template,
            self.model.context_length,
            grammars=grammars,
            shares_prompts=lambda: self.limits.enable_prefix_caching,
            arrivals=arrivals,
            commands=self._commands,
            results=send_result,
            check_tokens=self._door.check_tokens,
            on_refused=self._refused,
        )
        self._notify, self.notices = trio.open_memory_channel[Notice](MAX_NOTICES)
        self._scheduling = Scheduling(
            self._scheduler, loaded.runner, stepper, commands, send_result, self._stats, self._requests, self._note
        )
        self._streaming = Streaming(
            loaded.tokenizer,
            results=results,
            commands=self._commands,
            stats=self._stats,
            requests=self._requests,
            slow_client_seconds=config.slow_client_seconds,
            on_closed=self._closed,
        )

    @property
    def limits(self) -> Limits:
        """The limits that the next step is planned under."""
        return self._scheduler.limits

    async def run(self) -> None:
        """The three actors, until cancelled or one of them fails."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ingress.run, name="ingress")
            nursery.start_soon(self._scheduling.run, name="scheduling")
            nursery.start_soon(self._streaming.run, name="streaming")

    def submit(self, request: GenerationRequest, after: Handle | None = None) -> Handle:
        """Hand in a request. Never waits; whether it can be served is known after `Handle.accepted()`.

        Args:
            after: another answer to the same prompt, handed in before. This one waits until the prompt was computed
                for that one (or it ended) and shares its blocks; without the prefix cache it does not wait.

        Raises:
            QueueFullError: as many requests, or prompt tokens, wait as may.
            DrainingError: nothing new is taken any more.
        """
        self.check_open(background=request.background, key=request.key)
        now = trio.current_time()
        handle = Handle(request, next(self._ids), now, after)
        self._arrivals.send_nowait(handle)
        self._door.add(handle)
        if self._idle.is_set():
            self._idle = trio.Event()
        return handle

    def check_open(self, *, background: bool, key: str) -> None:
        """Raise where `submit` would, whatever the request is; `key` is its `GenerationRequest.key`."""
        try:
            if self._scheduling.broken is not None:
                raise UnavailableError("The engine has failed and ends.", retry_after_seconds=RESTART_SECONDS)
            self._door.check_open(background=background, key=key, now=trio.current_time())
        except UnavailableError as error:
            self._stats.rejected[error.code] += 1
            raise

    def retry_after(self, *, background: bool) -> int:
        """When somebody whom the queue of a class has no time for is to come back: whole seconds."""
        return self._door.retry_after(background, trio.current_time())

    def count_refusal(self, reason: str) -> None:
        """Somebody was turned away before the engine was asked; `reason` is a label value of the metrics."""
        self._stats.rejected[reason] += 1

    async def set_limits(self, changes: Mapping[str, Any], *, flush: bool = False) -> Limits:
        """Change live limits at the next step boundary. Lowering drains, as does another policy: nobody loses a seat.

        Args:
            changes: some fields of `Limits`, but not `generation`.
            flush: forget the prefix cache at the same boundary.

        Raises:
            ValueError: unknown, or a value that cannot be; then nothing has changed.
        """
        for name, value in changes.items():
            if name in SWITCHES:
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false, not {value!r}")
            elif name not in ("policy", "admission"):
                least, most = live_range(name, self.capacity)
                if not least <= value <= most:
                    raise ValueError(f"{name} must lie between {least} and {most}, not {value}")
        make_batching(changes.get("policy", "continuous"))
        make_admission(changes.get("admission", "on_demand"))
        done = trio.Event()
        await self._commands.send(SetLimits(dict(changes), done, flush))
        await done.wait()
        return self.limits

    def check_text(self, num_characters: int, param: str) -> None:
        """Raise `ContextLengthError` for a text that cannot fit, however it is tokenized; `param` is its field."""
        self._ingress.check_text(num_characters, param)

    def health(self) -> Health:
        """Whether requests are served now. Answered from memory."""
        if self.is_ending:
            return Health(False, IS_ENDING)
        if self._scheduling.broken is not None:
            return Health(False, f"broken: {self._scheduling.broken}")
        stall = self._scheduling.stall(trio.current_time())
        if stall is not None:
            return Health(False, f"stalled: {stall}")
        if self.limits.draining:
            return Health(False, IS_DRAINING)
        return Health(True)

    def drain(self, within_seconds: float = 0.0) -> None:
        """Take nothing new until the end; what is open goes on. `Limits.draining` is what can be taken back.

        Args:
            within_seconds: when the end will come at the latest, to tell who is sent away.
        """
        if not self.is_ending:
            self._commands.send_nowait(Drain())
        self._door.end(trio.current_time() + within_seconds)

    @property
    def is_ending(self) -> bool:
        """Whether `drain` was called."""
        return self._door.is_ending

    @property
    def num_flushed_blocks(self) -> int:
        """Cached blocks that were forgotten because somebody wanted that, since the start."""
        return self._scheduler.kv_cache.pool.num_flushed

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._door)

    @property
    def is_switching(self) -> bool:
        """Whether a policy that was set waits for those who run under the old one."""
        return self._scheduler.is_switching

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat."""
        return self._scheduler.num_waiting

    @property
    def num_streams(self) -> int:
        """Requests that were passed on and whose ending has not been told yet."""
        return self._streaming.num_streams

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while len(self._door):
            await self._idle.wait()

    def abort_all(self, cause: str) -> None:
        """End everything that is open."""
        for handle in list(self._door):
            handle.abort(cause)

    def snapshot(self) -> dict[str, Any]:
        """The numbers of `/ops/stats.json`, true now."""
        return {"device": self.model.device.name, **self._report.snapshot(trio.current_time(), self.limits)}

    def experience(self, window_seconds: int) -> dict[str, Any]:
        """What the snapshot says of the last five minutes, of another window (`engine.timeline.WINDOWS`) instead."""
        return all_experience(self._stats, trio.current_time(), window_seconds)

    def course(self, window_seconds: int) -> Course:
        """What interactive work met in a window, column by column."""
        return course(self._stats.interactive, trio.current_time(), window_seconds)

    def table(self, num_steps: int, last_step: int | None = None) -> dict[str, Any]:
        """`table` of the snapshot with its last steps alone, or those up to `last_step`; a small part of the whole."""
        return self._scheduling.log.table(self.limits, num_steps, last_step)

    def places(self, request_ids: Collection[str]) -> dict[str, Place]:
        """Where the open ones among these requests are, by their names."""
        now = trio.current_time()
        found = [handle for handle in self._door if handle.request_id in request_ids]
        return {handle.request_id: place_of(handle, self._scheduler, now) for handle in found}

    def metrics(self) -> MetricsView:
        """The numbers of `/metrics`, true now."""
        return self._report.metrics(self.limits)

    def _note(self, notice: Notice) -> None:
        try:
            self._notify.send_nowait(notice)
        except trio.WouldBlock:
            log.warning("nobody keeps what the engine notes: %s", notice.text)

    def _refused(self, handle: Handle, error: RelevoError | None) -> None:
        """A handle goes no further than the door; `error` is `None` when its caller left meanwhile."""
        if error is None:
            times = RequestTimes(handle.arrival_time, handle.request.background)
            self._stats.record_abort(times, trio.current_time(), handle.abort_cause, "door")
        else:
            self._stats.rejected[reason_of(error)] += 1
        self._closed(handle)

    def _closed(self, handle: Handle) -> None:
        self._door.remove(handle)
        if not len(self._door):
            self._idle.set()
        if self.on_closed is not None:
            self.on_closed(handle, self._requests.find(handle.sequence_id))


def _load_model(config: EngineConfig) -> LoadedModel:
    """The real model; torch is imported only where one is run."""
    from engine.startup import load_model

    return load_model(config)


def _make_compiler(loaded: LoadedModel) -> GrammarCompiler:
    """Made before anybody is served, for it takes a moment of Python's whole attention."""
    from engine.grammar.compiler import GrammarCompiler

    return GrammarCompiler(loaded.tokenizer)


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    *,
    load: Callable[[EngineConfig], LoadedModel] = _load_model,
    stepper: Callable[[], AbstractAsyncContextManager[Stepper]] = open_stepper,
) -> AsyncIterator[Engine]:
    """An engine whose model is loaded and whose actors run; a failing actor cancels the body.

    Args:
        config: start-up settings.
        load: makes the model, on the stepper's thread; the default loads `config.model`.
        stepper: opens the thread that makes the torch calls.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: a setting does not go with the model or the machine.
    """
    async with stepper() as opened:
        loaded = await opened.run(partial(load, config))
        engine = Engine(config, loaded, await opened.run(partial(_make_compiler, loaded)), opened)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            yield engine
            nursery.cancel_scope.cancel()
