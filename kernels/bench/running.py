"""Goes through cases: on a device each is checked, timed and told of at once; on the processor it is checked alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kernels.bench.timing import time_case

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.bench.cases import Case
    from kernels.bench.timing import Device, Rates, Timing

HEAD = "| kernel | shape | µs | MB | of the copy's rate | TFLOP/s | of the product's rate | torch's own, µs |"


def row_of(case: Case, timing: Timing, rates: Rates) -> str:
    """A case in a table of Markdown."""
    read, done = timing.num_bytes / timing.seconds, timing.flops / timing.seconds
    arithmetic = (f"{done / 1e12:.1f}", f"{done / rates.multiply:.0%}") if timing.flops else ("", "")
    rival = f"{timing.rival_seconds * 1e6:.1f}" if timing.rival_seconds else ""
    figures = (
        f"{timing.seconds * 1e6:.1f}",
        f"{timing.num_bytes / 1e6:.1f}",
        f"{read / rates.copy:.0%}",
        *arithmetic,
        rival,
    )
    return f"| {case.kernel} | {case.shape} | {' | '.join(figures)} |"


def run_on_device(cases: Sequence[Case], device: Device, keep: Callable[[dict[str, Any]], object]) -> int:
    """Print a table of the cases as they are done.

    Args:
        keep: told behind each case all figures so far: `device`, `rates`, `rows` and `failed`. What cuts the run short
            costs one case.

    Returns:
        How many were wrong or failed.
    """
    rates = device.rates()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    figures = {"device": device.describe(), "rates": asdict(rates), "rows": rows, "failed": failed}
    print(figures["device"])
    print(f"copy {rates.copy / 1e12:.2f} TB/s, bf16 product {rates.multiply / 1e12:.0f} TFLOP/s\n\n{HEAD}")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in filter(device.has_what_it_takes, cases):
        name = {"kernel": case.kernel, "shape": case.shape}
        try:
            timing = time_case(case, device)
        except Exception as error:  # whatever it is, the others are wanted too
            why = "WRONG" if isinstance(error, AssertionError) else type(error).__name__
            failed.append({**name, "why": f"{why}: {' '.join(str(error).split())}"})
            print(f"| {case.kernel} | {case.shape} | {failed[-1]['why']} |", flush=True)
        else:
            rows.append({**name, **asdict(timing)})
            print(row_of(case, timing, rates), flush=True)
        finally:
            device.release()
        keep(figures)
    if lonely := without_rival(rows):
        print(f"\nTorch has nothing to be timed beside {', '.join(lonely)}.", flush=True)
    return len(failed)


def without_rival(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of which kernels how many cases have nothing of torch's own beside them."""
    timed = Counter([row["kernel"] for row in rows])
    lonely = Counter([row["kernel"] for row in rows if row["rival_seconds"] is None])
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
