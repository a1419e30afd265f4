"""What a token costs outside the model: `python -m tests.bench.overhead [--model M]`.

One process serves, another reads. In turn the same requests are answered inside the engine, their text left in its
outboxes (A), and over HTTP as server-sent events (B): A B A B. What is measured is the CPU time of the serving process
alone, from the first step in which every stream decodes to the last, so that B - A is what HTTP and SSE add to a token.
The event loop's own thread is told apart: that is everything but the model. Without `--model` the model is one that
sleeps. The reader looks at its sockets twenty times a second: it is not to take the core from what is measured.

The loop's lag is how late a task wakes that sleeps for 5 ms again and again. Under `chrt -f` threads take no turns, and
a model's may hold every core for a step; there the loop's thread goes ahead of them, as one that mostly sleeps does
under the system's usual scheduler.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Final

import trio

from app.cli.pull import with_model
from app.config import Settings, let_threads_sleep
from app.lifecycle import Lifecycle
from app.listening import open_listening_socket
from app.server import make_context, run_http, tune_interpreter
from engine.batch import StepOutput
from engine.bench_running import LagMeter
from engine.engine import open_engine
from engine.handle import GenerationRequest, TokensPrompt
from engine.loaded import LoadedModel
from engine.samples import nearest_rank
from engine.sequence import SamplingParams
from tests.bench.versus.client import HOST, EventReader, make_request
from tests.bench.versus.work import WARM_UP_PROMPT
from tests.fakes import FakeChatTemplate, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from engine.batch import ScheduledBatch
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.stepper import Runner

MIN_STEPS: Final = 20
READ_SECONDS: Final = 0.05


class SleepingRunner:
    """Takes its time and answers with letters."""

    overlaps = False

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """A letter for every row."""
        time.sleep(self._step_seconds)
        return StepOutput(batch.step, (97 + batch.step % 26,) * len(batch))


@dataclass(frozen=True, slots=True)
class Moment:
    """The beginning of a step: wall time, CPU time of the process and of its event loop, all in seconds."""

    wall: float
    process: float
    loop: float
    decodes: int


class Watched:
    """Notes when each step begins, and what the process had used by then."""

    overlaps = False

    def __init__(self, runner: Runner, loop_clock: Callable[[], float]) -> None:
        self._runner = runner
        self._loop_clock = loop_clock
        self.moments: list[Moment] = []

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch."""
        times = time.perf_counter(), time.process_time(), self._loop_clock()
        self.moments.append(Moment(*times, sum(batch.decodes)))
        return self._runner.execute(batch)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one run of all streams cost: microseconds of CPU a token, and pieces of text a token."""

    process: float
    loop: float
    step_seconds: float
    pieces: float = 1.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A serving engine and how it is asked."""

    engine: Engine
    runner: Watched
    port: int
    streams: int
    tokens: int
    salts: count[int]

    def prompts(self) -> list[list[int]]:
        """One for each stream, unlike any that came before."""
        size, salt = self.engine.tokenizer.vocab_size - 10, next(self.salts)
        return [[(salt * 7919 + s * 613 + i * 31) % size for i in range(WARM_UP_PROMPT)] for s in range(self.streams)]

    async def inside(self) -> Phase:
        """All streams, within the engine: nobody takes their text."""
        self.runner.moments.clear()
        async with trio.open_nursery() as nursery:
            for prompt in self.prompts():
                nursery.start_soon(self._read, tuple(prompt))
        return self._phase()

    async def over_http(self) -> Phase:
        """All streams, read by a client of its own."""
        bodies = [
            {
                "model": self.engine.model.name,
                "prompt": prompt,
                "max_tokens": self.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "min_tokens": self.tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for prompt in self.prompts()
        ]
        self.runner.moments.clear()
        job = json.dumps({"port": self.port, "bodies": bodies}).encode()
        client = [sys.executable, "-m", "tests.bench.overhead", "--read-job"]
        done = await trio.run_process(client, stdin=job, capture_stdout=True)
        said = [read_events(answer.encode("latin-1")) for answer in json.loads(done.stdout)]
        wrong = [text for text, num_tokens in said if num_tokens != self.tokens]
        if wrong:
            raise SystemExit(f"{len(wrong)} answers do not count: {wrong[0]}")
        return replace(self._phase(), pieces=sum([len(texts) for texts, _ in said]) / (self.streams * self.tokens))

    async def lag_over_http(self) -> str:
        """How late the loop is meanwhile; apart, for looking costs time too."""
        meter = LagMeter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            with loop_ahead():
                await self.over_http()
            nursery.cancel_scope.cancel()
        full = [moment.wall for moment in self.runner.moments if moment.decodes == self.streams]
        lags = sorted([lag for moment, lag in meter.samples if full[0] <= moment <= full[-1]])
        p50, p99 = (nearest_rank(lags, percent) * 1e3 for percent in (50, 99))
        return f"loop lag over HTTP p50 {p50:.2f} ms, p99 {p99:.2f} ms ({len(lags)} samples)"

    async def _read(self, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self.tokens, min_tokens=self.tokens)
        request = GenerationRequest("inside", TokensPrompt(prompt), params, ignore_eos=True)
        handle = self.engine.submit(request)
        ended = trio.Event()

        def look() -> None:
            if handle.outbox.last is not None:
                ended.set()

        handle.outbox.on_news = look
        look()
        await ended.wait()

    def _phase(self) -> Phase:
        full = [moment for moment in self.runner.moments if moment.decodes == self.streams]
        if len(full) < MIN_STEPS:
            raise SystemExit(f"All streams decoded in {len(full)} steps only; ask for more --tokens.")
        first, last = full[0], full[-1]
        tokens = self.streams * (len(full) - 1)
        return Phase(
            process=(last.process - first.process) / tokens * 1e6,
            loop=(last.loop - first.loop) / tokens * 1e6,
            step_seconds=(last.wall - first.wall) / (len(full) - 1),
        )


def read_events(answer: bytes) -> tuple[list[str], int]:
    """The pieces of text of a streamed completion, and how many tokens it has."""
    events = [json.loads(event) for event in EventReader().feed(answer) if event != b"[DONE]"]
    texts = [choice["text"] for event in events for choice in event.get("choices", ()) if choice["text"]]
    return texts, max([(event.get("usage") or {}).get("completion_tokens", 0) for event in events], default=0)


def read_job() -> None:
    """The reader: takes a job from stdin, sends its requests, prints what came back, byte by byte."""
    job = json.load(sys.stdin)
    sockets = [socket.create_connection((HOST, job["port"])) for _ in job["bodies"]]
    for connection, body in zip(sockets, job["bodies"], strict=True):
        connection.sendall(make_request(job["port"], "/v1/completions", body))
        connection.setblocking(False)
    answers, is_open = [b""] * len(sockets), set(range(len(sockets)))
    while is_open:
        time.sleep(READ_SECONDS)
        for index in list(is_open):
            with suppress(BlockingIOError):
                data = sockets[index].recv(1 << 20)
                answers[index] += data
                if not data:
                    is_open.remove(index)
    json.dump([answer.decode("latin-1") for answer in answers], sys.stdout)


@contextmanager
def loop_ahead() -> Iterator[None]:
    """Where threads are scheduled first in, first out, this one is one priority above the rest."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_FIFO:
        yield
        return
    before = os.sched_getparam(0)
    os.sched_setparam(0, os.sched_param(before.sched_priority + 1))
    try:
        yield
    finally:
        os.sched_setparam(0, before)


def _load(config: EngineConfig) -> LoadedModel:
    from engine.startup import load_model  # torch is imported only where a model is run

    return load_model(config)


def _fake(step_seconds: float, config: EngineConfig) -> LoadedModel:
    return LoadedModel(
        name="sleeping",
        dtype="float32",
        weights_kind="none",
        max_model_len=4096,
        num_blocks=8192,
        runner=SleepingRunner(step_seconds),
        tokenizer=FakeTokenizer(),
        chat_template=FakeChatTemplate(),
    )


@asynccontextmanager
async def open_bench(options: argparse.Namespace, listener: socket.socket) -> AsyncIterator[Bench]:
    """The server, as `relevo serve` sets it up, with its HTTP listening."""
    named = {"model": {"name": options.model, "dtype": options.dtype}} if options.model else {}
    settings = Settings.model_validate(
        {**named, "scheduler": {"max_num_seqs": options.streams}, "server": {"slow_client_seconds": 3600}}
    )
    settings = with_model(settings) if options.model else settings
    inner = _load if options.model else partial(_fake, options.step_seconds)
    clock = time.pthread_getcpuclockid(threading.get_ident())
    watched: list[Watched] = []

    def load(config: EngineConfig) -> LoadedModel:
        loaded = inner(config)
        watched.append(Watched(loaded.runner, lambda: time.clock_gettime(clock)))
        return replace(loaded, runner=watched[0])

    async with open_engine(settings.engine_config(), load=load) as engine, trio.open_nursery() as nursery:
        tune_interpreter()
        context = make_context(settings, engine, Lifecycle())
        for task in (context.telemetry.run, context.live.run, context.keys.run, context.lifecycle.lag.run):
            nursery.start_soon(task)
        await nursery.start(partial(run_http, context, listener))
        port = listener.getsockname()[1]
        yield Bench(engine, watched[0], port, options.streams, options.tokens, count(1))
        nursery.cancel_scope.cancel()


async def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print what came of them."""
    pairs: list[tuple[Phase, Phase]] = []
    with open_listening_socket("127.0.0.1", 0) as listener:
        async with open_bench(options, listener) as bench:
            print(f"{bench.engine.model.name}, {options.streams} streams of {options.tokens} tokens", flush=True)
            await bench.over_http()  # warm-up
            print("                 CPU us a token  of it event loop  step ms  pieces a token")
            for _ in range(options.rounds):
                pairs.append((await bench.inside(), await bench.over_http()))
                for name, phase in zip(("inside", "over HTTP"), pairs[-1], strict=True):
                    print(
                        f"{name:15}  {phase.process:14.1f}  {phase.loop:16.1f}  {phase.step_seconds * 1e3:7.1f}  "
                        f"{phase.pieces:14.2f}",
                        flush=True,
                    )
                gc.collect()
            lag = await bench.lag_over_http()
    print(lag)
    events = [(http.loop - inside.loop) / http.pieces for inside, http in pairs]
    print(f"an event costs {spread(events)} us of the event loop's CPU")
    shares = [100 * http.loop / http.process for _, http in pairs]
    print(f"everything but the model is {spread(shares)} % of the CPU of a token over HTTP")
    if options.model:
        added = [100 * (http.loop - inside.loop) / inside.process for inside, http in pairs]
        print(f"HTTP and SSE add {spread(added)} % to what the engine takes")


def spread(values: list[float]) -> str:
    """Median, and what it lies between."""
    return f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model to serve (default: one that sleeps)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="a step of the model that sleeps")
    parser.add_argument("--read-job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read_job:
        read_job()
        return
    let_threads_sleep()
    trio.run(measure, options)


if __name__ == "__main__":
    main()
