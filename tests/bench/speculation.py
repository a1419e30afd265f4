"""What drafts bring: `python -m tests.bench.speculation`.

Chat-like questions, and tasks that copy much of their prompt (code to be edited, text to be corrected or summed up),
are answered by the real model, each without drafts and with them in turn, one at a time and several at a time. Both
give the same tokens, which is checked; so the ratio of the seconds is that of the speeds. Seconds are those of steps in
which nobody reads a prompt, planning included; server, actors and text are left out.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc_data.topics
import textwrap
import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.batch import ScheduledBatch, Seated
from engine.config import EngineConfig, Limits
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from engine.startup import load_model

if TYPE_CHECKING:
    from engine.loaded import LoadedModel

CONTEXT: Final = 2048
QUESTIONS: Final = (
    "Name three rivers in Europe and say one thing about each.",
    "Explain to a child why the sky is blue.",
    "Give me a recipe for pancakes with a list of ingredients.",
    "What are the advantages and disadvantages of working from home?",
    "Write a short poem about the sea in autumn.",
    "How does a bicycle stay upright?",
    "Write a Python function that tells whether a number is prime, and explain it.",
    "Plan a day in Rome for a family with two children.",
)
CODE: Final = (textwrap.dedent, textwrap.shorten, textwrap.indent, inspect.getmodulename)
TOPICS: Final = ("bltin-null-object", "del", "pass", "id-classes")


class Run(NamedTuple):
    """Some answers."""

    seconds: float
    num_steps: int
    outputs: list[list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int

    def plus(self, other: Run) -> Run:
        """Both together."""
        return Run(
            self.seconds + other.seconds,
            self.num_steps + other.num_steps,
            self.outputs + other.outputs,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )


def requests() -> dict[str, list[str]]:
    """What the user says, by kind."""
    code = [inspect.getsource(function) for function in CODE]
    text = [pydoc_data.topics.topics[name][:1200] for name in TOPICS]
    return {
        "questions": list(QUESTIONS),
        "copying": [
            *[f"Rewrite this code with the name of the first argument changed to `value`:\n\n{each}" for each in code],
            *[f"Repeat this text, but correct its mistakes:\n\n{each}" for each in text[:2]],
            *[f"Sum up this text in a few sentences:\n\n{each}" for each in text[2:]],
        ],
    }


def answer(model: LoadedModel, prompts: list[tuple[int, ...]], temperature: float, limits: Limits, tokens: int) -> Run:
    """Answer all prompts, each with `tokens` tokens or fewer."""
    cache = KVCache(model.num_blocks, EngineConfig().block_size, enable_prefix_caching=False)
    scheduler = Scheduler(cache, limits=limits, num_seats=limits.max_num_seqs, max_model_len=CONTEXT)
    outputs: list[list[int]] = [[] for _ in prompts]
    stop = model.tokenizer.stop_token_ids
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, stop_token_ids=stop)
        scheduler.add(Sequence(number, f"r{number}", prompt, params, 0.0))
    seconds, num_steps = 0.0, 0
    while scheduler.num_running or scheduler.num_waiting:
        begin = time.perf_counter()
        batch = scheduler.schedule(0.0)
        update = scheduler.update(batch, model.runner.execute(batch), 0.0)
        if all(batch.decodes):
            seconds += time.perf_counter() - begin
            num_steps += 1
        for sequence_id, token_id in update.tokens:
            outputs[sequence_id].append(token_id)
    counters = scheduler.counters
    return Run(seconds, num_steps, outputs, counters.num_draft_tokens, counters.num_accepted_tokens)


def compare(
    model: LoadedModel, prompts: list[tuple[int, ...]], temperature: float, tokens: int, limits: Limits
) -> tuple[Run, Run]:
    """All prompts without drafts and with them, in turn: one by one where there is one seat, else all of them."""
    off = on = Run(0.0, 0, [], 0, 0)
    num_together = 1 if limits.max_num_seqs == 1 else len(prompts)
    for turn, start in enumerate(range(0, len(prompts), num_together)):
        some = prompts[start : start + num_together]
        for drafts in (turn % 2, 1 - turn % 2):
            if drafts:
                on = on.plus(answer(model, some, temperature, limits, tokens))
            else:
                off = off.plus(answer(model, some, temperature, replace(limits, num_speculative_tokens=0), tokens))
    return off, on


def print_steps(model: LoadedModel, rounds: int) -> None:
    """What drafts cost a step, as the number of rows that the step takes beside its rows: `STEP_ROWS`."""
    length, size = 300, EngineConfig().block_size
    prompt = tuple(i * 37 % 40_000 + 5 for i in range(length))
    num_blocks = -(-(length + 20) // size)
    for seat in range(8):
        seated = (Seated(seat, seat + 1, prompt, length, SamplingParams(temperature=0.0)),)
        blocks = ((seat, tuple(range(seat * num_blocks, (seat + 1) * num_blocks))),)
        read = ScheduledBatch(1, (seat,), (seat + 1,), (0,), (length,), (False,), seated=seated, new_blocks=blocks)
        model.runner.execute(read)
    cases = {rows: [(0,), *more] for rows, more in ((1, [(1,), (3,), (7,)]), (4, [(1,), (3,), (1,) * 4]), (8, [(3,)]))}
    seconds: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    for _ in range(rounds):
        for rows, several in cases.items():
            for lengths in several:
                drafts = {row: (9,) * each for row, each in enumerate(lengths) if each}
                columns = (tuple(range(rows)), tuple(range(1, rows + 1)), (length,) * rows, (1,) * rows)
                batch = ScheduledBatch(2, *columns, samples=(True,) * rows, drafts=drafts)
                begin = time.perf_counter()
                model.runner.execute(batch)
                seconds.setdefault((rows, lengths), []).append(time.perf_counter() - begin)
    print("rows  drafts        ms  step rows")
    for (rows, lengths), times in seconds.items():
        without = seconds[rows, (0,)]
        more = median([a - b for a, b in zip(times, without, strict=True)]) / max(1, sum(lengths))
        step_rows = f"{median(without) / more - rows:10.1f}" if sum(lengths) else ""
        print(f"{rows:4}  {'+'.join(map(str, lengths)):10} {median(times) * 1e3:6.1f} {step_rows}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, at most")
    parser.add_argument("--seats", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafts", type=int, default=EngineConfig().num_speculative_tokens)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--steps", action="store_true", help="what drafts cost a step, and nothing else")
    options = parser.parse_args()
    config = EngineConfig(max_model_len=CONTEXT)
    model = load_model(config)
    if options.steps:
        print_steps(model, options.rounds)
        return
    if model.chat_template is None:
        raise SystemExit("the model has no chat template")
    print(f"{config.model}, {model.dtype}; tokens/s without drafts, and with up to {options.drafts}")
    print("kind       temperature  seats  tokens  without  with  ratio (min-max)   steps      right/drafted")
    for kind, texts in requests().items():
        chats = [model.chat_template.encode([{"role": "user", "content": text}], model.tokenizer) for text in texts]
        prompts = [tuple(chat) for chat in chats]
        for temperature in options.temperatures:
            for seats in options.seats:
                limits = Limits(seats, config.max_num_batched_tokens, num_speculative_tokens=options.drafts)
                rounds = [compare(model, prompts, temperature, options.tokens, limits) for _ in range(options.rounds)]
                ratios = [off.seconds / on.seconds for off, on in rounds]
                num_tokens = sum(map(len, rounds[0][0].outputs))
                off, on = (median(num_tokens / run.seconds for run in column) for column in zip(*rounds, strict=True))
                last = rounds[-1][1]
                told = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                right = f"{last.num_accepted_tokens}/{last.num_draft_tokens}"
                steps = f"{rounds[-1][0].num_steps}/{last.num_steps}"
                print(
                    f"{kind:10} {temperature:11} {seats:6} {num_tokens:7} {off:8.1f} {on:5.1f}  {told:17} "
                    f"{steps:10} {right:12}{'' if last.outputs == rounds[0][0].outputs else '  OTHER TOKENS'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
