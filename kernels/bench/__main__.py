"""Checks every Triton kernel against its plain version, then times it: `python -m kernels.bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.bench.cases import choose
from kernels.bench.timing import Rates, Timing, measure_rates, time_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.bench.cases import Case

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


def run_on_device(cases: Sequence[Case], device: torch.device) -> tuple[dict[str, object], int]:
    """Print a table of the cases as they are done; gives all figures, and how many were wrong or failed."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{properties.name}, {properties.multi_processor_count} multiprocessors, {versions}")
    rates = measure_rates(device)
    print(f"copy {rates.copy / 1e12:.2f} TB/s, bf16 product {rates.multiply / 1e12:.0f} TFLOP/s\n\n{HEAD}")
    print("|---|---|---|---|---|---|---|---|")
    rows, wrong = [], 0
    arch = 10 * properties.major + properties.minor
    for case in cases:
        if torch.version.hip is None and arch < case.least_arch:
            continue
        try:
            timing = time_case(case, device)
        except Exception as error:  # whatever it is, the others are wanted too
            wrong += 1
            why = "WRONG" if isinstance(error, AssertionError) else type(error).__name__
            print(f"| {case.kernel} | {case.shape} | {why}: {' '.join(str(error).split())} |", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        print(row_of(case, timing, rates), flush=True)
        rows.append({"kernel": case.kernel, "shape": case.shape, **asdict(timing)})
    return {"device": properties.name, "versions": versions, "rates": asdict(rates), "rows": rows}, wrong


def check_all(cases: Sequence[Case]) -> None:
    """Check them on the CPU; says which kernels agree, in how many cases."""
    agreed: dict[str, int] = {}
    for case in cases:
        print(f"{case.kernel}: {case.shape}", flush=True)
        case.make(torch.device("cpu")).check()
        agreed[case.kernel] = agreed.get(case.kernel, 0) + 1
    for kernel, count in agreed.items():
        print(f"{kernel}: {count} cases agree")


def interpret(arguments: Sequence[str]) -> int:
    """Once more in a process that has Triton's interpreter: it must be chosen before Triton is imported."""
    command = ["/usr/bin/env", "TRITON_INTERPRET=1", sys.executable, "-m", "kernels.bench", *arguments]
    return subprocess.run(command, check=False).returncode  # noqa: S603


def main(argv: Sequence[str] | None = None) -> int:
    """Gives the exit code: 1 where there is no device, or a kernel was wrong or failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--kernel", nargs="+", default=[], help="only these")
    parser.add_argument("--first", type=int, metavar="N", help="only the first cases of each kernel")
    parser.add_argument("--interpret", action="store_true", help="check small cases in Triton's interpreter alone")
    parser.add_argument("--tune", action="store_true", help="time the attention with other cuts as well")
    parser.add_argument("--json", type=Path, metavar="F", help="write all figures here")
    options = parser.parse_args(arguments)
    if options.interpret:
        try:
            import triton
        except ImportError:
            print("Triton is not installed: pip install triton", file=sys.stderr)
            return 1
        if not triton.knobs.runtime.interpret:
            return interpret(arguments)
        from kernels.bench.registry import small_cases

        check_all(choose(small_cases(), options.kernel, options.first))
        return 0
    if not torch.cuda.is_available():
        print("No GPU that torch can use: `--interpret` checks the kernels without one.", file=sys.stderr)
        return 1
    from kernels.bench.registry import main_cases, tuning_cases

    cases = choose(main_cases(), options.kernel, options.first) + (tuning_cases() if options.tune else [])
    figures, wrong = run_on_device(cases, torch.device("cuda", torch.cuda.current_device()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
