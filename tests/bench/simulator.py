"""How well the simulator foretells the real engine: `python -m tests.bench.simulator [BENCH.json]`.

Round after round on one loaded model: a run from which costs are learnt, then runs of other requests that the simulator
has to foretell, as a backlog and with arrivals of their own. The cost model comes from `relevo bench --json BENCH.json`
with the same seats and budget, or else from the learning runs. On a shared machine speed changes from one run to the
next. So each run is foretold twice: at the speed of the learning run before it, and at that of every other step of its
own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import trio

from app.compare.measure import StepWatch, make_requests, run_policy
from app.compare.rounds import config_for
from app.compare.runs import percentile
from app.config import let_threads_sleep
from engine.bench_live import TimedRunner
from engine.config import EngineConfig
from engine.cost_fit import fit_cost_model, fit_engine_part
from engine.cost_model import read_cost_model
from engine.engine import open_engine
from engine.scripted_runner import ScriptedRunner
from engine.simulator import simulate
from engine.startup import load_model
from engine.workload import generate

if TYPE_CHECKING:
    from app.compare.runs import Run
    from engine.cost_model import CostModel
    from engine.engine import Engine
    from engine.loaded import LoadedModel
    from engine.simulation_result import SimulationResult
    from engine.workload import Workload

ROUNDS = 3
NUM_REQUESTS = 80
FACTOR = 24.0
IDLE_SECONDS = 0.02
LOAD = 0.8  # of the capacity that the learning run showed


async def main(bench: Path | None) -> None:
    """Print a line for each run that was foretold, and the medians."""
    config = config_for(EngineConfig(model="smollm2-135m"), max_requests=NUM_REQUESTS)
    watch, runners = StepWatch(), list[TimedRunner]()

    def load(config: EngineConfig) -> LoadedModel:
        loaded = load_model(config)
        runners.append(TimedRunner(loaded.runner))
        return replace(loaded, runner=ScriptedRunner(runners[0], watch))

    shape = None if bench is None else read_cost_model(bench)
    print("run        speed of     tokens/s  foretold   error   TTFT p95 s  foretold   error   steps  foretold")
    errors: dict[str, list[tuple[float, float]]] = {"before": [], "its own": []}
    async with open_engine(config, load=load) as engine:
        await learn(engine, watch, runners[0], shape, seed=1)  # warm up
        for round_ in range(ROUNDS):
            before, capacity = await learn(engine, watch, runners[0], shape, seed=100 + round_)
            backlog = workload(200 + round_, None)
            arriving = workload(300 + round_, LOAD * capacity)
            for name, work, open_loop in (("backlog", backlog, False), ("open loop", arriving, True)):
                begin = len(runners[0].times)
                run = await play(engine, watch, work, open_loop=open_loop)
                own = fitted(runners[0], begin, before, every=2)
                for speed, model in (("before", before), ("its own", own)):
                    foretold = foretell(engine, model, work, open_loop=open_loop)
                    errors[speed].append(tell(name, speed, run, foretold))
    for speed, pairs in errors.items():
        for column, name in enumerate(("throughput", "TTFT p95")):
            values = [abs(error[column]) for error in pairs]
            print(f"{speed}: {name} off by {median(values):.1%} (median of {len(values)}), {max(values):.1%} at most")


def workload(seed: int, rate: float | None) -> Workload:
    """Requests like those of the Azure conversation trace."""
    return generate("azure-conversation", NUM_REQUESTS, seed=seed, rate=rate, factor=FACTOR, max_model_len=2048)


async def play(engine: Engine, watch: StepWatch, work: Workload, *, open_loop: bool) -> Run:
    """A run on the engine; the seed of its prompts is the time, so that nothing is found in the cache."""
    requests = make_requests(engine, work, salt=int(trio.current_time() * 1000) % 1_000_000, open_loop=open_loop)
    return await run_policy(engine, watch, requests, policy="continuous")


async def learn(
    engine: Engine, watch: StepWatch, runner: TimedRunner, shape: CostModel | None, *, seed: int
) -> tuple[CostModel, float]:
    """The cost model of these minutes, and the requests a second that they allow."""
    begin = len(runner.times)
    run = await play(engine, watch, workload(seed, None), open_loop=False)
    return fitted(runner, begin, shape), len(run.answers) / run.seconds


def fitted(runner: TimedRunner, begin: int, shape: CostModel | None, *, every: int = 1) -> CostModel:
    """A model of the steps since `begin`: `shape` stretched to their speed, or one of their own."""
    shapes, times = runner.shapes[begin:-1], runner.times[begin:]
    begins, ends = (np.array(column) for column in zip(*times, strict=True))
    executions, gaps = (ends - begins)[:-1], begins[1:] - ends[:-1]
    whole = fit_cost_model(shapes, executions.tolist()) if shape is None else shape
    # While nobody asks there are no steps, and the gap is not the engine's.
    busy = np.flatnonzero(gaps < IDLE_SECONDS)[::every]
    return fit_engine_part(whole, [shapes[i] for i in busy], executions[busy], gaps[busy])


def foretell(engine: Engine, cost_model: CostModel, work: Workload, *, open_loop: bool) -> SimulationResult:
    """The same run in virtual time."""
    return simulate(
        work,
        limits=replace(engine.limits, policy="continuous"),
        num_blocks=engine.model.num_blocks,
        block_size=engine.config.block_size,
        max_model_len=engine.model.context_length,
        cost_model=cost_model,
        open_loop=open_loop,
    )


def tell(name: str, speed_of: str, run: Run, simulated: SimulationResult) -> tuple[float, float]:
    """Print both and give the relative errors of throughput and TTFT p95."""
    speed, foretold = run.output_tokens_per_second, simulated.output_tokens_per_second
    ttft, foretold_ttft = (percentile(x, 95) for x in ([a.ttft for a in run.answers], simulated.ttft_seconds))
    errors = foretold / speed - 1, foretold_ttft / ttft - 1
    print(
        f"{name:9}  {speed_of:8}  {speed:11.1f}  {foretold:8.1f}  {errors[0]:+6.1%}  "
        f"{ttft:11.2f}  {foretold_ttft:8.2f}  {errors[1]:+6.1%}  {run.counts.steps:6}  {simulated.num_steps:8}",
        flush=True,
    )
    return errors


if __name__ == "__main__":
    let_threads_sleep()
    trio.run(main, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
