"""`relevo generate`: one prompt, or an OpenAI batch file, with the server's engine and no server."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from app.cli.options import OFFLINE_SECTIONS, Parser, add_command, add_settings, settings_of
from app.cli.progress import Progress
from app.cli.pull import with_model
from app.render.numbers import count, plural
from engine.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from app.batch_output import Earlier
    from app.config import Settings
    from engine.config import EngineConfig

# Flag of the command, field of the request body, type.
_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "longest answer, in tokens"),
    ("temperature", float, "0 always takes the likeliest token"),
    ("top_k", int, "draw from the k likeliest tokens only; 0 draws from all"),
    ("top_p", float, "draw from the likeliest tokens that make up this share"),
    ("min_p", float, "drop tokens below this share of the likeliest one's probability"),
    ("seed", int, "the same seed draws the same answer"),
)
_DEFAULT_MAX_TOKENS = 256


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "generate", "answer one prompt, or a batch file, without a server", run)
    command.add_argument("-p", "--prompt", metavar="TEXT", help="a user's turn, answered on stdout as it is written")
    command.add_argument("-i", "--input", type=Path, metavar="FILE", help="an OpenAI batch file (JSON lines)")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where the results of --input go; lines that are answered there are left out, failed and changed ones not",
    )
    command.add_argument(
        "--restart",
        action="store_true",
        help="throw away what is in --output and answer every line anew, with another model for example",
    )
    prompt = command.add_argument_group("with --prompt")
    prompt.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    prompt.add_argument("--system", metavar="TEXT", help="a system prompt before the user's turn")
    prompt.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated")
    for name, kind, text in _FIELDS:
        prompt.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=text)
    add_settings(command, OFFLINE_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Answer the prompt, or the file."""
    if (options.prompt is None) == (options.input is None):
        raise ConfigError("Give either --prompt TEXT, or --input FILE and --output FILE.")
    if options.restart and options.input is None:
        raise ConfigError("--restart goes with --input and --output.")
    if (options.input is None) != (options.output is None):
        raise ConfigError("--input and --output go together.")
    if options.input is not None and options.output.exists() and options.output.samefile(options.input):
        raise ConfigError("--output would overwrite --input; name another file.")
    settings = settings_of(options)
    if options.prompt is not None:
        return trio.run(_answer_prompt, with_model(settings).engine_config(), options)
    return _run_file(options, settings)


def _run_file(options: argparse.Namespace, settings: Settings) -> int:
    """Answer the file, all of it or what is left of it."""
    from app import batch

    if not options.output.parent.is_dir():
        raise ConfigError(f"There is no folder {options.output.parent} for --output; make it, or name another.")
    with options.input.open("rb") as source:
        total = sum(1 for _ in batch.read_lines(source))
    # A file that cannot be written is told of before the model is loaded.
    options.output.open("w" if options.restart else "a").close()
    earlier = _read_earlier(options)
    config = with_model(settings).engine_config()
    with _told_when_interrupted(options.output):
        return trio.run(_answer_file, config, options, earlier, total)


def _read_earlier(options: argparse.Namespace) -> Earlier:
    """What still holds of an earlier run, told to whoever looks on."""
    from app import batch
    from app.batch_output import Earlier, read_earlier

    if not options.output.stat().st_size:
        return Earlier()
    with options.input.open("rb") as source:
        wanted = batch.read_wanted(batch.read_lines(source))
    earlier = read_earlier(options.output, wanted)
    told = [plural(len(earlier.answers), "line") + " answered before"]
    if earlier.num_failed:
        told.append(f"{count(earlier.num_failed)} failed and tried again")
    if earlier.num_changed:
        told.append(f"{count(earlier.num_changed)} changed and answered anew")
    print(f"going on with {options.output}: {', '.join(told)} (--restart answers all anew)", file=sys.stderr)
    return earlier


async def _answer_prompt(config: EngineConfig, options: argparse.Namespace) -> int:
    from app import offline
    from app.api.planning import CHAT_URL, COMPLETION_URL
    from engine.engine import open_engine

    async with open_engine(config) as engine:
        raw = options.raw or engine.chat_template is None
        try:
            job = offline.plan_whole(engine, COMPLETION_URL if raw else CHAT_URL, _body(options, raw=raw))
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from None
        await offline.stream(engine, job, _write)
    _write("\n")
    return 0


def _body(options: argparse.Namespace, *, raw: bool) -> dict[str, Any]:
    """The request that the flags amount to; it goes the way of every other request."""
    body: dict[str, Any] = {name: getattr(options, name) for name, _, _ in _FIELDS} | {"stop": options.stop}
    if body["max_tokens"] is None:
        body["max_tokens"] = _DEFAULT_MAX_TOKENS
    if raw:
        return body | {"prompt": options.prompt}
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    return body | {"messages": [*system, {"role": "user", "content": options.prompt}]}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _answer_file(config: EngineConfig, options: argparse.Namespace, earlier: Earlier, total: int) -> int:
    from app import batch
    from engine.engine import open_engine

    async with open_engine(config) as engine:
        with (
            options.input.open("rb") as source,
            options.output.open("a", encoding="utf-8") as target,
            Progress("Answering", unit="lines") as progress,
        ):
            counts = await batch.run_batch(
                engine,
                batch.read_lines(source),
                target,
                earlier=earlier,
                progress=lambda counts: progress(counts.total, total, f"{counts.tokens_per_second:.1f} tokens/s"),
            )
    before = f" ({count(counts.before)} of them before)" if counts.before else ""
    failed = f", {count(counts.failed)} failed (their 'error' says why)" if counts.failed else ""
    speed = f"{count(counts.num_tokens)} tokens, {counts.tokens_per_second:.1f} a second"
    print(
        f"{count(counts.answered)} of {plural(counts.total, 'line')} answered{before}{failed}; {speed}; "
        f"results in {options.output}",
        file=sys.stderr,
    )
    return 1 if counts.failed else 0


@contextmanager
def _told_when_interrupted(output: Path) -> Iterator[None]:
    """Say how to go on to whoever presses Ctrl+C."""
    try:
        yield
    except* KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what is in {output}", file=sys.stderr)
        raise
