"""The settings of a server while it is tuned: what was there before is there again, whatever happens."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from app.audit import timestamp
from app.limit.endpoint import EndpointError, find_endpoint
from app.limit.interrupted import uninterrupted
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.over_http import HttpMeasure
from app.limit.runs import Promise
from app.limit.statistics import margin_of
from app.limit.tune_admin import ChangedError, HttpAdmin
from app.limit.tune_candidates import RefusedError
from app.limit.tune_controls import BUDGET, POLICY, SEATS, Values
from app.limit.tune_http import refuse_others
from app.limit.tune_live import LiveSettings, open_settings
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint
from tests.app.serving import chat_body, make_settings, open_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from app.limit.endpoint import Endpoint
    from engine.config import Limits

NAMES = (SEATS, BUDGET, POLICY)
OWN: Values = {SEATS: 16, BUDGET: 128, POLICY: "continuous"}
TOKEN = "right-token-of-the-admin"
MORE: Values = {**OWN, SEATS: 32}
OTHER: Values = {**OWN, BUDGET: 64, POLICY: "static"}


class FakeAdmin:
    """A server's live settings, with everything that was asked of them.

    Attributes:
        interrupt: at the call of that number, before or after it has had its effect, what is raised. A change can also
            have its effect `later`: after `delay` calls more, and before the next change in any case.
        patches: all bodies that were taken.
    """

    def __init__(self, **effective: Any) -> None:
        self.effective: dict[str, Any] = {**OWN, "dynamic_preferred_size": 0, "draining": False, **effective}
        self.generation = 7
        self.reverts: dict[str, dict[str, Any]] = {}
        self.audit: list[dict[str, Any]] = []
        self.patches: list[dict[str, Any]] = []
        self.num_calls = 0
        self.interrupt: tuple[int, str, BaseException] = (0, "before", KeyboardInterrupt())
        self.delay, self._due = math.inf, math.inf
        self._ordered: list[dict[str, Any]] = []
        self.drains = 0

    def show(self) -> dict[str, Any]:
        return self._call(self._view)

    def history(self) -> list[dict[str, Any]]:
        return self._call(lambda: list(self.audit))

    def change(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call(partial(self._make, dict(body)), dict(body))

    def settle(self) -> None:
        """A step has ended: what was ordered is made."""
        ordered, self._ordered, self._due = self._ordered, [], math.inf
        for body in ordered:
            with suppress(ChangedError):
                self._change(body, "127.0.0.1")

    def by_admin(self, **body: Any) -> None:
        """Somebody else's change."""
        self._change(body, "admin")

    def record(self) -> None:
        """A deed of somebody else, which changes nothing."""
        deed = {"generation": self.generation, "who": "admin", "changes": {}, "reason": None, "deed": "A recording"}
        self.audit.append(deed)

    def expire(self) -> None:
        """The time given to all temporary changes is over."""
        values = {name: plan["to"] for name, plan in self.reverts.items()}
        self._change({**values, "reason": "the time given to the change is over"}, "ttl")

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        self.settle()
        return self._change(body, "127.0.0.1")

    def _call(self, do: Callable[[], Any], order: dict[str, Any] | None = None) -> Any:
        self.num_calls += 1
        if self.num_calls >= self._due:
            self.settle()
        number, when, error = self.interrupt
        if number == self.num_calls and when == "later" and order is not None:
            self._ordered.append(order)
            self._due = self.num_calls + self.delay
        if number == self.num_calls and when != "after":
            raise error
        answer = do()
        if number == self.num_calls and when == "after":
            raise error
        return answer

    def _view(self) -> dict[str, Any]:
        self.drains -= bool(self.drains)
        return {
            "generation": self.generation,
            "effective": dict(self.effective),
            "reverts": {name: dict(plan) for name, plan in self.reverts.items()},
            "pending_drain": {"policy": 1} if self.drains else {},
            "ranges": {SEATS: [1, 64], BUDGET: [1, 512]},
            "choices": {POLICY: ["continuous", "static", "dynamic"]},
        }

    def _change(self, body: dict[str, Any], who: str) -> dict[str, Any]:
        ttl, reason, seen = (body.pop(name, None) for name in ("ttl_seconds", "reason", "if_generation"))
        if seen is not None and seen != self.generation:
            raise ChangedError("The settings have changed meanwhile.")
        if body.get(SEATS) == 64:
            raise RefusedError("'max_num_seqs' must not be 64.")
        self.patches.append({**body, "ttl_seconds": ttl, "who": who})
        changes = {name: [self.effective[name], value] for name, value in body.items() if self.effective[name] != value}
        for name, value in body.items():
            plan = self.reverts.pop(name, None)
            lasting = plan["to"] if plan else self.effective[name]
            if ttl is not None and value != lasting:
                self.reverts[name] = {"to": lasting, "at": "later"}
        self.effective |= body
        self.generation += bool(changes)
        self.audit.append({"generation": self.generation, "who": who, "changes": changes, "reason": reason})
        return self._view()


