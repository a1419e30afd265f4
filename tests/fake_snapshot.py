"""A made-up engine for the pages: a small deterministic simulation that answers with real snapshots' shapes.

It draws every state (idle, busy, overloaded, draining) with ten minutes of history in a blink, and says things that a
real engine would not, such as hostile names.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.config import Limits, SloTargets
from engine.experience import Course, all_experience, course
from engine.report import REJECTION_REASONS
from engine.sequence import CLASSES
from engine.stats import RequestTimes, Stats
from engine.timeline import DEFAULT_WINDOW

if TYPE_CHECKING:
    from engine.stats import ClassStats

STEPS_A_SECOND = 9
BLOCK_SIZE = 16
# Requests a second: (calm, in the middle minutes)
LOADS = {
    "idle": (0.0, 0.0), "busy": (1.05, 1.5), "overloaded": (1.1, 3.2), "draining": (1.05, 1.3), "stalled": (1.0, 1.2),
}  # fmt: skip


@dataclass
class FakeRequest:
    request_id: str
    prompt: int
    wanted: int
    arrival: float
    key: str = ""
    computed: int = 0
    output: int = 0
    seat: int | None = None
    preemptions: int = 0
    late_gaps: int = 0
    seated: float | None = None
    first: float | None = None
    last: float | None = None

    @property
    def background(self) -> bool:
        return self.key == "batch"

    @property
    def blocks(self) -> int:
        return -(-(self.computed + 1) // BLOCK_SIZE) if self.computed else 0


@dataclass
class FakeEngine:
    """Runs `mode` for as long as it is told to; `advance` moves its clock."""

    mode: str = "busy"
    seats: int = 12
    budget: int = 96
    total_blocks: int = 480
    seed: int = 7
    rate: float = 1.0
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ("",)
    model_name: str = "smollm2-135m"
    now: float = 0.0
    step: int = 0
    generation: int = 0
    preempted_total: int = 0
    recomputed: int = 0
    queried: int = 0
    hits: int = 0
    cached: int = 0
    evicted: int = 0
    waiting: list[FakeRequest] = field(default_factory=list)
    running: list[FakeRequest] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    produced: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.steps: deque[dict[str, Any]] = deque(maxlen=240)
        self.rates = {"prompt": deque([0] * 10, 10), "output": deque([0] * 10, 10)}
        self.config = SimpleNamespace(slo=SloTargets())
        self.stats = Stats(self.config.slo)
        self.model = SimpleNamespace(name=self.model_name, dtype="float32", context_length=2048)
        self.capacity = Limits(64, 1024)
        self.made = 0
        self.requests = SimpleNamespace(finished=lambda limit: self.ended[:limit])
        self.ended: list[dict[str, Any]] = []
        self._next = 0.3

    @property
    def limits(self) -> Limits:
        return Limits(self.seats, self.budget, self.generation)

    def health(self) -> SimpleNamespace:
        if self.mode == "draining":
            return SimpleNamespace(ready=False, reason="draining: finishing what runs, taking nothing new")
        if self.mode == "stalled":
            return SimpleNamespace(ready=False, reason="stalled: a step has been running for 31 s")
        return SimpleNamespace(ready=True, reason=None)

    def advance(self, seconds: float = 1.0) -> None:
        """Arrivals and steps of `seconds`."""
        produced = Counter[str]()
        for _ in range(round(seconds * STEPS_A_SECOND)):
            self.now += 1 / STEPS_A_SECOND
            self._arrive()
            if self.running or self.waiting:
                produced += self._run_step()
        self.produced += produced
        for name, rate in self.rates.items():
            rate.append(produced[name])

    def _arrive(self) -> None:
        calm, high = LOADS[self.mode]
        load = high if 300 < self.now < 480 or (self.mode == "overloaded" and self.now > 420) else calm
        load *= self.rate
        while load and self._next <= self.now:
            self._next += self.random.expovariate(load)
            if len(self.waiting) >= 40:
                self.rejected["queue_full"] += 1
                continue
            self.made += 1
            name = (
                self.names[self.made % len(self.names)] if self.names else f"chatcmpl-{self.random.randbytes(12).hex()}"
            )
            key = self.keys[self.made % len(self.keys)]
            prompt, wanted = (
                int(self.random.lognormvariate(3.9, 0.9)) + 4,
                int(self.random.lognormvariate(4.0, 0.8)) + 2,
            )
            self.waiting.append(FakeRequest(name, min(prompt, 900), min(wanted, 400), self.now, key))

    def _run_step(self) -> Counter[str]:
        self.step += 1
        preempted = self._make_room()
        if not preempted:
            self._seat()
        left, rows, produced = self.budget, [], Counter[str]()
        for request in self.running:
            behind = request.prompt + request.output - request.computed
            tokens = min(behind, left)
            phase = "decode" if behind == 1 and request.output else "prefill"
            if not tokens:
                continue
            left -= tokens
            rows.append([request.seat, request.request_id, phase, tokens])
            request.computed += tokens
            if phase == "prefill":
                produced["prompt"] += tokens
            if tokens == behind:
                produced["output"] += 1
                self._emit(request)
        self.steps.append(
            {"step": self.step, "time": self.now, "budget": self.budget, "rows": rows, "preempted": preempted}
        )
        for request in [r for r in self.running if r.output >= r.wanted]:
            self.running.remove(request)
            self.finished["length" if request.wanted >= 400 else "stop"] += 1
            met = self._met(request)
            met.windows["e2e"].add(self.now, self.now - request.arrival)
            if request.output > 1 and request.first is not None:
                met.windows["tpot"].add(self.now, (self.now - request.first) / (request.output - 1))
            times = RequestTimes(
                request.arrival, request.background, request.prompt, request.seated, request.first, request.last,
                request.output, request.late_gaps, decode_stall=0.4 * request.preemptions,
            )  # fmt: skip
            met.record_end(times, self.now, failed=False)
            self._keep(request)
        return produced

    def _keep(self, request: FakeRequest) -> None:
        """Blocks of who has ended are cached, and the oldest given up for them where there are too many."""
        self.queried += request.prompt
        self.hits += request.prompt // 3 // BLOCK_SIZE * BLOCK_SIZE
        self.cached += request.blocks
        surplus = self.cached - self.total_blocks // 3
        if surplus > 0:
            self.cached, self.evicted = self.cached - surplus, self.evicted + surplus

    def _emit(self, request: FakeRequest) -> None:
        request.output += 1
        noise = self.random.uniform(0.6, 1.25)
        if request.first is None:
            request.first = self.now
            self._met(request).windows["ttft"].add(self.now, (self.now - request.arrival + 0.09) * noise)
        else:
            gap = (self.now - (request.last or 0)) * noise * (1 + len(self.waiting) / 30)
            self._met(request).windows["itl"].add(self.now, gap)
            request.late_gaps += gap > (self.config.slo.itl_p95_seconds or gap)
        request.last = self.now

    def _met(self, request: FakeRequest) -> ClassStats:
        return self.stats.background if request.background else self.stats.interactive

    def _make_room(self) -> list[str]:
        preempted = []
        while sum(self._next_blocks(request) for request in self.running) > self.total_blocks and len(self.running) > 1:
            victim = self.running.pop()
            self.preempted_total += 1
            self.recomputed += victim.computed
            victim.computed, victim.seat, victim.preemptions = 0, None, victim.preemptions + 1
            self.waiting.insert(0, victim)
            preempted.append(victim.request_id)
        return preempted

    def _next_blocks(self, request: FakeRequest) -> int:
        return -(-(min(request.prompt + request.output, request.computed + self.budget) + 1) // BLOCK_SIZE)

    def _seat(self) -> None:
        free = sorted(set(range(self.seats)) - {r.seat for r in self.running})
        while free and self.waiting:
            need = -(-(self.waiting[0].prompt + self.waiting[0].output) // BLOCK_SIZE) + 4
            if sum(self._next_blocks(r) for r in self.running) + need > self.total_blocks:
                return
            request = self.waiting.pop(0)
            request.seat = free.pop(0)
            self.running.append(request)
            if request.seated is None:
                request.seated = self.now
                self._met(request).windows["queue"].add(self.now, self.now - request.arrival)

    def table(self, num_steps: int, last_step: int | None = None) -> dict[str, Any]:
        steps = [step for step in self.steps if last_step is None or step["step"] <= last_step][-num_steps:]
        kept = [self.steps[0]["step"], self.steps[-1]["step"]] if self.steps else [0, 0]
        return {"seats": self.seats, "budget": self.budget, "kept": kept, "steps": steps}

    def snapshot(self) -> dict[str, Any]:
        everybody = [*self.running, *self.waiting]
        used = sum(request.blocks for request in self.running)
        cached = min(self.cached, self.total_blocks - used)
        waits = "kv_memory" if self.preempted_total else "seats"
        finished = {name: self.finished[name] for name in ("stop", "length", "abort", "error")}
        rejected = {name: self.rejected[name] for name in REJECTION_REASONS}
        return {
            "uptime_seconds": self.now + 11_000,
            "loop_lag_seconds": 0.0004,
            "step": {"count": self.step, "seconds_p50": 0.108 if self.step else None, "tokens": self.step * 20},
            "requests": {
                "running": len(self.running),
                "waiting": len(self.waiting),
                "waiting_tokens": sum(request.prompt for request in self.waiting),
                "waiting_by_reason": {waits: len(self.waiting)} if self.waiting else {},
                "finished_by_reason": finished,
                "rejected_by_reason": rejected,
                "aborted_by_cause_and_phase": {},
                "by_class": {
                    name: self._places([r for r in everybody if r.background == (name == "background")])
                    for name in CLASSES
                },
                "by_key": {
                    name: {**self._places([r for r in everybody if r.key == name]), "served_tokens": 4321}
                    for name in self.keys
                    if name
                },
            },
            "active": [self._active(r, waits) for r in everybody],
            "kv": {
                "block_size": BLOCK_SIZE, "total": self.total_blocks, "used": used, "cached": cached,
                "free": self.total_blocks - used - cached, "usage": used / self.total_blocks,
                "owners": {r.request_id: r.blocks for r in self.running}, "shared": 0,
            },
            "prefix_cache": {"query_tokens": self.queried, "hit_tokens": self.hits, "evictions": self.evicted},
            "preemptions": self.preempted_total,
            "preemptions_by_reason": {"kv_memory": self.preempted_total, "better_right": 0},
            "recomputed_tokens": self.recomputed,
            "padding": {"rows": 0, "tokens": 0},
            "speculation": {"drafts": 100, "draft_tokens": 400, "accepted_tokens": 312},
            "kv_waste": {"set_aside_slots": 40_000, "unwritten_slots": 900},
            "dropped_results": 0,
            "rows": {"computed": self.step * 20, "useful": self.step * 20},
            "useful_row_share": 1.0 if self.step else None,
            "tokens_per_second": {name: sum(rate) / len(rate) for name, rate in self.rates.items()},
            "tokens": {name: self.produced[name] for name in self.rates},
            **self.experience(DEFAULT_WINDOW),
            "config": asdict(self.limits),
            "table": self.table(240),
        }  # fmt: skip

    def experience(self, window_seconds: int) -> dict[str, Any]:
        return all_experience(self.stats, self.now, window_seconds)

    def course(self, window_seconds: int) -> Course:
        return course(self.stats.interactive, self.now, window_seconds)

    def _places(self, requests: list[FakeRequest]) -> dict[str, int]:
        seated = sum(request.seat is not None for request in requests)
        return {"running": seated, "waiting": len(requests) - seated}

    def _active(self, request: FakeRequest, waits: str) -> dict[str, Any]:
        state = "running" if request.seat is not None else "preempted" if request.preemptions else "waiting"
        return {
            "number": id(request) % 10_000,
            "request_id": request.request_id,
            "key": request.key or None,
            "class": CLASSES[request.background],
            "priority": 0,
            "state": state,
            "reason": None if request.seat is not None else waits,
            "phase": None if request.seat is None else "decode" if request.output else "prefill",
            "seat": request.seat,
            "prompt_tokens": request.prompt,
            "computed_tokens": request.computed,
            "output_tokens": request.output,
            "age_seconds": self.now - request.arrival,
            "ttft_seconds": None,
            "num_preemptions": request.preemptions,
        }


def watched(engine: FakeEngine, seconds: int = 600) -> Any:
    """Telemetry that has looked at `engine` once a second for `seconds`; for use inside trio."""
    from app.audit import AuditEntry, timestamp
    from app.journal.journal import Journal
    from app.telemetry import Telemetry

    began = time.time() - seconds
    journal = Journal(wall=lambda: began + engine.now)
    telemetry = Telemetry(engine, journal=journal)
    for second in range(seconds):
        if engine.mode == "busy" and second == 500:
            engine.seats, engine.generation = engine.seats + 2, engine.generation + 1
            change = {"max_num_seqs": (engine.seats - 2, engine.seats)}
            journal.audit.add(AuditEntry(engine.generation, timestamp(journal.wall()), "admin", change, "more guests"))
        engine.advance()
        telemetry.tick(engine.now)
    return telemetry
