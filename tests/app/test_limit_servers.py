"""Servers that `relevo limit` cannot measure, each told in one line; and others' servers that it can."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.limit.asking import MAX_CHARS, ask, one_line, what_is_wrong
from app.limit.command import Looking
from app.limit.endpoint import Endpoint, EndpointError, find_endpoint
from app.limit.exchange import Answer, has_text, read_whole, tokens_per_character
from app.limit.interrupted import ended_like_a_key
from app.limit.options import Options, make_source
from app.limit.over_http import HttpMeasure
from app.limit.scrapes import Observed, bound_by, observe, values_of
from app.limit.search import FIRST_SHARE
from app.limit.summary import summarize
from app.limit.telling import tell
from app.limit.words import per_second
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = "<!DOCTYPE html><html><body><h1>Welcome</h1>to this router</body></html>"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"page": PAGE}, "answers with a page, not with OpenAI's API"),
        ({"redirect": "https://elsewhere.example"}, "on to https://elsewhere.example (HTTP 302); give that address"),
        ({"entry": {"id": None}}, "lists no model at /v1/models; name one with --model"),
    ],
)
def test_a_server_that_is_no_api_is_told_with_what_to_do(run: Any, behaviour: dict[str, Any], expected: str) -> None:
    with open_endpoint(**behaviour) as (url, _):
        code, out, err = run("limit", "--url", url)
    assert (code, out) == (1, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_key_is_not_given_to_the_server_that_another_names() -> None:
    with open_endpoint(key="secret") as (other, seen), open_endpoint(redirect=other) as (url, _):
        with pytest.raises(EndpointError, match="on to http://127"):
            find_endpoint(url, "chat", key="secret")
        assert ask(f"{url}/metrics", {"Authorization": "Bearer secret"}) == (302, f"{other}/metrics")
    assert seen.bodies == []


@contextmanager
def open_raw(answer: bytes) -> Iterator[str]:
    """A server that says these bytes to whoever comes, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(("path", "hint"), [("", "--url."), ("/ops", "--url, perhaps {url}.")])