def session(admin: FakeAdmin, then: Callable[[LiveSettings], object] = lambda _live: None) -> None:
    """A search in small: two candidates, the present settings again, and what comes then."""
    with open_settings(admin, NAMES, now=lambda: 0.0, sleep=lambda _seconds: None) as live:
        live.hold(MORE, 10)
        live.check()
        live.hold(OTHER, 10)
        live.check()
        live.hold(dict(OWN), 10)
        live.hold(MORE, 10)
        then(live)


def holds(admin: FakeAdmin) -> bool:
    """Whether everything is as it was at the beginning."""
    return {name: admin.effective[name] for name in OWN} == OWN and not admin.reverts


def test_what_was_there_is_there_again_and_each_change_would_have_ended_by_itself() -> None:
    admin = FakeAdmin()
    session(admin)
    assert holds(admin)
    *held, last = admin.patches
    assert [{name: patch.get(name) for name in OWN} for patch in held][:2] == [
        {SEATS: 32, BUDGET: None, POLICY: None},
        {SEATS: 16, BUDGET: 64, POLICY: "static"},
    ]
    assert all(60 <= patch["ttl_seconds"] < 600 for patch in held)
    assert last == {SEATS: 16, "ttl_seconds": None, "who": "127.0.0.1"}


NUM_CALLS = 24


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the search broke")], ids=["key", "crash"])
def test_it_is_there_again_wherever_it_is_interrupted(when: str, error: BaseException) -> None:
    counted = FakeAdmin()
    session(counted)
    assert counted.num_calls < NUM_CALLS
    for number in range(1, counted.num_calls + 1):
        admin = FakeAdmin()
        admin.interrupt = (number, when, error)
        is_last = number > counted.num_calls - 3 and isinstance(error, RuntimeError)
        if is_last:  # nothing but a key comes between what is done to restore them
            continue
        with pytest.raises(type(error)):
            session(admin)
        assert holds(admin), number


HANGS = EndpointError("The engine does not answer; the change is made, and written down, when it does.")


@pytest.mark.parametrize("delay", [1, 2, 3, math.inf])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), HANGS], ids=["key", "hangs"])
def test_it_is_there_again_although_a_change_is_made_after_all_that_nobody_waits_for(
    delay: float, error: BaseException
) -> None:
    counted = FakeAdmin()
    session(counted)
    for number in range(1, counted.num_calls + 1):
        admin = FakeAdmin()
        admin.delay = delay
        admin.interrupt = (number, "later", error)
        with suppress(KeyboardInterrupt, EndpointError):
            session(admin)
        admin.settle()
        assert holds(admin), number


@pytest.mark.parametrize("when", ["before", "later", "after"])
def test_what_was_to_hold_for_good_does_so_or_not_at_all(when: str) -> None:
    counted = FakeAdmin()
    session(counted, lambda live: live.apply(OTHER))
    for number in range(1, counted.num_calls + 1):
        admin = FakeAdmin()
        admin.interrupt = (number, when, HANGS)
        kept = OTHER
        try:
            session(admin, lambda live: live.apply(OTHER))
        except EndpointError:
            kept = OWN
        admin.settle()
        assert {name: admin.effective[name] for name in OWN} == kept, number
        assert not admin.reverts


