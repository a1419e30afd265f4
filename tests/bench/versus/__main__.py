"""Relevo and other servers on the same work: `python -m tests.bench.versus --peer NAME="COMMAND" ...`.

One server runs at a time; in every second round the order is turned around, so that a machine that grows slower or
faster favours nobody. All get the same requests in a round, from the same client. README.md beside this folder has
commands for other servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from app.cli.options import count
from tests.bench.versus.client import NOT_FINISHED, NOT_SENT
from tests.bench.versus.servers import Program, Server, ServerError, open_server
from tests.bench.versus.summary import OURS, Run, make_run, print_summary, summarize
from tests.bench.versus.work import NUM_REQUESTS, STYLES, WARM_UP_PROMPT, Style, make_bodies, make_warm_up, make_work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.workload import Workload

PATH: Final = "/v1/completions"
ROOT: Final = Path(__file__).resolve().parents[3]
WARM_UP_SALT, PROBE_SALT = 1 << 20, 1 << 21
MAX_STREAMS: Final = 1024
CLIENT: Final = (sys.executable, "-m", "tests.bench.versus.client")


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write the JSON where asked; 1 if a server could not be measured, 130 if interrupted."""
    options = parse(words)
    runs: list[Run] = []
    failures: dict[str, str] = {}
    whole = True
    try:
        measure_all(options, runs, failures)
    except KeyboardInterrupt:
        whole = False
        say("Interrupted; this is what was measured.")
    finally:  # whatever else went wrong, what was measured is not lost
        print_summary(summarize(runs), runs)
        for name, why in failures.items():
            print(f"\n{name} could not be measured, or not to the end: {why}")
        keep(options, runs, failures)
    return 130 if not whole else 1 if failures else 0


def measure_all(options: argparse.Namespace, runs: list[Run], failures: dict[str, str]) -> None:
    """All rounds; what fails once is left out from there on. Figures are kept as they come."""
    with TemporaryDirectory() as folder:
        for round_ in range(options.rounds):
            for program in in_turn(options.programs, round_):
                if program.name in failures:
                    continue
                try:
                    measure(program, round_, options, Path(folder), runs)
                except ServerError as error:
                    failures[program.name] = str(error)
                    say(f"{program.name} is left out from here on: {error}")
                keep(options, runs, failures)