def test_an_address_below_which_there_is_no_api_is_told_with_one_where_it_may_be(path: str, hint: str) -> None:
    with open_raw(b"HTTP/1.1 404 Not Found\r\n\r\n{}") as url:
        said = f"{url}{path} has no /v1/models (HTTP 404); give the address of the API with {hint.format(url=url)}"
        with pytest.raises(EndpointError, match=re.escape(said)):
            find_endpoint(url + path, "chat")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "cannot be reached: Remote end closed connection without response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be reached: SSH-2.0-OpenSSH_9.6"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html><p>no upstream", "cannot serve now (HTTP 502: no upstream)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{}", "lists no model"),
        (b"HTTP/1.1 200 OK\r\n\r\n[[[[", "lists no model"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "lists no model"),
    ],
)
def test_what_is_no_answer_is_told(run: Any, answer: bytes, expected: str) -> None:
    with open_raw(answer) as url:
        code, out, err = run("limit", "--url", url)
    assert (code, out) == (1, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_certificate_that_is_not_trusted_and_no_tls_at_all_are_told(run: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=127.0.0.1", "-keyout", str(path), "-out", str(tmp_path / "public.pem")]
    subprocess.run(words, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    with open_endpoint(certificate=path) as (url, _):
        code, _, err = run("limit", "--url", url)
    assert (code, err.count("\n")) == (1, 1)
    assert "its certificate is not trusted here, SSL_CERT_FILE=FILE names one that is" in err
    with open_endpoint() as (url, _):
        code, _, err = run("limit", "--url", url.replace("http", "https"))
    assert (code, err.count("\n")) == (1, 1)
    assert "it may speak no TLS: try http://" in err


@pytest.mark.parametrize("url", ["http://x:abc", "http://x:99999", "http://[::1", "http://a b", "http://u:p@x", "x"])
def test_an_address_that_is_none_is_wrong_use(run: Any, url: str) -> None:
    code, _, err = run("limit", "--url", url)
    assert (code, err.count("\n")) == (2, 1)
    assert "is no address of a server" in err


def looking(url: str, **options: Any) -> tuple[Looking, Options]:
    targets = options.pop("targets", SloTargets(2.0, None, None))
    asked = Options(targets=targets, **{"factor": 40.0, "duration": 12.0, "requests": 20, "streams": 4, **options})
    return Looking(find_endpoint(url, "chat"), make_source(asked), asked, lambda *_: None), asked


@pytest.mark.long
@pytest.mark.parametrize("num_runs", [0, 1])
def test_a_server_that_dies_in_the_middle_ends_the_search_and_that_run_is_none(num_runs: int) -> None:
    """Its errors say nothing of the rate."""
    with open_endpoint(first_seconds=0.02) as (url, behaviour):
        look, asked = looking(url, duration=90.0, targets=SloTargets(20.0, None, None))
        ready = replace(look.prepare(), capacity=20.0)
        of_a_run = len(ready.measure.source.make(ready.measure.num_counted, 1.0, 0).classes)
        behaviour.lives_for = len(behaviour.bodies) + num_runs * of_a_run + 10
        look.prepare = lambda: ready  # type: ignore[method-assign]
        result = summarize(look.find(), asked)
    assert [(run["errors"], run["holds"]) for run in result["curve"]] == [(0, True)] * num_runs
    died = result["unfinished"]
    assert died.startswith("The server died, or cannot be reached any more (")
    assert result["remarks"][0] == f"{died}: this is what was measured by then."
    lines: list[str] = []
    assert tell(result, echo=lines.append) == 1
    if num_runs:
        rate = per_second(ready.capacity * FIRST_SHARE)
        why = "what bound it is unknown (every rate that was tried held)"
        assert f"{died}. Until then the limit is at least {rate} requests/s; {why}." in lines
    else:
        assert result["why"] == f"{died}, before any rate was tried."


def test_too_many_at_once_and_too_long_prompts_are_told_with_what_to_do() -> None:
    with open_endpoint() as (url, behaviour):
        look, _ = looking(url)
        behaviour.refused = ("made-up",)
        with pytest.raises(EndpointError, match=r"with 4 at once; if prompts are too long .* --context"):
            look.find()


def test_requests_of_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([{"num_requests_running": 2.0, "num_requests_waiting": 1.0}])
    with open_endpoint() as (url, _):
        look, _ = looking(url)
        monkeypatch.setattr(Endpoint, "metrics", lambda _self: next(told, {}))
        outcome = look.outcome(look.prepare(), [])
    assert "The server had 3 requests of others when this began: the limit is of what they left." in outcome.remarks


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_like_a_key():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


MODELS = {
    "vllm": {"entry": {"owned_by": "vllm", "max_model_len": 4096}},
    "sglang": {"entry": {"owned_by": "sglang", "max_model_len": 4096}},
    "llamacpp": {
        "entry": {"owned_by": "llamacpp", "meta": {"n_ctx_train": 32768}},
        "props": '{"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4}',
    },
}
SCRAPES = {
    "vllm": (
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        'vllm:num_requests_running{{engine="1",model_name="m"}} 0\n'
        'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}\n'
        'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
        'vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.3\n'
        'vllm:num_preemptions_total{{engine="0",model_name="m"}} {lost}\n'
    ),
    "sglang": (
        'sglang:num_running_reqs{{model_name="m",tp_rank="0"}} {running}\n'
        'sglang:num_queue_reqs{{model_name="m",tp_rank="0"}} {waiting}\n'
        'sglang:token_usage{{model_name="m",tp_rank="0"}} {usage}\n'
        'sglang:num_retracted_reqs{{model_name="m",tp_rank="0"}} 1\n'
        'sglang:num_retracted_requests_total{{model_name="m",tp_rank="0"}} {lost}\n'
    ),
    "llamacpp": "llamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n",
}


@pytest.mark.parametrize("name", SCRAPES)
def test_what_others_servers_tell_is_read_by_their_names(name: str) -> None:
    text = SCRAPES[name].format(running=3, waiting=2, usage=0.5, lost=7)
    with open_endpoint(metrics=text, **MODELS[name]) as (url, _):
        found = find_endpoint(url, "chat")
    assert found.has_metrics
    assert found.context == 4096
    assert found.seats == (4 if name == "llamacpp" else None)
    later = SCRAPES[name].format(running=5, waiting=4, usage=0.7, lost=9)
    observed = observe([text, later], max_num_seqs=found.seats)
    tells_memory = name != "llamacpp"
    assert observed == Observed(
        running=4.0,
        waiting=3.0,
        kv_cache_usage=0.7 if tells_memory else None,
        max_num_seqs=found.seats,
        preemptions=2 if tells_memory else None,
    )
    assert bound_by(observed) == ("KV memory" if tells_memory else "sequences")


def test_a_seat_that_is_yielded_is_no_want_of_memory() -> None:
    text = (
        "relevo:num_requests_running 3\nrelevo:max_num_seqs 8\nrelevo:num_preemptions_total {0}\n"
        'relevo:num_preemptions_by_reason_total{{reason="kv_memory"}} 1\n'
        'relevo:num_preemptions_by_reason_total{{reason="better_right"}} {1}\n'
    )
    observed = observe([text.format(1, 0), text.format(10, 9)])
    assert observed is not None
    assert observed.preemptions == 0
    assert bound_by(observed) == "compute"


def test_metrics_that_tell_nothing_of_use_bind_nothing() -> None:
    observed = observe(["vllm:prompt_tokens_total 5\nvllm:num_requests_running NaN\n"])
    assert bound_by(observed) == "unknown: the server's metrics do not tell"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
WORDS = ("choices", "delta", "content", "text", "usage", "prompt_tokens", "completion_tokens", "error")


@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: HEAD + b"data: " + text.encode() + b"\n\n"))
def test_whatever_comes_is_an_answer_or_an_error(data: bytes) -> None:
    answer = Answer()
    read_whole(answer, [(1.0, data)])
    assert answer.error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
)