def test_what_somebody_else_changed_is_left_alone_beside_a_change_that_nobody_waited_for() -> None:
    """It is refused when its turn comes, as theirs has come before it."""
    admin = FakeAdmin()

    def change(live: LiveSettings) -> None:
        admin.interrupt = (admin.num_calls + 1, "later", HANGS)
        admin.by_admin(**{BUDGET: 256})
        live.hold(OTHER, 10)

    with pytest.raises(EndpointError, match="does not answer"):
        session(admin, change)
    admin.settle()
    assert {name: admin.effective[name] for name in OWN} == {**OWN, BUDGET: 256}
    assert not admin.reverts


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda live: live.hold(OTHER, 90), "by itself within 180 s. The engine does not answer"),
        (lambda live: live.apply(OTHER), "whether those that were found come to hold for good is not known. The"),
    ],
)
def test_where_no_change_is_answered_it_is_said_what_may_come(
    what: Callable[[LiveSettings], object], said: str
) -> None:
    admin = FakeAdmin()

    def hang(_body: object) -> dict[str, Any]:
        raise HANGS

    with pytest.raises(EndpointError, match=said):
        session(admin, lambda live: (setattr(admin, "change", hang), what(live)))


def test_it_is_there_again_when_one_change_is_refused() -> None:
    admin = FakeAdmin()
    with pytest.raises(RefusedError, match="must not be 64"):
        session(admin, lambda live: live.hold({**OWN, SEATS: 64}, 10))
    assert holds(admin)
    # The search goes on after it: what held before the refusal still does.
    admin = FakeAdmin()

    def refused_and_on(live: LiveSettings) -> None:
        with pytest.raises(RefusedError):
            live.hold({**OWN, SEATS: 64}, 10)
        live.hold(OTHER, 10)

    session(admin, refused_and_on)
    assert holds(admin)


def test_where_nobody_restores_them_the_server_does() -> None:
    admin = FakeAdmin()
    live = LiveSettings(admin, NAMES)
    live.hold(OTHER, 10)  # and this process is killed
    assert admin.effective[POLICY] == "static"
    admin.expire()
    assert holds(admin)


def test_a_server_that_cannot_be_reached_for_a_moment_is_asked_again() -> None:
    admin = FakeAdmin()
    failures = iter([True, True, False])
    show = admin.show

    def flaky() -> dict[str, Any]:
        if admin.patches and next(failures, False):
            raise EndpointError("nobody answers")
        return show()

    with open_settings(admin, NAMES, sleep=lambda _seconds: None) as live:
        live.hold(MORE, 10)
        admin.show = flaky  # type: ignore[method-assign]
    assert holds(admin)


def test_where_they_cannot_be_put_back_it_is_said_when_the_server_does_so_itself() -> None:
    admin = FakeAdmin()

    def gone() -> dict[str, Any]:
        raise EndpointError("It cannot be reached.")

    with pytest.raises(EndpointError, match=r"by itself within 60 s\. It cannot be reached\."):
        session(admin, lambda _live: setattr(admin, "show", gone))


def test_where_nothing_was_changed_nothing_has_to_come_back() -> None:
    """What failed is told, and not that a server that is gone could not be asked."""
    admin = FakeAdmin()

    def fail() -> None:
        with open_settings(admin, NAMES):
            raise EndpointError("The server is gone.")

    with pytest.raises(EndpointError, match=r"^The server is gone\.$"):
        fail()
    assert admin.num_calls == 1


def test_what_an_admin_changes_meanwhile_is_noticed_and_left_alone() -> None:
    admin = FakeAdmin()
    with pytest.raises(ChangedError, match=r"max_num_batched_tokens changed while they were tuned \(by admin\)"):
        session(admin, lambda live: (admin.by_admin(**{BUDGET: 256}), live.check()))
    assert admin.effective == {**admin.effective, SEATS: 16, BUDGET: 256, POLICY: "continuous"}
    assert not admin.reverts


def test_nothing_is_changed_on_top_of_what_an_admin_has_changed() -> None:
    admin = FakeAdmin()

    def change(live: LiveSettings) -> None:
        admin.by_admin(**{SEATS: 20})
        live.hold(OTHER, 10)

    with pytest.raises(ChangedError, match="max_num_seqs changed"):
        session(admin, change)
    assert admin.effective[SEATS] == 20  # of the same control that was turned just then
    assert admin.effective[POLICY] == "continuous"
    assert not admin.reverts


def test_a_temporary_change_of_an_admin_stays_and_ends_where_theirs_would_have() -> None:
    admin = FakeAdmin()
    with pytest.raises(ChangedError):
        session(admin, lambda live: (admin.by_admin(**{SEATS: 20, "ttl_seconds": 60}), live.check()))
    assert admin.effective[SEATS] == 20
    admin.expire()
    assert holds(admin)


