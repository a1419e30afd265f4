"""A comparison on the engine: warm up, choose how much fits into the time, and go round after round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

from app.compare.lengths import Costs
from app.compare.load import MIN_ROUNDS, choose, lengths_of
from app.compare.measure import make_requests, run_policy
from app.compare.runs import POLICIES
from app.render import numbers
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.compare.load import Choice, Source
    from app.compare.measure import StepWatch
    from app.compare.options import Options
    from app.compare.runs import Run
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.workload import Workload

# The warm-up need not be long: its lengths are divided by at least so much.
WARM_UP_FACTOR: Final = 32.0
# What is left of the time for misjudging it.
PLANNED_SHARE: Final = 0.8
# A second round may take so much more of it: one alone tells nothing of the spread.
SECOND_ROUND_SHARE: Final = 1.2
MAX_ROUNDS: Final = 10
SLOW_READER_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Compared:
    """What was run: whole rounds, and how long all of it took."""

    runs: Sequence[Run]
    workload: Workload
    seconds: float


def config_for(config: EngineConfig, *, max_requests: int) -> EngineConfig:
    """The settings of an engine that takes a whole run at once and has no more seats and budget than are compared.

    Without drafts, which fixed batches have none of: what is compared is who sits when.
    """
    return replace(
        config,
        policy="continuous",
        num_speculative_tokens=0,
        capacity_num_seqs=config.max_num_seqs,
        capacity_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=max_requests,
        max_waiting_tokens=max_requests * (config.max_model_len or 1 << 20),
        slow_client_seconds=SLOW_READER_SECONDS,
    )


def check_seats(seats: int, num_blocks: int) -> None:
    """Refuse seats that could never all be taken.

    Raises:
        ConfigError: there are more of them than KV blocks.
    """
    if seats > num_blocks:
        raise ConfigError(
            f"{seats} seats need a KV block each at least, and the memory holds {num_blocks}: "
            "give --memory more, or ask for fewer --seats."
        )


async def compare_on(
    engine: Engine,
    watch: StepWatch,
    source: Source,
    options: Options,
    *,
    echo: Callable[[str], object] = print,
    report: Callable[[int, int], object] = lambda _done, _total: None,
) -> Compared:
    """Run every policy in turn on one idle engine, again and again.

    Args:
        watch: is told about the engine's steps by its runner.
        echo: takes a line about what was chosen.
        report: told (answers done, answers planned).

    Raises:
        ConfigError: there are more seats than KV blocks.
        EngineError: an answer did not come as scripted.
    """
    seats, started = engine.config.max_num_seqs, trio.current_time()
    check_seats(seats, engine.model.num_blocks)
    costs = await _warm_up(engine, watch, source)
    warm = trio.current_time() - started
    choice = choose(
        source,
        options,
        costs,
        seats=seats,
        seconds=max(0.0, PLANNED_SHARE * options.duration - warm),
        max_model_len=engine.model.context_length,
    )
    if options.repeats is None and warm + choice.seconds > SECOND_ROUND_SHARE * options.duration:
        # Not even the least there can be fits twice: say so at once.
        choice = replace(choice, rounds=1, seconds=choice.seconds / choice.rounds)
    echo(_what_was_chosen(choice, warm, options))
    runs = await _all_rounds(engine, watch, choice, options, started=started, report=report)
    return Compared(runs, choice.workload, trio.current_time() - started)


async def _warm_up(engine: Engine, watch: StepWatch, source: Source) -> Costs:
    """One static batch, not counted; from it, what a token of a prompt and a step of the full batch cost."""
    context, seats = engine.model.context_length, engine.config.max_num_seqs
    factor = max(WARM_UP_FACTOR, source.least_factor(context))
    workload = source.take(min(seats, source.max_requests), factor, context)
    lengths = lengths_of(workload)
    requests = make_requests(engine, workload, salt=0, open_loop=False)
    run = await run_policy(engine, watch, requests, policy="static")
    reading = max(answer.first_token for answer in run.answers)
    prompt_token = reading / (len(lengths) * max(lengths.prompts))
    steps = max(lengths.answers) - 1
    # Where nobody wrote more than one token, a step is taken to cost what reading as many tokens does.
    return Costs(prompt_token, (run.seconds - reading) / steps if steps else prompt_token * len(lengths))


async def _all_rounds(
    engine: Engine,
    watch: StepWatch,
    choice: Choice,
    options: Options,
    *,
    started: float,
    report: Callable[[int, int], object],
) -> list[Run]:
    """As many rounds as were asked for; else as many as fit into the time since `started`, one at least."""
    deadline = started + options.duration
    runs: list[Run] = []
    num_answers, done, longest = len(POLICIES) * len(choice.workload.items), count(1), 0.0
    for round_ in range(options.repeats or MAX_ROUNDS):
        begun = trio.current_time()
        late = deadline if round_ >= MIN_ROUNDS else started + SECOND_ROUND_SHARE * options.duration
        if options.repeats is None and round_ and begun + longest > late:
            break
        told = _counted(report, done, num_answers * max(choice.rounds, round_ + 1))
        # There and back again: what drifts over minutes hits all of them alike.
        for policy in POLICIES if round_ % 2 == 0 else reversed(POLICIES):
            salt = 1 + len(runs)
            requests = make_requests(engine, choice.workload, salt=salt, open_loop=options.rate is not None)
            runs.append(
                await run_policy(
                    engine,
                    watch,
                    requests,
                    policy=policy,
                    round_=round_,
                    on_answer=told,
                )
            )
        longest = max(longest, trio.current_time() - begun)
    return runs


def _counted(report: Callable[[int, int], object], done: Iterator[int], total: int) -> Callable[[], object]:
    """Tells how many answers are done, one more each time."""
    return lambda: report(next(done), total)


def _what_was_chosen(choice: Choice, warm: float, options: Options) -> str:
    workload, rounds = choice.workload, numbers.plural(choice.rounds, "round")
    return (
        f"After a warm-up of {numbers.duration(warm)}: {numbers.plural(len(workload.items), 'request')} a run, lengths "
        f"divided by {workload.factor:g}, {rounds}{'' if options.repeats else ' or more'} through four policies; "
        f"about {numbers.duration(max(1.0, choice.seconds))}{_why_so_long(choice, warm, options)}."
    )


def _why_so_long(choice: Choice, warm: float, options: Options) -> str:
    """What keeps it from ending in the time that it was given, where something does."""
    if warm + choice.seconds <= options.duration:
        return ""
    asked = {"--requests": options.requests, "--repeats": options.repeats, "--factor": options.factor}
    given = [f"{flag} {value:g}" for flag, value in asked.items() if value is not None]
    why = f"{' and '.join(given)} {'goes' if len(given) == 1 else 'go'} before it"
    if not given:
        why = "the least that tells anything takes so long"
    return f", and not the {options.duration:g} s of --duration: {why}"
