"""From what each request saw to what is printed: figures of a run, medians over rounds, ratios within a round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from engine.samples import nearest_rank
from tests.bench.versus.client import NOT_FINISHED, NOT_SENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.bench.versus.servers import Usage

OURS: Final = "relevo"
# Name of a figure, head of its column, what it is multiplied by, decimals.
COLUMNS: Final = (
    ("output_tokens_per_second", "tokens/s", 1, 1),
    ("ttft_p50_seconds", "TTFT p50 ms", 1e3, 0),
    ("ttft_p95_seconds", "p95", 1e3, 0),
    ("itl_p50_seconds", "ITL p50 ms", 1e3, 1),
    ("itl_p95_seconds", "p95", 1e3, 1),
    ("e2e_p95_seconds", "E2E p95 s", 1, 2),
    ("cpu_seconds_per_1000_tokens", "CPU s/1000 tok", 1, 2),
    ("start_seconds", "start s", 1, 1),
    ("peak_rss_bytes", "peak RSS MB", 1e-6, 0),
    ("client_share", "client % of a core", 100, 1),
)
RATIOS: Final = tuple(column[0] for column in COLUMNS[:7])


@dataclass(frozen=True, slots=True)
class Run:
    """One server under one number of streams, in one round.

    Attributes:
        figures: by the names of `COLUMNS`; `None` where nothing was measured.
        num_errors: requests without a whole answer; `errors` says why, each reason once.
        num_other_lengths: answers that ended before or after the length that was asked for.
        tokens_per_piece: of the streams; above 1, gaps are shared out evenly among an answer's tokens.
    """

    server: str
    streams: int
    round: int
    figures: dict[str, float | None]
    num_requests: int
    num_errors: int
    errors: tuple[str, ...]
    num_other_lengths: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_piece: float | None


def make_run(
    server: str,
    streams: int,
    round_: int,
    told: Mapping[str, Any],
    *,
    start_seconds: float,
    before: Usage | None,
    after: Usage | None,
) -> Run:
    """The figures of a run.

    Args:
        told: what the client told, see `client.run_job`.
        before, after: what the server had used before the run and after it.
    """
    good = [answer for answer in told["answers"] if not answer["error"]]
    num_tokens = sum(answer["output_tokens"] for answer in good)
    figures: dict[str, float | None] = dict.fromkeys(column[0] for column in COLUMNS)
    figures |= {"start_seconds": start_seconds, "client_share": told["cpu_seconds"] / told["wall_seconds"]}
    if after is not None:
        figures["peak_rss_bytes"] = float(after.peak_bytes)
    if good:
        ttft = sorted(answer["first"] - answer["sent"] for answer in good)
        e2e = sorted(answer["finished"] - answer["sent"] for answer in good)
        itl = sorted(gap for answer in good for gap in token_gaps(answer))
        begin, end = min(answer["sent"] for answer in told["answers"]), max(answer["finished"] for answer in good)
        if {answer["error"] for answer in told["answers"]} & {NOT_FINISHED, NOT_SENT}:
            end = told["wall_seconds"]  # the time in which nothing more came counts too
        figures |= {
            "output_tokens_per_second": num_tokens / (end - begin),
            "ttft_p50_seconds": nearest_rank(ttft, 50),
            "ttft_p95_seconds": nearest_rank(ttft, 95),
            "e2e_p95_seconds": nearest_rank(e2e, 95),
        }
        if itl:
            figures |= {"itl_p50_seconds": nearest_rank(itl, 50), "itl_p95_seconds": nearest_rank(itl, 95)}
        if before is not None and after is not None:
            figures["cpu_seconds_per_1000_tokens"] = (after.cpu_seconds - before.cpu_seconds) * 1000 / num_tokens
    num_pieces = sum(len(answer["gaps"]) + 1 for answer in good)
    return Run(
        server=server,
        streams=streams,
        round=round_,
        figures=figures,
        num_requests=len(told["answers"]),
        num_errors=len(told["answers"]) - len(good),
        errors=tuple(sorted({answer["error"] for answer in told["answers"]} - {""})),
        num_other_lengths=sum(answer["output_tokens"] != answer["asked_tokens"] for answer in good),
        prompt_tokens=sum(answer["prompt_tokens"] for answer in good),
        output_tokens=num_tokens,
        tokens_per_piece=num_tokens / num_pieces if num_pieces else None,
    )


def token_gaps(answer: Mapping[str, Any]) -> list[float]:
    """Seconds from one token to the next.

    A piece of text may be several tokens, and which is not told: then each gap is divided by the mean number of the
    answer's tokens in a piece.
    """
    tokens_per_piece = answer["output_tokens"] / (len(answer["gaps"]) + 1)
    return [gap / tokens_per_piece for gap in answer["gaps"]]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, least and greatest of what was measured; `None` of nothing."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each server and number of streams the spread of each figure over the rounds, and of our ratio to it."""
    return [
        {
            "server": server,
            "streams": streams,
            "rounds": len(mine),
            "requests": sum(run.num_requests for run in mine),
            "errors": sum(run.num_errors for run in mine),
            "other_lengths": sum(run.num_other_lengths for run in mine),
            "figures": {name: spread(run.figures[name] for run in mine) for name, *_ in COLUMNS},
            "ratios": None if server == OURS else {name: spread(_ratios(runs, mine, name)) for name in RATIOS},
        }
        for streams, server, mine in _groups(runs)
    ]


