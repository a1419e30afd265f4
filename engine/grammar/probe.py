"""Compiles one grammar in a process of its own, which may crash, hang or fill its memory in the server's place.

llguidance bounds much, but not everything: a chain of some thousand references overflows its stack (version 1.9), and
a few multiples of large primes keep it busy for minutes. Neither can be stopped inside a thread. This file is run as a
script; it reads a grammar from standard input and writes what is wrong with it, or nothing.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

CPU_SECONDS = 1
MEMORY_BYTES = 1 << 30
# A quarter of what the server's threads have: what is compiled here with some effort will not overflow there.
STACK_BYTES = 2 << 20
NICENESS = 10


def main() -> None:
    """Read, bound this process, compile, write."""
    import llguidance

    grammar = sys.stdin.read()
    errors: list[str] = []

    def compile_it() -> None:
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        errors.append(matcher.get_error())

    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the address space cannot be bounded
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    sys.stdout.write(errors[0])


if __name__ == "__main__":
    main()