def test_a_run_that_outlives_its_change_is_told_also_beside_a_recording() -> None:
    admin = FakeAdmin()
    with pytest.raises(ChangedError, match="larger --factor"):
        session(admin, lambda live: (admin.expire(), admin.record(), live.check()))
    assert holds(admin)


def test_what_is_applied_stays() -> None:
    admin = FakeAdmin()
    session(admin, lambda live: live.apply(OTHER))
    assert {name: admin.effective[name] for name in OWN} == OTHER
    assert not admin.reverts
    assert admin.patches[-1]["ttl_seconds"] is None


def test_a_change_is_renewed_when_its_time_is_nearly_over_and_not_before() -> None:
    admin = FakeAdmin()
    now = [0.0]
    with open_settings(admin, NAMES, now=lambda: now[0], sleep=lambda _seconds: None) as live:
        live.hold(MORE, 50)
        for now[0] in (0.0, 40.0):
            live.hold(MORE, 50)
        assert len(admin.patches) == 1
        now[0] = 60.0
        live.hold(MORE, 50)
        assert [patch[SEATS] for patch in admin.patches] == [32, 32]
    assert holds(admin)


def test_another_policy_is_waited_for() -> None:
    admin = FakeAdmin()
    admin.drains = 5
    slept: list[float] = []
    with open_settings(admin, NAMES, now=lambda: 0.0, sleep=slept.append) as live:
        admin.drains = 5
        live.hold(OTHER, 10)
    assert len(slept) == 4
    assert holds(admin)


def test_the_batch_of_the_dynamic_policy_shrinks_with_the_seats_and_grows_again() -> None:
    admin = FakeAdmin(dynamic_preferred_size=12)
    with open_settings(admin, NAMES) as live:
        live.hold({**OWN, SEATS: 8}, 10)
        assert admin.effective["dynamic_preferred_size"] == 8
        live.hold({**OWN, SEATS: 32}, 10)
        assert admin.effective["dynamic_preferred_size"] == 12
        live.hold({**OWN, SEATS: 4}, 10)
    assert admin.effective["dynamic_preferred_size"] == 12
    assert holds(admin)


@pytest.mark.parametrize("state", ["draining", "temporary"])
def test_a_server_that_is_not_itself_is_refused(state: str) -> None:
    admin = FakeAdmin(draining=state == "draining")
    if state == "temporary":
        admin.by_admin(**{SEATS: 20, "ttl_seconds": 60})
    with pytest.raises(EndpointError, match=r"draining|goes back by itself"), open_settings(admin, NAMES):
        pass
    assert len(admin.patches) == (state == "temporary")


def test_a_search_that_was_killed_is_told_with_how_long_its_settings_hold() -> None:
    admin = FakeAdmin()
    LiveSettings(admin, NAMES).hold(MORE, 10)  # and this process is killed
    admin.reverts[SEATS]["at"] = timestamp(time.time() + 95.5)
    with pytest.raises(EndpointError, match=r"by itself within 9[56] s, .* another relevo limit --tune, which goes"):
        LiveSettings(admin, NAMES)
    admin.expire()
    admin.by_admin(**{SEATS: 20, "ttl_seconds": 60})
    with pytest.raises(EndpointError, match=r"by itself, so .* or make it last\.$"):
        LiveSettings(admin, NAMES)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_until_they_are_there_again(number: signal.Signals) -> None:
    done = []

    def restore() -> None:
        with uninterrupted():
            os.kill(os.getpid(), number)
            done.append("restored")

    outside = signal.getsignal(number)
    if outside is signal.SIG_IGN:  # the tests themselves run under nohup
        signal.signal(number, signal.SIG_DFL)
    try:
        before = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt):
            restore()
        assert done == ["restored"]
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, outside)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, "{}"), "only a Relevo can be tuned; leave --tune out"),
        ((401, "{}"), "wants the admin token"),
        ((200, "<html>"), "no JSON"),
        ((200, '{"a": 1}'), "not that of a Relevo"),
        ((500, '{"error": {"message": "it broke"}}'), "answers HTTP 500: it broke"),
    ],
)
def test_a_server_without_live_settings_is_refused(answer: tuple[int, str], expected: str) -> None:
    with open_endpoint(context=64) as (url, behaviour):
        endpoint = find_endpoint(url, "chat")
        behaviour.routes["/admin/config"] = answer
        with pytest.raises(EndpointError, match=expected):
            HttpAdmin(endpoint).show()