def _groups(runs: Sequence[Run]) -> Iterator[tuple[int, str, list[Run]]]:
    names = list(dict.fromkeys(run.server for run in sorted(runs, key=lambda run: run.round)))
    for streams in sorted({run.streams for run in runs}):
        for server in names:
            mine = [run for run in runs if (run.streams, run.server) == (streams, server)]
            if mine:
                yield streams, server, mine


def _ratios(runs: Sequence[Run], theirs: Sequence[Run], name: str) -> Iterator[float | None]:
    """Ours divided by theirs, of the same round."""
    ours = {(run.streams, run.round): run.figures[name] for run in runs if run.server == OURS}
    for run in theirs:
        our, their = ours.get((run.streams, run.round)), run.figures[name]
        yield our / their if our is not None and their else None


def print_summary(summary: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> None:
    """Two tables for each number of streams, and what has to be said with them."""
    for streams in sorted({row["streams"] for row in summary}):
        rows = [row for row in summary if row["streams"] == streams]
        requests, rounds = max(r.num_requests for r in runs if r.streams == streams), max(r["rounds"] for r in rows)
        print(
            f"\n{streams} stream{'s' * (streams > 1)}: {requests} requests a round, {rounds} rounds; median (min-max)"
        )
        heads = ["", *[head for _, head, *_ in COLUMNS], "errors"]
        lines = [
            [row["server"], *[_cell(row["figures"][name], by, digits) for name, _, by, digits in COLUMNS], _faults(row)]
            for row in rows
        ]
        _print_table(heads, lines)
        ratios = [row for row in rows if row["ratios"]]
        if any(any(row["ratios"].values()) for row in ratios):
            heads = [f"{OURS} / ...", *[head for name, head, *_ in COLUMNS if name in RATIOS]]
            lines = [[row["server"], *[_cell(row["ratios"][name], 1, 2) for name in RATIOS]] for row in ratios]
            _print_table(heads, lines)
    _print_notes(runs)


def _print_notes(runs: Sequence[Run]) -> None:
    """What the tables leave out: why requests failed, and where a server did other work or tells less."""
    notes: list[str] = []
    for run in runs:
        where = f"{run.server}, {run.streams} streams, round {run.round + 1}"
        notes += [f"{where}: {error}" for error in run.errors]
        asked = {other.prompt_tokens for other in runs if (other.streams, other.round) == (run.streams, run.round)}
        if not run.num_errors and run.prompt_tokens < 0.95 * max(asked):
            notes.append(f"{where}: {run.prompt_tokens} prompt tokens, where another server counts {max(asked)}.")
        if run.tokens_per_piece is not None and run.tokens_per_piece > 1.02:
            notes.append(f"{where}: {run.tokens_per_piece:.2f} tokens in a piece of text; gaps are divided by that.")
    print("\n".join(notes))


def _faults(row: Mapping[str, Any]) -> str:
    other = f", {row['other_lengths']} of another length" if row["other_lengths"] else ""
    return f"{row['errors']} of {row['requests']}{other}"


def _cell(values: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if values is None:
        return "-"
    middle, low, high = (f"{values[name] * factor:.{digits}f}" for name in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"


def _print_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    for line in (heads, *lines):
        print("  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip())
