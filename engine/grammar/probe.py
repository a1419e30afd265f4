"""Compiles one grammar in a process of its own, which may crash, hang or fill its memory in the server's place.

llguidance bounds much, but not everything: a chain of some thousand references overflows its stack (version 1.9), a
few multiples of large primes keep it busy for minutes, and so do some thousand empty lines its converter of GBNF, which
is Python and holds Python's lock meanwhile. Nothing of it can be stopped inside a thread. This file is run as a script:

    argument  the directory that holds llguidance
    stdin     {"grammars": […]} in ASCII, as llguidance takes it, but that grammars may be GBNF
    stdout    a line `READY`, before anything of the grammar is looked at; then {"fault", "source"} in ASCII: what is
              wrong with it, or nothing, and where something was converted, the same grammars without GBNF
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading

READY = "ready"
CPU_SECONDS = 1
MEMORY_BYTES = 1 << 30
# A quarter of what the server's threads have: what is compiled here with some effort will not overflow there.
STACK_BYTES = 2 << 20
NICENESS = 10
# Of what GBNF is converted to. Names, escapes and alternatives become longer, but not by much more than this.
MAX_SOURCE_LENGTH = 1 << 19


def main() -> None:
    """Bound this process, say that it stands, and answer."""
    sys.path.append(sys.argv[1])
    import llguidance

    answers: list[dict[str, str]] = []
    os.nice(NICENESS)
    _bound(resource.RLIMIT_CPU, CPU_SECONDS, 1)
    _bound(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere the address space cannot be bounded
        _bound(resource.RLIMIT_AS, MEMORY_BYTES)
    print(READY, flush=True)
    # What is wrong before this line is for the server's log; what a library prints from here on is for nobody.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    given = sys.stdin.read()

    def answer() -> None:
        source, fault = _without_gbnf(given)
        if not fault:
            matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            fault = matcher.get_error()
        answers.append({"fault": fault, "source": "" if source == given else source})

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    print(json.dumps(answers[0]))


def _bound(what: int, most: int, grace: int = 0) -> None:
    """Limit a resource, or leave it where it is bounded more tightly already; behind `grace` nothing is forgiven."""
    _, hard = resource.getrlimit(what)
    end = most + grace if hard == resource.RLIM_INFINITY else min(most + grace, hard)
    resource.setrlimit(what, (min(most, end), end))


def _without_gbnf(source: str) -> tuple[str, str]:
    """The grammars with all GBNF converted, and what is wrong with it. What is Lark already stays as it is."""
    if "::=" not in source:
        return source, ""
    from llguidance.gbnf_to_lark import any_to_lark

    grammars = json.loads(source)
    for grammar in grammars["grammars"]:
        text = grammar.get("lark_grammar")
        if not text or "::=" not in text:
            continue
        try:
            grammar["lark_grammar"] = any_to_lark(text)
        except MemoryError:
            raise
        except Exception as error:  # the converter raises whatever its own code meets
            return source, f"not a grammar in GBNF: {error}"
    converted = json.dumps(grammars)
    if len(converted) > MAX_SOURCE_LENGTH:
        return source, "it becomes too long when it is converted from GBNF"
    return converted, ""


if __name__ == "__main__":
    main()
