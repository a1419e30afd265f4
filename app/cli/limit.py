"""`relevo limit`: the operating limit of a server under a workload."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import (
    OFFLINE_SECTIONS,
    Parser,
    add_command,
    add_lengths,
    add_settings,
    count,
    count_or_zero,
    positive,
    positive_or_none,
    settings_of,
    share,
    with_one_number_of_seats,
)
from app.cli.pull import fetch
from app.cli.simulation import add_simulation, machine_of, refuse_machine
from app.cli.tune import TUNE_SECONDS, add_tune, wish_of
from app.config import keys
from engine.config import SloTargets
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.config import Settings
    from app.limit.command import Reporter
    from app.limit.endpoint import Endpoint
    from app.limit.options import Options
    from app.limit.summary import Outcome
    from app.limit.watch import Lines

POLICY = "scheduler.policy"
POLICIES = ("static", "dynamic", "continuous")
ASKED = (
    "workload", "trace", "conversations", "mix", "skip_bad_lines", "chars_per_token", "max_error_share", "factor",
    "context", "arrivals", "gap_cv", "requests", "duration", "deadline", "repeats", "seed", "price_per_hour",
    "think_time",
)  # fmt: skip

# What is not for an earlier result, which is only shown again.
MEASURING = (
    "url", "simulate", "json", "progress_json", "workload", "trace", "conversations", "mix", "tune", "policies",
)  # fmt: skip


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "limit", "the highest load at which a server keeps its promised latencies", run)
    command.add_argument("--url", metavar="U", help="an OpenAI-compatible server (default: this one is started)")
    command.add_argument("--api", choices=("chat", "completions"), default="chat", help="route (default chat)")
    command.add_argument("--api-key", metavar="K", help="of that server; @FILE reads it from a file")
    command.add_argument("--admin-token", metavar="K", help="that its /metrics wants; @FILE reads it from a file")
    command.add_argument("--context", type=count, metavar="N", help="its context in tokens, where it does not tell")
    _add_promise(command)
    _add_workload(command)
    command.add_argument("--duration", type=positive, metavar="S", help="seconds to aim at (default 480; --tune 1800)")
    command.add_argument("--requests", type=count, metavar="N", help="that count in a run (default: what fits)")
    command.add_argument("--repeats", type=count, metavar="N", help="seeds tried near the limit (default 3)")
    command.add_argument(
        "--seats",
        type=count,
        metavar="N",
        help="as --max-num-seqs; with --url: asking at once",
    )
    command.add_argument("--price-per-hour", type=positive, metavar="P", help="prints the cost of a million tokens")
    command.add_argument("--think-time", type=positive, metavar="S", help="between requests of a user: prints users")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    command.add_argument(
        "--progress-json",
        type=Path,
        metavar="FILE",
        help="a JSON object a line while it runs; - is stdout, and no table",
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there")
    command.add_argument("--against", type=Path, metavar="FILE", help="compare with what --json wrote earlier")
    command.add_argument("--from", type=Path, metavar="FILE", help="measure nothing; show what --json wrote earlier")
    add_tune(command)
    command.add_argument(
        "--policies", type=_policies, metavar="A,B", help=f"compare the limit under these: {', '.join(POLICIES)}"
    )
    add_simulation(command)
    add_settings(command, OFFLINE_SECTIONS)


def _add_promise(command: Parser) -> None:
    group = command.add_argument_group("targets, 95 % of requests (gaps) within so many seconds, or none")
    group.add_argument("--ttft-p95", type=positive_or_none, metavar="S", help="first token (default: [slo], 2)")
    group.add_argument("--itl-p95", type=positive_or_none, metavar="S", help="gap of a token (default: [slo], 0.25)")
    group.add_argument("--e2e-p95", type=positive_or_none, metavar="S", help="whole answer (default: [slo], none)")
    group.add_argument("--max-error-share", type=share, metavar="X", help="of requests that fail (default 0.01)")
    group.add_argument("--deadline", type=positive, metavar="S", help="then a request fails (default 120, or more)")


def _add_workload(command: Parser) -> None:
    group = command.add_argument_group("what is asked")
    add_lengths(group)
    group.add_argument("--conversations", type=Path, metavar="FILE", help="lengths of texts like ShareGPT's (JSON)")
    group.add_argument("--chars-per-token", type=positive, metavar="X", help="of those texts (default 4)")
    group.add_argument("--mix", type=Path, metavar="FILE", help="classes of work with targets of their own (TOML)")
    group.add_argument("--factor", type=positive, metavar="X", help="divide lengths by it (default: what fits)")
    group.add_argument(
        "--arrivals", choices=("poisson", "constant", "gamma", "own"), help="(default: own of a trace, else poisson)"
    )
    group.add_argument("--gap-cv", type=positive, metavar="X", help="coefficient of variation of the gaps, for gamma")
    group.add_argument("--seed", type=count_or_zero, metavar="N", help="of lengths and arrivals (default 0)")


def run(options: argparse.Namespace) -> int:
    """Look for the limit, print the figures, and write the files where asked."""
    _keep_apart(options)
    if getattr(options, "from") is not None:
        return _tell_again(options)
    files = [name for name in ("workload", "trace", "conversations", "mix") if getattr(options, name) is not None]
    if len(files) > 1:
        raise ConfigError(f"Give only one of {', '.join(f'--{name}' for name in files)}.")
    if options.gap_cv is not None and options.arrivals != "gamma":
        raise ConfigError("--gap-cv is for --arrivals gamma.")
    if options.gap_cv is None and options.arrivals == "gamma":
        raise ConfigError("--gap-cv is missing: it makes the bursts of --arrivals gamma, and 1 would be poisson.")
    if options.simulate:
        _refuse_of_a_server(options)
    if not options.simulate:
        refuse_machine(options)
    wish_of(options)  # what cannot be is told at once
    if options.policies and (options.url is not None or getattr(options, POLICY) is not None):
        raise ConfigError("--policies starts a server under each of them; leave --url and --policy out.")
    settings = settings_of(options if options.url is not None else with_one_number_of_seats(options))
    from app.limit.command import run_limit
    from app.limit.watch import open_lines

    asked = _asked(options, settings)
    with open_lines(options.progress_json) as lines:
        find_ = partial(_find_under_policies if options.policies else _find, options, settings, asked, lines)
        echo = None if str(options.progress_json) == "-" else print
        return run_limit(
            find_,
            asked,
            json_path=options.json,
            html_path=options.html,
            against=options.against,
            lines=lines,
            echo=echo,
        )


def _refuse_of_a_server(options: argparse.Namespace) -> None:
    """Refuse what would be said to a server, where none is asked."""
    if options.url is not None:
        raise ConfigError("Give either --simulate or --url.")
    for name, instead in (("api_key", ""), ("admin_token", ""), ("context", ", or say --max-model-len")):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for a server, and --simulate asks none; leave it out{instead}.")


def _keep_apart(options: argparse.Namespace) -> None:
    """Refuse to write over what is read, or twice into one file; the result may take the place of the one before it."""
    written = [name for name in ("json", "html", "progress_json") if isinstance(getattr(options, name), Path)]
    read = ("trace", "conversations", "mix", "against", "from", "config", "cost_model")
    taken: dict[Path, str] = {}
    for name in (*read, *written):
        path = getattr(options, name, None)
        if path is None or str(path) == "-":
            continue
        other = taken.get(Path(path).resolve())
        if other is not None and name in written and (other, name) != ("against", "json"):
            flags = [f"--{each.replace('_', '-')}" for each in (other, name)]
            raise ConfigError(f"{flags[0]} and {flags[1]} are the same file, {path}: name another one to write to.")
        taken[Path(path).resolve()] = name


def _tell_again(options: argparse.Namespace) -> int:
    """Show an earlier result."""
    from app.limit.telling import tell_again

    for name in MEASURING:
        if getattr(options, name):
            raise ConfigError(f"--from measures nothing; leave --{name.replace('_', '-')} out.")
    return tell_again(getattr(options, "from"), against=options.against, html_path=options.html)


def _asked(options: argparse.Namespace, settings: Settings) -> Options:
    from app.limit.options import Options

    given = {name: value for name in ASKED if (value := getattr(options, name)) is not None}
    if options.tune is not None:
        given.setdefault("duration", TUNE_SECONDS)
    slo = settings.slo
    targets = [
        default if given_ is None else given_ or None
        for given_, default in (
            (options.ttft_p95, slo.ttft_p95_seconds),
            (options.itl_p95, slo.itl_p95_seconds),
            (options.e2e_p95, slo.e2e_p95_seconds),
        )
    ]
    background = SloTargets(**settings.slo_background.model_dump())
    return Options(**given, streams=options.seats, targets=SloTargets(*targets), background_targets=background)


def _find(
    options: argparse.Namespace, settings: Settings, asked: Options, lines: Lines | None, report: Reporter
) -> Outcome:
    find = _find_simulated if options.simulate else _find_over_http
    return find(options, settings, asked, lines, report)


def _find_under_policies(
    options: argparse.Namespace, _settings: Settings, asked: Options, lines: Lines | None, report: Reporter
) -> Outcome:
    """As if each policy was named in turn."""
    from app.limit.policies import find_under

    def find(name: str, asked: Options, report: Reporter) -> Outcome:
        named = argparse.Namespace(**{**vars(options), POLICY: name})
        return _find(named, settings_of(named), asked, lines, report)

    return find_under(options.policies, find, asked, report)


def _find_simulated(
    options: argparse.Namespace, settings: Settings, asked: Options, lines: Lines | None, report: Reporter
) -> Outcome:
    from app.limit.options import make_source
    from app.limit.simulated import find_simulated

    source, config = make_source(asked), settings.engine_config()
    machine, wish = machine_of(options, config), wish_of(options)
    if wish is not None:
        from app.limit.tune_simulated import tune_simulated

        return tune_simulated(machine, config, source, asked, wish, report, lines)
    return find_simulated(machine, config, source, asked, report, lines)


def _find_over_http(
    options: argparse.Namespace, settings: Settings, asked: Options, lines: Lines | None, report: Reporter
) -> Outcome:
    """Against the server that was named, or one that is started for it."""
    from app.limit.command import Looking
    from app.limit.interrupted import Interrupted, number_of
    from app.limit.options import make_source
    from app.limit.watch import Watch

    source, wish = make_source(asked), wish_of(options)
    found: Outcome | None = None
    try:
        with _open_endpoint(options, settings, asked, report) as endpoint:
            if wish is not None:
                from app.limit.tune_http import find_tuned

                found = find_tuned(endpoint, source, asked, wish, report, lines or Watch())
            else:
                found = Looking(endpoint, source, asked, report, lines).find()
        return found
    except KeyboardInterrupt as key:
        if found is None:
            raise
        # All was measured when the server that was started here was ended.
        raise Interrupted(number_of(key), found) from None


@contextmanager
def _open_endpoint(
    options: argparse.Namespace, settings: Settings, asked: Options, report: Reporter
) -> Iterator[Endpoint]:
    from app.limit.endpoint import find_endpoint
    from app.limit.own_server import open_own_server

    model = getattr(options, "model.name")
    key, token = _secret("--api-key", options.api_key), _secret("--admin-token", options.admin_token)
    with ExitStack() as stack:
        url = options.url
        if url is None:
            for flag, word in (("--api-key", key), ("--admin-token", token)):
                if word is not None:
                    raise ConfigError(f"{flag} is for the server of --url.")
            fetch(settings.model.name)
            report(0, int(asked.duration), "starting the server")
            url = stack.enter_context(open_own_server([*_flags(options)]))
            model = None
            key = next((one.key.get_secret_value() for one in settings.security.api_keys), None)
            secret = settings.security.admin_token
            token = secret.get_secret_value() if secret is not None else None
        elif given := [flag for flag in _flags(options) if flag.startswith("--") and flag != "--model"]:
            raise ConfigError(f"{given[0]} is for a server that is started here; leave it out with --url.")
        yield find_endpoint(url, options.api, model=model, key=key, admin_token=token, context=asked.context)


def _flags(options: argparse.Namespace) -> Iterator[str]:
    """The settings that were given as flags, for the server that is started."""
    if options.config is not None:
        yield from ("--config", str(options.config))
    for key in keys():
        value = getattr(options, key.dotted, None)
        if value is not None:
            yield from (key.flag, str(value))


def _policies(word: str) -> tuple[str, ...]:
    """Several batching policies, for an option's `type`."""
    names = tuple(word.split(","))
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(POLICIES):
        raise argparse.ArgumentTypeError(f"must be two or more of {', '.join(POLICIES)}, with a comma between them")
    return names


def _secret(flag: str, word: str | None) -> str | None:
    """A key, or the content of a file."""
    if word is not None and word.startswith("@"):
        try:
            word = Path(word[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"The file of {flag}, {word[1:]}, cannot be read: {said}.") from None
    # It goes into a header: a line of its own there would be another header.
    if word is not None and not (word.isascii() and word.isprintable() and word):
        raise ConfigError(f"{flag} is no key: keys are one line of printable ASCII characters.")
    return word
