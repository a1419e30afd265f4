"""The requests of a run: lengths from generators, traces, conversations and mixes; arrivals; prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import pytest

from app.limit.lengths import Fitted, Ranges, Recorded, read_conversations
from app.limit.load import Source, WorkClass
from app.limit.mix import parse_mix, read_mix
from app.limit.options import Options, make_source
from app.limit.prompts import Spelling
from app.limit.runs import Promise, Run, Seen
from engine.config import SloTargets
from engine.errors import ConfigError
from engine.workload import WorkItem, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from app.limit.lengths import Lengths

TARGETS = SloTargets(1.0, None, None)


def source(lengths: Lengths | None = None, **options: object) -> Source:
    lengths = lengths or Ranges((5, 9), (2, 4))
    return Source((WorkClass("requests", 1.0, lengths, TARGETS),), Promise((TARGETS,), 0.01), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrivals", "cv", "spread"), [("constant", 1.0, (0, 0)), ("poisson", 1.0, (0.9, 1.1)), ("gamma", 3.0, (2.5, 3.5))]
)
def test_arrivals_have_the_spread_that_was_asked_for_and_the_rate_exactly(
    arrivals: str, cv: float, spread: tuple[float, float]
) -> None:
    load = source(arrivals=arrivals, gap_cv=cv).make(4000, 8.0, 1)
    assert load.workload.requests_per_second == pytest.approx(8.0)
    times = [item.arrival_seconds for item in load.workload.items]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert spread[0] - 1e-6 <= pstdev(gaps) / fmean(gaps) <= spread[1] + 1e-6


def test_some_are_sent_before_and_after_those_that_count() -> None:
    load = source().make(100, 8.0, 0)
    assert load.counted == (20, 120)
    assert len(load.workload.items) == 150


def test_a_trace_keeps_its_own_arrivals_and_begins_elsewhere_under_another_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:00:{second:02}.0000000,{100 + second},{10 + second}" for second in (0, 1, 5, 6, 7, 20, 21, 30)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    made = make_source(Options(trace=path, targets=TARGETS))
    assert made.arrivals == "own"
    load = made.make(1, 2.0, 0)
    assert [item.num_prompt_tokens for item in load.workload.items] == [100, 101, 105, 106, 107, 120, 121, 130]
    gaps = [item.arrival_seconds for item in load.workload.items]
    assert gaps[2] / gaps[1] == pytest.approx(5)  # the pattern is the trace's, the rate is not
    assert load.workload.requests_per_second == pytest.approx(2.0)
    assert made.make(2, 2.0, 1).workload.items[0].num_prompt_tokens != 100


def test_a_trace_may_begin_with_many_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    times = [0] * 20 + [3000, 6000, 9000]
    path.write_text("\n".join(f'{{"timestamp": {ms}, "input_length": 9, "output_length": 2}}' for ms in times))
    load = make_source(Options(trace=path, targets=TARGETS)).make(50, 2.0, 0)
    assert load.workload.requests_per_second == pytest.approx(2.0)


def test_a_short_trace_is_begun_again_at_its_end() -> None:
    items = (WorkItem(0.0, 10, 1), WorkItem(3.0, 20, 2))
    taken = Recorded(Workload("two", items)).take(5, 0)
    assert [item.num_prompt_tokens for item in taken.items] == [10, 20, 10, 20, 10]
    assert [item.arrival_seconds for item in taken.items] == [0, 3, 6, 9, 12]


def test_seeds_begin_at_places_of_a_trace_that_are_far_apart() -> None:
    """Also where a run takes as many requests as there are: then seeds would otherwise all see the same."""
    items = tuple(WorkItem(float(place), place + 1, 1) for place in range(150))
    firsts = [Recorded(Workload("long", items)).take(150, seed).items[0].num_prompt_tokens for seed in range(5)]
    assert firsts[0] == 1
    assert min(abs(a - b) for a, b in pairwise(sorted(firsts))) > 15


def test_another_time_round_a_trace_shares_nothing_with_the_first() -> None:
    items = (WorkItem(0.0, 20, 1, (1, 2)), WorkItem(1.0, 20, 1, (1, 3)))
    names = [item.prefix_ids for item in Recorded(Workload("two", items, prefix_block_tokens=10)).take(4, 0).items]
    assert names[0][0] == names[1][0]
    assert names[2][0] == names[3][0]
    assert not set(names[0] + names[1]) & set(names[2] + names[3])


def test_lengths_are_divided_and_cut_to_the_context_which_is_counted() -> None:
    made = source(Fitted("azure-conversation"), max_model_len=512)
    factor = made.least_factor()
    assert factor > 1
    assert replace(made, factor=factor).num_cut()[0] <= 20
    assert made.num_cut()[0] > 1000


def test_conversations_give_the_lengths_of_question_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk = [
        {"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}, {"value": "z"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"other": 1},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a" * 4}]},
        {
            "conversations": [
                {"from": "system", "value": "s" * 400},
                {"from": "gpt", "value": "g" * 400},
                {"from": "user", "value": "u" * 12},
                {"from": "assistant", "value": "v" * 16},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "first"}, {"from": "human", "value": "last"}]},
        {"conversations": [{"from": ["human"], "value": "a"}, {"from": {}, "value": "b"}]},
    ]
    path.write_text(json.dumps(talk))
    found = read_conversations(path, lambda text: round(len(text) / 4), 100)
    lengths = [(item.num_prompt_tokens, item.num_output_tokens) for item in found.workload.items]
    assert lengths == [(10, 20), (1, 1), (3, 4)]


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '[{"conversations": "no"}]', '[{"conversations": [{"value": 1}]}]']
)
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"talk\.json"):
        read_conversations(path, len, 100)


MIX = """
[[class]]
name = "assistant"
share = 3
workload = "azure-conversation"
factor = 8
ttft_p95_seconds = 1.0

