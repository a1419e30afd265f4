"""What grammars cost, with the default model's vocabulary and no model: `python -m tests.bench.grammar`.

Compiling the 200 schemas of the tests; what one token costs under them (mask, taking the token, forced tokens); and
what the draws of a step of 16 rows cost with 0, 1 and 16 of them bound by a grammar, and what their neighbours pay.
"""

from __future__ import annotations

import json
import random
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import trio

from engine.drawing import Extras, draw
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import schema_spec
from engine.grammar.trial import try_it
from engine.loading.checkpoint import open_checkpoint
from engine.loading.fetch import resolve_model
from engine.sampler import SamplingRows
from engine.sequence import SamplingParams
from tests.engine.tiny_engine import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.grammar.matcher import CompiledGrammar
    from engine.loaded import TokenizerLike

ROWS, ROUNDS, TOKENS = 16, 100, 40


def timed(times: list[float], call: Callable[[], object]) -> None:
    """Add the seconds of a call."""
    begin = time.perf_counter()
    call()
    times.append(time.perf_counter() - begin)


def spread(times: list[float], unit: float) -> str:
    """Median, 95th percentile and maximum."""
    ordered = sorted(times)
    picked = (median(ordered), ordered[int(len(ordered) * 0.95)], ordered[-1])
    return "  ".join([f"{value * unit:8.1f}" for value in picked])


async def compile_all(compiler: GrammarCompiler) -> list[CompiledGrammar]:
    """Compile each schema, tried in another process first where it is not plain."""
    plain: list[float] = []
    tried: list[float] = []
    grammars = []
    for schema in SCHEMAS:
        spec = schema_spec(schema, "p")
        begin = time.perf_counter()
        grammars.append(await compiler.compile(spec))
        (plain if spec.plain else tried).append(time.perf_counter() - begin)
    print("                                      median       p95       max")
    print(f"compile, {len(plain):3} plain schemas, ms        {spread(plain, 1e3)}")
    print(f"compile, {len(tried):3} that are tried first, ms {spread(tried, 1e3)}")
    begin = time.perf_counter()
    await try_it(json.dumps({"grammars": [{"json_schema": SCHEMAS[120]}]}))
    print(f"of that the process that tries        {(time.perf_counter() - begin) * 1e3:8.1f}")
    return grammars


def follow(grammars: list[CompiledGrammar], tokenizer: TokenizerLike) -> None:
    """Walk through each grammar with random tokens."""
    source = random.Random(0)
    first: list[float] = []
    masks: list[float] = []
    takes: list[float] = []
    num_forced = num_drawn = 0
    for grammar in grammars:
        begin = time.perf_counter()
        state = grammar.begin(())
        state.allowed()
        first.append(time.perf_counter() - begin)
        for _ in range(TOKENS):
            begin = time.perf_counter()
            mask = state.allowed()
            masks.append(time.perf_counter() - begin)
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            token_id = int(source.choice(allowed))
            if token_id in tokenizer.stop_token_ids:
                break
            begin = time.perf_counter()
            state.consume(token_id)
            forced = state.force()
            takes.append(time.perf_counter() - begin)
            num_drawn, num_forced = num_drawn + 1, num_forced + len(forced)
            if forced and forced[-1] in tokenizer.stop_token_ids:
                break
    print(f"beginning of an answer, us            {spread(first, 1e6)}")
    print(f"mask of a token, us                   {spread(masks, 1e6)}")
    print(f"a token taken and the next forced, us {spread(takes, 1e6)}")
    print(f"tokens forced                         {num_forced} of {num_drawn + num_forced}")


def cpu_of_draws(
    grammar: CompiledGrammar, stop: frozenset[int], logits: torch.Tensor, num_bound: int, seed: int
) -> float:
    """CPU seconds of one step's draws, [R, V] float32; the first rows are bound. Not an answer's first token."""
    num_rows, vocab_size = logits.shape
    rows, extras, seats = SamplingRows(num_rows, vocab_size), {}, np.arange(num_rows)
    for seat in range(num_rows):
        constraint = grammar if seat < num_bound else None
        params = SamplingParams(seed=seed + seat, stop_token_ids=stop, constraint=constraint)
        rows.set(seat, params, 1)
        if not params.is_plain:
            extras[seat] = Extras(params, [5], 1, vocab_size)
    draw(logits.clone(), rows, extras, seats, np.full(num_rows, 1))
    copy = logits.clone()
    begin = time.thread_time()
    draw(copy, rows, extras, seats, np.full(num_rows, 2))
    return time.thread_time() - begin


def steps(grammar: CompiledGrammar, stop: frozenset[int], vocab_size: int) -> None:
    """Draws of one step for rows without and with a grammar; the cases in random order."""
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(0))
    cases = ((ROWS, 0), (ROWS, 1), (ROWS, ROWS), (1, 0), (1, 1))
    source = random.Random(0)
    rounds = [
        {
            case: cpu_of_draws(grammar, stop, logits[: case[0]], case[1], seed)
            for case in source.sample(cases, len(cases))
        }
        for seed in range(0, ROUNDS * ROWS, ROWS)
    ]
    # The quickest of each: on a busy machine all others tell of somebody else.
    quickest = {case: min([times[case] for times in rounds]) * 1e6 for case in cases}
    print("\nrows  bound   CPU us of the draws   more than with none")
    for case, own in quickest.items():
        print(f"{case[0]:4}  {case[1]:5}   {own:19.0f}   {own - quickest[case[0], 0]:+18.0f}")
    beside, alone = quickest[ROWS, 1] - quickest[ROWS, 0], quickest[1, 1] - quickest[1, 0]
    print(f"what one bound row costs each of its {ROWS - 1} neighbours: {(beside - alone) / (ROWS - 1):+.1f} us")


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    tokenizer = open_checkpoint(resolve_model("smollm2-135m"), name="smollm2-135m").tokenizer
    begin = time.perf_counter()
    compiler = GrammarCompiler(tokenizer)
    print(f"{tokenizer.vocab_size} tokens; the vocabulary is made ready in {time.perf_counter() - begin:.2f} s")
    grammars = trio.run(compile_all, compiler)
    follow(grammars, tokenizer)
    steps(grammars[120], tokenizer.stop_token_ids, tokenizer.vocab_size)


if __name__ == "__main__":
    main()
