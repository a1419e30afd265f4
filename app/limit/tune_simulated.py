"""Tuning in virtual time, of a machine that is simulated. Its memory stays what it is at the start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.limit.interrupted import Interrupted
from app.limit.search import FIRST_SHARE
from app.limit.simulated import outcome_of, prepare_simulated
from app.limit.tune import Clock, CutTuning, tune
from app.limit.tune_controls import ADMISSION, DRAFTS, POLICY, controls_of
from app.limit.tune_result import tune_result
from app.limit.watch import Watch
from engine.batching import POLICIES
from engine.config import live_range
from engine.errors import ConfigError
from engine.policy import ADMISSIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.compare.simulated import Machine
    from app.limit.load import Source
    from app.limit.options import Options
    from app.limit.runs import Run
    from app.limit.simulated import SimulatedMeasure
    from app.limit.summary import Outcome
    from app.limit.tune import Tuned, Wish
    from app.limit.tune_controls import Values
    from engine.config import EngineConfig


class TunedMeasure:
    """Measures settings of a machine that is simulated."""

    def __init__(self, base: SimulatedMeasure, own: Values, report: Callable[[str], object], watch: Watch) -> None:
        self._base, self._own, self._report, self._watch = base, own, report, watch
        self._what = ""

    def tell(self, what: str) -> None:
        """What is tried from now on."""
        self._what = what

    def __call__(self, values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:  # noqa: ARG002 (always)
        """One run."""
        self._report(f"{self._what}, {rate:.3g} requests/s")
        settings: dict[str, Any] = dict(values)
        run = replace(self._base, config=replace(self._base.config, **settings))(rate, seed)
        self._watch.ran("rate" if values == self._own else "tried", run)
        return run


def view_of(config: EngineConfig) -> dict[str, Any]:
    """What a server with these settings tells of the controls that a simulation has."""
    numeric = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
    return {
        "effective": {name: getattr(config, name) for name in (*numeric, POLICY, ADMISSION)},
        "ranges": {name: list(live_range(name, config.capacity)) for name in numeric},
        "choices": {POLICY: POLICIES, ADMISSION: ADMISSIONS},
    }


def tune_simulated(
    machine: Machine,
    config: EngineConfig,
    source: Source,
    options: Options,
    wish: Wish,
    report: Callable[[int, int, str], object] = lambda _gone, _planned, _what: None,
    watch: Watch | None = None,
) -> Outcome:
    """Find the limit of a machine, and better settings for it.

    Raises:
        ConfigError: nothing can be served, or there is no such control in a simulation.
        Interrupted: somebody ends it.
    """
    if DRAFTS in wish.names:
        raise ConfigError(f"A simulation has no text, so nothing can be drafted; leave {DRAFTS} out of --tune.")
    clock = Clock(options.duration, lambda _rate: 0.0)
    base, capacity = prepare_simulated(machine, config, source, options)
    view = view_of(config)
    controls = controls_of(view, wish.names)
    values = {name: view["effective"][name] for name in wish.names}

    def say(what: str) -> None:
        report(int(clock.gone), int(options.duration), what)

    def outcome(tuned: Tuned) -> Outcome:
        remarks = ["The limit and the runs above are those of the settings at the start."]
        found = outcome_of(base, capacity, tuned.present.runs, clock.gone)
        told = tune_result(tuned, applied=False)
        return replace(found, tune=told, remarks=[*found.remarks, *remarks], unfinished=tuned.unfinished)

    measure = TunedMeasure(base, values, say, watch or Watch())
    try:
        tuned = tune(measure, controls, values, FIRST_SHARE * capacity, options, clock, measure.tell)
    except CutTuning as cut:
        raise Interrupted(cut.number, outcome(cut.tuned)) from None
    return outcome(tuned)