def in_turn(programs: list[Program], round_: int) -> list[Program]:
    """The order of a round: A B C, then C B A."""
    return programs[::-1] if round_ % 2 else programs


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options, checked, with `programs` in their order: Relevo first."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.versus", description=__doc__, allow_abbrev=False)
    parser.add_argument("--relevo", metavar="COMMAND", help="default: the server of this checkout, without drafts")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="{port} and {model} in it are filled in"
    )
    parser.add_argument(
        "--streams", type=streams_of, default="1,16,32", metavar="N,N", help="requests at once (default 1,16,32)"
    )
    parser.add_argument("--rounds", type=count, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--requests", type=count, metavar="N", help=f"of a run (default {NUM_REQUESTS}, else 4 each)")
    parser.add_argument("--model", default="", metavar="FILE", help="what {model} stands for, and for Relevo")
    parser.add_argument("--vocab-size", type=count, default=49_152, metavar="N", help="of its ids (default 49152)")
    parser.add_argument("--start-timeout", type=count, default=300, metavar="S", help="of a server (default 300)")
    parser.add_argument("--timeout", type=count, default=900, metavar="S", help="of a run (default 900)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    options = parser.parse_args(words)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    try:
        options.programs = programs_of(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def programs_of(options: argparse.Namespace) -> list[Program]:
    """Relevo and its peers; `ValueError` says what is wrong with a command."""
    default = f"{shlex.quote(sys.executable)} -m app.cli serve --num-speculative-tokens 0"  # as the peers do it
    relevo = options.relevo or default + (" --model {model}" if options.model else "")
    found = [Program(OURS, relevo if "{port}" in relevo else f"{relevo} --port {{port}}")]
    for word in options.peer:
        name, _, command = word.partition("=")
        if not (name.strip() and name.replace("-", "").replace("_", "").replace(".", "").isalnum() and command.strip()):
            raise ValueError(f"--peer {word!r} is not NAME=COMMAND; a name is letters, digits, dots and hyphens")
        if "{port}" not in command:
            raise ValueError(f"the command of {name} lacks {{port}}, where its port goes")
        found.append(Program(name, command))
    if len({program.name for program in found}) < len(found):
        raise ValueError(f"two servers have one name; {OURS} is taken")
    for program in found:
        if "{model}" in program.command and not options.model:
            raise ValueError(f"the command of {program.name} has {{model}} in it; say with --model what it stands for")
        try:
            program.words(0, options.model)
        except ValueError as error:
            raise ValueError(f"the command of {program.name} cannot be read: {error}") from None
    return found


def streams_of(word: str) -> list[int]:
    """Numbers with commas between them, for an option's `type`."""
    found = [count(part) for part in word.split(",")]
    if max(found) > MAX_STREAMS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_STREAMS} each")
    return found


def measure(program: Program, round_: int, options: argparse.Namespace, folder: Path, runs: list[Run]) -> None:
    """Start a server, warm it up, and add a run for each number of streams to `runs`."""
    say(f"round {round_ + 1}: {program.name} starts")
    with open_server(program, model=options.model, start_timeout=options.start_timeout, folder=folder) as server:
        style = find_style(server, options)
        most = max(options.streams)
        bodies = make_bodies(
            make_warm_up(most), style, model=server.model, salt=WARM_UP_SALT, vocab_size=options.vocab_size
        )
        answers = ask(server, bodies, most, options.timeout)["answers"]
        check_finished(server, [answer["error"] for answer in answers], "the warm-up", options.timeout)
        for streams in options.streams:
            work = make_work(streams, options.requests)
            run = run_work(server, work, streams, style, round_, options)
            runs.append(run)
            speed = run.figures["output_tokens_per_second"]
            told = "no answer" if speed is None else f"{speed:.1f} tokens/s"
            say(f"round {round_ + 1}: {program.name}, {streams} streams: {told}, {run.num_errors} errors")
            check_finished(server, run.errors, f"{streams} streams", options.timeout)
            if speed is None:
                raise server.failure(f"it answered none of {streams} streams: {run.errors[0]}")


def check_finished(server: Server, errors: Iterable[str], what: str, timeout: float) -> None:
    """Raise `ServerError` if the server is gone, or let the time limit pass: it would with the next requests too."""
    server.check_alive()
    if not {NOT_FINISHED, NOT_SENT}.isdisjoint(errors):
        raise server.failure(f"{what}: not all was answered within {timeout:g} s; --timeout says how long to wait")


def find_style(server: Server, options: argparse.Namespace) -> Style:
    """How the server wants to be asked: the first way to which it gives an answer."""
    for style in STYLES:
        bodies = make_bodies(make_warm_up(1), style, model=server.model, salt=PROBE_SALT, vocab_size=options.vocab_size)
        (answer,) = ask(server, bodies, 1, options.timeout)["answers"]
        if not answer["error"]:
            # A list of ids that was taken for something else shows in the length of the prompt.
            if not style.by_ids or abs(answer["prompt_tokens"] - WARM_UP_PROMPT) <= 1:
                return style
            answer["error"] = f"a prompt of {WARM_UP_PROMPT} ids counts {answer['prompt_tokens']} tokens"
        server.check_alive()
        if answer["error"] == NOT_FINISHED:
            break
    raise server.failure(f"it answers no request: {answer['error']}")


def run_work(
    server: Server, work: Workload, streams: int, style: Style, round_: int, options: argparse.Namespace
) -> Run:
    """One run, and what the server used meanwhile."""
    salt = round_ * (MAX_STREAMS + 1) + streams  # nothing that was asked before begins alike
    bodies = make_bodies(work, style, model=server.model, salt=salt, vocab_size=options.vocab_size)
    before = server.usage()
    told = ask(server, bodies, streams, options.timeout)
    after = server.usage()
    return make_run(
        server.program.name, streams, round_, told, start_seconds=server.start_seconds, before=before, after=after
    )


def ask(server: Server, bodies: list[dict[str, Any]], streams: int, timeout: float) -> dict[str, Any]:
    """Run the client, in a process of its own, and give what it tells; `ServerError` where the client fails at it."""
    job = {"port": server.port, "path": PATH, "streams": streams, "timeout": timeout, "bodies": bodies}
    done = subprocess.run(
        CLIENT,
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,  # a key that interrupts us is for us alone; `run` ends the client then
    )
    if done.returncode:
        raise server.failure(f"the client that asked it ended with exit code {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def keep(options: argparse.Namespace, runs: list[Run], failures: dict[str, str]) -> None:
    """Write all that was measured so far, where asked."""
    if options.json is None:
        return
    told = {
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "commands": {program.name: program.command for program in options.programs},
        "model": options.model,
        "rounds": options.rounds,
        "summary": summarize(runs),
        "failures": failures,
        "runs": [asdict(run) for run in runs],
    }
    options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def processor_name() -> str:
    """The processor's own name, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def say(text: str) -> None:
    """Progress, beside what is printed."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server that runs is not left behind
    sys.exit(main())
