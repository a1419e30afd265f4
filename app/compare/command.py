"""From options to files and lines: the whole of `relevo compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.cli.progress import Progress
from app.compare.measure import StepWatch
from app.compare.options import check_writable
from app.compare.page import page_of
from app.compare.rounds import compare_on, config_for
from app.compare.summary import Setting, summarize
from app.compare.words import lines_of
from app.files import write_json, write_whole
from engine.engine import open_engine
from engine.scripted_runner import ScriptedRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from app.compare.load import Source
    from app.compare.options import Options
    from app.compare.rounds import Compared
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.gpu.device import Device
    from engine.loaded import LoadedModel

    Outcome = tuple[dict[str, Any], Compared]
    Reporter = Callable[[int, int], object]
    Opener = Callable[[EngineConfig, StepWatch], AbstractAsyncContextManager[Engine]]


def machine_facts(num_threads: int, device: Device) -> Mapping[str, Any]:
    """What computes."""
    from engine.machine import machine_facts  # imports torch: seconds

    return machine_facts(num_threads, device)


def open_scripted(config: EngineConfig, watch: StepWatch) -> AbstractAsyncContextManager[Engine]:
    """The real engine with the real model, whose answers end where they are told to; `watch` sees each step."""

    def load(config: EngineConfig) -> LoadedModel:
        from engine.startup import load_model  # imports torch: seconds

        loaded = load_model(config)
        return replace(loaded, runner=ScriptedRunner(loaded.runner, watch))

    return open_engine(config, load=load)


async def compare_policies(
    config: EngineConfig,
    source: Source,
    options: Options,
    *,
    open_: Opener = open_scripted,
    machine: Callable[[int, Device], Mapping[str, Any]] = machine_facts,
    echo: Callable[[str], object] = print,
    report: Reporter = lambda _done, _total: None,
) -> Outcome:
    """Load the model once and run the workload under each policy, round after round.

    Args:
        source: of the requests.
        open_: opens the engine; the default loads the model of `config`.
        machine: names what computes, given the number of threads and the device.
        echo: takes a line about what was chosen.
        report: told (answers done, answers planned).

    Returns:
        The figures, and the runs they come from.

    Raises:
        ConfigError: the settings cannot be used with these requests or this model.
        ModelError: the model cannot be loaded.
    """
    watch = StepWatch()
    async with open_(config_for(config, max_requests=source.max_requests), watch) as engine:
        compared = await compare_on(engine, watch, source, options, echo=echo, report=report)
        setting = Setting(
            machine=machine(config.num_threads, engine.model.device),
            model=engine.model.name,
            dtype=engine.model.dtype,
            context_length=engine.model.context_length,
            num_blocks=engine.model.num_blocks,
            config=engine.config,
            simulated=False,
            seconds=compared.seconds,
        )
    return summarize(compared.runs, compared.workload, options, setting), compared


def run_compare(
    compare: Callable[[Reporter], Outcome],
    *,
    json_path: Path | None = None,
    html_path: Path | None = None,
    echo: Callable[[str], object] = print,
) -> int:
    """Compare, show the figures, and write the files where asked; gives the exit code.

    Args:
        compare: gives figures and runs; takes what is told about its progress.

    Raises:
        RelevoError: what was asked for cannot be done; told before anything is measured where it can be known.
    """
    check_writable(json_path)
    check_writable(html_path)
    with Progress("Comparing", unit="answers") as progress:
        result, compared = compare(progress)
    for line in ["", *lines_of(result)]:
        echo(line)
    if json_path is not None:
        write_json(json_path, result)
    if html_path is not None:
        write_whole(html_path, page_of(result, compared.runs))
    return 0
