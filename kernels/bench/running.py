"""Goes through cases: on a device each is checked, timed and told of at once; on the processor it is checked alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kernels.bench.timing import Rates, time_case, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.bench.cases import Case
    from kernels.bench.timing import Device, Timing

HEAD = "| kernel | shape | µs | MB | of the copy's rate | TFLOP/s | of the product's rate | torch's own, µs |"


def row_of(case: Case, timing: Timing, rates: Rates) -> str:
    """A case in a table of Markdown."""
    read, done = timing.num_bytes / timing.seconds, timing.flops / timing.seconds
    arithmetic = (f"{done / 1e12:.1f}", f"{done / rates.multiply:.0%}") if timing.flops else ("", "")
    rival = f"{timing.rival_seconds * 1e6:.1f}" if timing.rival_seconds else timing.rival_failed
    figures = (
        f"{timing.seconds * 1e6:.1f}",
        f"{timing.num_bytes / 1e6:.1f}",
        f"{read / rates.copy:.0%}",
        *arithmetic,
        rival,
    )
    return f"| {case.kernel} | {case.shape} | {' | '.join(figures)} |"


def run_on_device(
    cases: Sequence[Case],
    device: Device,
    keep: Callable[[dict[str, Any]], object],
    before: dict[str, Any] | None = None,
) -> int:
    """Print a table of the cases as they are done.

    Args:
        keep: told before and behind each case all figures so far: `device`, `rates`, `rows`, `failed`, and the last
            case as `under_way` until all are done. What cuts the run short costs one case.
        before: what an earlier run kept: cases that are in it are done, and not done again.

    Returns:
        How many were wrong or failed. Behind one that breaks the device for this process no more are tried: there
        `under_way` stays.
    """
    figures = before or {"device": device.describe(), "rates": asdict(device.rates()), "rows": [], "failed": []}
    rates = Rates(**figures["rates"])
    left = [case for case in cases if device.has_what_it_takes(case) and not is_done(_name(case), figures)]
    print(figures["device"])
    print(f"copy {rates.copy / 1e12:.2f} TB/s, bf16 product {rates.multiply / 1e12:.0f} TFLOP/s\n\n{HEAD}")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in left:
        figures["under_way"] = _name(case)
        keep(figures)
        print(_do(case, device, rates, figures), flush=True)
        keep(figures)  # before the device is asked for anything
        try:
            device.release()
        except RuntimeError as error:
            print(f"\nThe device computes nothing more in this process: {told(error)}", flush=True)
            return len(figures["failed"])
    figures.pop("under_way", None)
    keep(figures)
    if lonely := without_rival(figures["rows"]):
        print(f"\nTorch has nothing to be timed beside {', '.join(lonely)}.", flush=True)
    return len(figures["failed"])


def _do(case: Case, device: Device, rates: Rates, figures: dict[str, Any]) -> str:
    """Add to the rows or to what failed; gives the line for the table."""
    try:
        timing = time_case(case, device)
    except Exception as error:  # whatever it is, the others are wanted too
        figures["failed"].append({**_name(case), "why": told(error)})
        return f"| {case.kernel} | {case.shape} | {told(error)} |"
    figures["rows"].append({**_name(case), **asdict(timing)})
    return row_of(case, timing, rates)


def _name(case: Case) -> dict[str, str]:
    return {"kernel": case.kernel, "shape": case.shape}


def is_done(name: dict[str, str], figures: dict[str, Any]) -> bool:
    """Whether there is a figure of a case, or a word about why there is none."""
    return any(name.items() <= row.items() for row in (*figures["rows"], *figures["failed"]))


def settle(figures: dict[str, Any], why: str) -> bool:
    """What was under way when the process ended is done, for it would end the next one too.

    Returns:
        Whether there is more to do.
    """
    if (name := figures.get("under_way")) and not is_done(name, figures):
        figures["failed"].append({**name, "why": why})
    return name is not None


def without_rival(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of which kernels how many cases have nothing of torch's own beside them."""
    timed = Counter([row["kernel"] for row in rows])
    lonely = Counter([row["kernel"] for row in rows if row["rival_seconds"] is None and not row["rival_failed"]])
    return [f"{kernel} ({count} of {timed[kernel]})" for kernel, count in lonely.items()]


def check_all(cases: Sequence[Case]) -> None:
    """Check them on the CPU; says which kernels agree, in how many cases."""
    agreed = Counter[str]()
    for case in cases:
        print(f"{case.kernel}: {case.shape}", flush=True)
        case.make(torch.device("cpu")).check()
        agreed[case.kernel] += 1
    for kernel, count in agreed.items():
        print(f"{kernel}: {count} cases agree")
