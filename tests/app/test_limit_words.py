"""What a result says of the requests that it is of, wherever its limit is told."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.words import lines_of
from app.limit_page.search import Search, make_brief
from app.render.limit import control_variables, kept_variables, run_variables, tiles_of
from tests.app.limit_lines import result_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ASKED = {
    "workload": "mooncake", "mix": None, "note": "", "beside_users": False, "arrivals": None, "gap_cv": None,
    "factor": None, "ttft_p95_seconds": 2.0, "itl_p95_seconds": None, "e2e_p95_seconds": None,
    "think_time": None, "price_per_hour": None,
}  # fmt: skip


def divided(factor: float = 64.0) -> dict[str, Any]:
    """A result of requests whose lengths were divided, with users and a price."""
    result = copy.deepcopy(result_of(think_time=20.0, price_per_hour=1.5))
    result["workload"] |= {"factor": factor, "mean_prompt_tokens": 18.67, "mean_output_tokens": 3.21}
    return result


def searched(result: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    search = Search("20260101T000000Z-00000000", {**ASKED, **more}, "the operator", "fake", 0.0)
    search.result = dict(result) if result is not None else None
    return search.as_ended("found", "", 1.0).as_json() if result is not None else search.as_json()


def test_users_and_price_say_of_what_requests_they_are() -> None:
    lines = lines_of(divided())
    (users,) = [line for line in lines if line.startswith("So many users at once")]
    (price,) = [line for line in lines if line.startswith("A million output tokens")]
    assert users.endswith(", for requests of 18.7 tokens in and 3.2 out (lengths divided by 64).")
    assert "(lengths divided by 64): the output tokens bear the price of the prompts too." in price
    (whole,) = [line for line in lines_of(divided(1.0)) if line.startswith("So many users")]
    assert whole.endswith(", for requests of 18.7 tokens in and 3.2 out.")


def test_the_page_says_by_what_lengths_were_divided_wherever_it_tells_the_limit() -> None:
    told = searched(divided())
    short = ", lengths divided by 64 (answers of 3.2 tokens)"
    assert f"mooncake{short};" in control_variables(told)["about"]
    assert kept_variables([make_brief(told)], "")["kept"][0]["divided"] == short
    tiles = {tile.title: tile for tile in tiles_of(told["result"], thinks="", priced="")}
    assert "of requests of 18.7 tokens in and 3.2 out (lengths divided by 64)" in tiles["Operating limit"].note
    assert tiles["A million output tokens"].note == "prompts included"
    told = searched(divided(1.0))
    assert "divided" not in control_variables(told)["about"]
    assert not kept_variables([make_brief(told)], "")["kept"][0]["divided"]


@pytest.mark.parametrize("factor", [None, 16.0])
def test_it_is_told_as_soon_as_it_is_known(factor: float | None) -> None:
    running = searched(None, factor=factor)
    assert (", lengths divided by 16;" in control_variables(running)["about"]) == (factor is not None)
    running["single_user"] = {**divided()["single_user"], "factor": 32.0}
    assert ", lengths divided by 32;" in control_variables(running)["about"]
    assert run_variables(running)["rows"][0]["title"] == "one user alone, lengths divided by 32"