def test_another_server_is_refused_before_anything_is_measured(run: Any) -> None:
    with open_endpoint(context=4096, metrics="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n") as (
        url,
        behaviour,
    ):
        code, out, err = run("limit", "--url", url, "--tune")
        assert (code, out) == (1, "")
        assert "only a Relevo can be tuned" in err
        assert len(behaviour.bodies) == 2  # to find out how it is asked
        behaviour.routes["/admin/config"] = (200, json.dumps(FakeAdmin().show()))
        behaviour.metrics = behaviour.metrics.replace("running 0", "running 3")
        code, _, err = run("limit", "--url", url, "--tune", "max_num_seqs")
        assert code == 1
        assert "serves others (3 run, 0 wait)" in err
        assert "--while-serving" in err


def change(admin: HttpAdmin) -> None:
    """Settings are held, and in the end somebody else changes one of them and another."""
    with open_settings(admin, NAMES) as live:
        live.hold(MORE, 10)
        assert set(admin.show()["reverts"]) == {SEATS}
        live.hold(OTHER, 10)
        with pytest.raises(RefusedError, match="max_num_seqs"):
            live.hold({**OWN, SEATS: 10_000}, 10)
        admin.change({"max_waiting": 99, SEATS: 12})
        live.check()


@pytest.mark.parametrize("is_lent", [False, True])
async def test_a_real_server_changes_goes_back_and_tells_of_others(is_lent: bool) -> None:
    """The settings through HTTP, as the server itself keeps them; also with the key that it lends its own searches."""
    settings = make_settings(security={"admin_token": TOKEN})
    async with open_server(
        settings, limits={"max_num_seqs": 16, "capacity_num_seqs": 64, "max_num_batched_tokens": 128}
    ) as server:
        token = server.context.keys.keyring.lend("search", is_background=False) if is_lent else TOKEN

        def work() -> None:
            find = partial(find_endpoint, server.url, "chat")
            with pytest.raises(EndpointError, match="wants the admin token"):
                LiveSettings(HttpAdmin(find()), NAMES)
            admin = HttpAdmin(find(admin_token=token))
            with pytest.raises(ChangedError, match="changed while they were tuned"):
                change(admin)

        await trio.to_thread.run_sync(work)
        limits = server.engine.limits
        assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.policy) == (12, 128, "continuous")
        assert limits.max_waiting == 99
        view = (await server.client.get("/admin/config", headers={"Authorization": f"Bearer {TOKEN}"})).json()
        assert view["reverts"] == {}


class Leaving(HttpAdmin):
    """Somebody who leaves while a change is waited for.

    Args:
        wait: until the server has the change.
    """

    def __init__(self, endpoint: Endpoint, wait: Callable[[], object]) -> None:
        super().__init__(endpoint)
        self._wait = wait
        self.sender: threading.Thread | None = None

    def change(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.sender is not None:
            return super().change(body)
        self.sender = threading.Thread(target=super().change, args=(body,))
        self.sender.start()
        self._wait()
        raise KeyboardInterrupt


async def test_a_real_server_is_as_it_was_when_somebody_left_before_the_step_was_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_server(limits={"max_num_seqs": 16, "capacity_num_seqs": 64}) as server:
        set_limits = server.engine.set_limits
        has_come, is_over, has_left = trio.Event(), trio.Event(), trio.Event()

        async def late(*args: Any, **more: Any) -> Limits:
            has_come.set()
            await is_over.wait()
            return await set_limits(*args, **more)

        monkeypatch.setattr(server.engine, "set_limits", late)
        endpoint = await trio.to_thread.run_sync(partial(find_endpoint, server.url, "chat"))
        admin = Leaving(endpoint, partial(trio.from_thread.run, has_come.wait))

        def work() -> None:
            settings = open_settings(admin, [SEATS], sleep=lambda _seconds: time.sleep(0.01))
            with pytest.raises(KeyboardInterrupt), settings as live:
                live.hold({SEATS: 32}, 10)

        async def tune() -> None:
            await trio.to_thread.run_sync(work)
            has_left.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tune)
            await has_come.wait()
            with trio.move_on_after(0.2):
                await has_left.wait()  # without having asked for what was there behind it
            is_over.set()
        assert admin.sender is not None
        await trio.to_thread.run_sync(admin.sender.join)
        view = (await server.client.get("/admin/config")).json()
        assert (view["effective"]["max_num_seqs"], view["reverts"]) == (16, {})