@given(json_values)
def test_events_of_any_form_are_text_or_an_error(value: Any) -> None:
    stream = HEAD + b"data: " + json.dumps(value).encode() + b"\n\ndata: [DONE]\n\n"
    answer = Answer()
    read_whole(answer, [(1.0, stream)])
    assert answer.error or (answer.output_tokens > 0 and answer.sizes)
    assert isinstance(answer.prompt_tokens, int)


@given(st.text(max_size=200))
def test_any_text_is_metrics_or_none(text: str) -> None:
    assert isinstance(values_of(text), dict)
    assert isinstance(values_of(f'vllm:x{{a="b"}} {text}\n'), dict)


def test_text_is_seen_though_the_end_has_not_come() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    role, word = (b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text for text in (b"", b"hi"))
    chunks = [b"%x\r\n%s\r\n" % (len(data), data) for data in (role, word)]
    assert not has_text([(0.0, head), (0.1, chunks[0]), (0.2, chunks[1][:-9])])
    assert has_text([(0.0, head + chunks[0][:5]), (0.1, chunks[0][5:]), (0.2, chunks[1])])


@pytest.mark.slow
@pytest.mark.parametrize("most_tokens", [2, 9])
def test_an_answer_of_a_token_or_two_may_have_no_text(most_tokens: int) -> None:
    """As of a character that is not complete."""
    with open_endpoint(most_tokens=most_tokens) as (url, behaviour):
        source = make_source(Options(targets=SloTargets(9.0, None, None), factor=10.0))
        found = find_endpoint(url, "chat")
        behaviour.word = ""
        run = HttpMeasure(found, source, 9, 10.0).closed(2, 9, 30.0, 0)
    ended = [seen for seen in run.seen if seen.error or seen.e2e is not None]
    assert ended
    for seen in ended:
        tokens = min(most_tokens, seen.asked_tokens)
        assert (seen.output_tokens, seen.num_gaps) == (tokens, 0)
        assert (seen.error, seen.ttft) == (("", seen.e2e) if tokens <= 3 else ("the stream held no text", None))


def test_gaps_of_an_answer_without_an_end_are_divided_as_in_the_others() -> None:
    whole = Answer(gaps=[0.4], sizes=[8, 8], output_tokens=8)
    cut = Answer(gaps=[0.4, 0.2], sizes=[8, 8, 4])
    assert tokens_per_character([whole, cut]) == 0.5
    assert cut.token_gaps(0.5) == pytest.approx([0.1, 0.1])
    assert tokens_per_character([Answer(gaps=[0.1], sizes=[3, 3], output_tokens=3)]) == 0.0
    assert cut.token_gaps(0.0) == [0.4, 0.2]


def test_a_page_becomes_a_line() -> None:
    assert one_line("<html>\n<h1>502</h1>\n<p>no  upstream</p>") == "502 no upstream"
    assert len(one_line("x" * 1000)) == MAX_CHARS
    assert what_is_wrong("http://x", 200, "{}") == ""