[[class]]
name = "summaries"
share = 1
prompt_tokens = [400, 1200]
output_tokens = 60
e2e_p95_seconds = 30
background = true
"""


def test_a_mix_has_classes_with_shares_lengths_and_targets_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(MIX)
    made = make_source(Options(mix=path, targets=TARGETS))
    load = made.make(2000, 4.0, 0)
    assert load.classes.count(0) / len(load.classes) == pytest.approx(0.75, abs=0.03)
    assert made.promise.targets == (SloTargets(1.0, None, None), SloTargets(None, None, 30.0))
    assert [one.is_background for one in made.classes] == [False, True]
    summaries = [item for item, number in zip(load.workload.items, load.classes, strict=True) if number == 1]
    assert {item.num_output_tokens for item in summaries} == {60}
    assert 400 <= min(item.num_prompt_tokens for item in summaries) < 450
    assert load.workload.max_output_tokens == max(item.num_output_tokens for item in load.workload.items)


def test_a_class_without_targets_has_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text('[[class]]\nname = "x"\nshare = 1\nprompt_tokens = 4\noutput_tokens = 2\n')
    assert read_mix(path, TARGETS)[0].targets == TARGETS


ONE = '[[class]]\nname = "x"\nshare = 1\nprompt_tokens = 5\noutput_tokens = 2\n'
BARE = '[[class]]\nname = "x"\nshare = 1\n'


def test_a_class_that_names_a_target_has_no_others(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    none = 'ttft_p95_seconds = "none"\n'
    path.write_text(ONE + none + ONE.replace('"x"', '"y"') + none + "e2e_p95_seconds = 3\n")
    targets = [one.targets for one in read_mix(path, TARGETS)]
    assert targets == [SloTargets(None, None, None), SloTargets(None, None, 3.0)]


WRONG = "(from mix.toml) is not valid; it takes"
SECONDS = f"{WRONG} more than 0 to 86400, or none."
LENGTHS = 'mix.toml: [class "x"] needs either workload, or prompt_tokens and output_tokens.'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nonsense", "mix.toml is not TOML: "),
        ("a = " + "[" * 5000, "mix.toml is nested too deeply."),
        ("", "mix.toml has no [[class]], in two brackets; write one for each class of work."),
        ('[class]\nname = "x"\n', "mix.toml has no [[class]], in two brackets; write one for each class of work."),
        ("[[klass]]\n", "mix.toml: 'klass' is unknown; a mix has tables [[class]] alone, one for each class."),
        (ONE + "[[class]]\nshare = 1\n", "mix.toml: [class number 2] needs name; it takes a text"),
        (ONE.replace("x", "a\\u202eb"), f"[class number 1] name = 'a\\u202eb' {WRONG} a text of"),
        ('[[class]]\nname = "x"\n', 'mix.toml: [class "x"] needs share; it takes more than 0 to 10000.'),
        (ONE.replace("share = 1", "share = true"), f'[class "x"] share = True {WRONG} more than 0'),
        (ONE + "ttft_p95_seconds = true\n", f'[class "x"] ttft_p95_seconds = True {SECONDS}'),
        (ONE + "itl_p95_seconds = 'no'\n", f"itl_p95_seconds = 'no' {SECONDS}"),
        (ONE + "factor = nan\n", f'[class "x"] factor = nan {WRONG} more than 0 to 10000.'),
        (ONE + ONE, "mix.toml: 2 classes are called 'x'; give each a name of its own."),
        (BARE, LENGTHS),
        (BARE + "prompt_tokens = 5\n", LENGTHS),
        (ONE + 'workload = "mooncake"', LENGTHS),
        (ONE.replace("5", "[9, 5]"), f"prompt_tokens = [9, 5] {WRONG} the shortest first: [5, 9]."),
        (ONE.replace("5", "true"), f"prompt_tokens = True {WRONG} a whole number of tokens"),
        (ONE.replace("5", "[1, 2, 3]"), f"{WRONG} a whole number of tokens from 1 to 1048576, or two: ["),
        (BARE + 'workload = "azure"\n', f"workload = 'azure' {WRONG} azure-conversation, "),
        (ONE.replace("5", "9" * 5000), "mix.toml has a number of more digits than can be read; shorten it."),
        (ONE.replace("5", "0x" + "f" * 5000), f'[class "x"] prompt_tokens {WRONG} a whole number of tokens'),
        (ONE.replace("share = 1", "share = 0x" + "f" * 5000), f'[class "x"] share {WRONG} more than 0'),
        (ONE + "factr = 1\n", 'mix.toml: [class "x"] has no setting factr; did you mean factor?'),
    ],
)
def test_a_mix_that_cannot_be_is_refused_in_a_line_that_says_what_to_do(content: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mix(content, "mix.toml", TARGETS)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_promises_to_several_classes_bear_their_names(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(MIX)
    promise = make_source(Options(mix=path, targets=TARGETS)).promise
    assert [promise.of(number) for number in (0, 1)] == [" of assistant", " of summaries"]
    seen = (Seen(0.0, 0.0, 9.0, 3.0, 9.0, 5, 2, 1, 0, work_class=0),)
    assert Run(1.0, 0, promise, seen).excesses()["ttft of assistant"] == 20
    assert make_source(Options(targets=TARGETS)).promise.of(0) == ""


def test_a_mix_has_no_arrivals_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(MIX)
    with pytest.raises(ConfigError, match="no arrivals"):
        make_source(Options(mix=path, arrivals="own"))


def test_without_a_target_there_is_no_limit() -> None:
    with pytest.raises(ConfigError, match="--ttft-p95"):
        make_source(Options(targets=SloTargets(None, None, None)))


def test_prompts_have_their_lengths_and_share_nothing_with_another_run() -> None:
    workload = Workload("two", (WorkItem(0.0, 50, 1), WorkItem(0.0, 50, 1)))
    spelling = Spelling(tokens_per_word=2.0, extra_tokens=10.0)
    first, second, again = (
        spelling.prompt(workload, index, salt).split() for index, salt in ((0, "a"), (1, "a"), (0, "b"))
    )
    assert [len(words) for words in (first, second, again)] == [20, 20, 20]
    assert len({tuple(words[:6]) for words in (first, second, again)}) == 3


def test_blocks_of_equal_names_are_equal_texts() -> None:
    items = (WorkItem(0.0, 30, 1, (1, 2, 3)), WorkItem(0.0, 30, 1, (1, 2, 4)))
    workload = Workload("two", items, prefix_block_tokens=10)
    spelling = Spelling(1.0, 0.0)
    first, second = (spelling.prompt(workload, index, "a").split() for index in (0, 1))
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert spelling.prompt(workload, 0, "b").split()[:20] != first[:20]