async def test_a_server_that_has_requests_of_others_is_refused() -> None:
    async with open_server(step_seconds=0.02) as server, trio.open_nursery() as nursery:
        endpoint = await trio.to_thread.run_sync(partial(find_endpoint, server.url, "chat"))
        await trio.to_thread.run_sync(refuse_others, endpoint, 5.0)
        body = chat_body(max_tokens=500)
        nursery.start_soon(partial(server.client.post, "/v1/chat/completions", json=body))
        while not server.engine.num_running:
            await trio.sleep(0.01)
        with pytest.raises(EndpointError, match=r"serves others \(1 run, 0 wait\)"):
            await trio.to_thread.run_sync(refuse_others, endpoint, 0.0)
        nursery.cancel_scope.cancel()


def test_a_run_that_is_lost_goes_to_its_end_where_it_is_to_be_compared() -> None:
    targets = SloTargets(0.02, None, None)
    source = Source((WorkClass("requests", 1.0, Ranges((5, 5), (2, 2)), targets),), Promise((targets,), 0.01))
    with open_endpoint(first_seconds=0.1) as (url, _):
        measure = HttpMeasure(find_endpoint(url, "chat"), source, 30, 10.0, goes_on=True)
        whole, ended = measure(40.0, 0), replace(measure, goes_on=False)(40.0, 0)
    assert (whole.stopped, len(whole.finished)) == (False, 30)
    assert (ended.stopped, len(ended.seen) < 30) == (True, True)
    margin = margin_of(whole, whole)
    assert margin is not None
    assert margin.estimate == 1
    assert margin_of(ended, whole) is None


@pytest.fixture(scope="module")
def process() -> Iterator[str]:
    """A server over the fake engine, as a process of its own: 2 seats where 4 can be had."""
    fake = {
        "step_seconds": 0.01,
        "max_model_len": 2048,
        "num_blocks": 4096,
        "limits": {"max_num_seqs": 2, "capacity_num_seqs": 4},
    }
    words = [sys.executable, "-m", "tests.serve_fake", json.dumps(fake)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get(f"{url}/healthz").status_code == 200
        yield url
        server.terminate()


@pytest.fixture
def served(process: str) -> Iterator[str]:
    """The same, as it was at its start."""
    yield process
    assert httpx.patch(f"{process}/admin/config", json={"restore": "start"}).json()["reverts"] == {}


@pytest.mark.long
def test_a_whole_tuning_over_real_sockets(served: str, tmp_path: Path) -> None:
    """Two seats are too few, and more cost nothing here."""
    path = tmp_path / "limit.json"
    words = ["limit", "--url", served, "--tune", "max_num_seqs", "--apply", "--duration", "75", "--requests", "10"]
    words += ["--factor", "40", "--ttft-p95", "1", "--itl-p95", "none", "--json", str(path)]
    before = len(httpx.get(f"{served}/admin/audit").json())
    done = subprocess.run([sys.executable, "-m", "app.cli", *words], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    tune = json.loads(path.read_text())["tune"]
    config = httpx.get(f"{served}/admin/config").json()
    assert config["reverts"] == {}
    assert tune["applied"] == tune["evidence"]["believed"]
    assert config["effective"]["max_num_seqs"] == tune["best"]["settings"]["max_num_seqs"]
    entries = httpx.get(f"{served}/admin/audit").json()[before:]
    assert bool(entries) == bool(tune["candidates"])  # a machine that is busy may have no time for any
    assert all("--tune" in entry["reason"] for entry in entries)


TUNING = """
import sys, time
from app.limit.interrupted import ended_like_a_key
from app.limit.endpoint import find_endpoint
from app.limit.tune_admin import HttpAdmin
from app.limit.tune_live import open_settings
with ended_like_a_key(), open_settings(HttpAdmin(find_endpoint(sys.argv[1], "chat")), ["max_num_seqs"]) as live:
    live.hold({"max_num_seqs": 4}, 30)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_the_server_as_it_was(served: str, number: signal.Signals) -> None:
    words = [sys.executable, "-c", TUNING, served]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tuner:
        assert tuner.stdout is not None
        assert tuner.stdout.readline() == "held\n"
        tuner.send_signal(number)
    config = httpx.get(f"{served}/admin/config").json()
    if number == signal.SIGKILL:  # the server goes back by itself
        assert config["reverts"]["max_num_seqs"]["to"] == 2
    else:
        assert config["reverts"] == {}
        assert config["effective"] == config["start"]
