"""A client that is replaced, or shards that are rolled back, over a lossy network."""

from __future__ import annotations

import random
from typing import Any

import pytest
from parameter_server.transport.connection import Connection
from parameter_server.transport.lossy_network import EVERYTHING
from parameter_server.transport.recording_shard import Ask, RecordingShard
from support.soak import ForEachSeed

from streamiter.errors import RolledBack, WorkerHasLeft
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import ClientMessage
from streamiter.parameter_server.transport import RemoteLink, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

SEEDS = range(50)
_REQUESTS = 10
_BOUND_S = 1_500.0


class _Replaced:
    """A client that is called "old" in its requests until it is replaced, and "new" afterwards."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chances = random.Random(seed)
        time = SimulatedTime()
        self.shard = RecordingShard(time, self.chances)
        self.connection = Connection(
            self.shard, time=time, faults=EVERYTHING, seed=seed, window=self.chances.choice([1, 4])
        )

    def ask_all(self, link: RemoteLink, name: str) -> list[WaitingReply[Any]]:
        kinds = ("answered", "answered", "waits")
        return [link.send(Ask(name, index, self.chances.choice(kinds))) for index in range(_REQUESTS)]

    def pass_until_settled(self, calls: list[WaitingReply[Any]]) -> None:
        while not all(call.is_settled for call in calls):
            self.next_timer()
        self.connection.pass_s(60.0)

    def next_timer(self) -> None:
        due_s = self.connection.time.next_timer_s
        assert due_s is not None, f"seed {self.seed}: calls hang"
        assert due_s < _BOUND_S, f"seed {self.seed}: calls hang"
        self.connection.time.pass_until(due_s)

    def check_handled(self, old_before: list[int]) -> None:
        handled = self.shard.handled
        assert handled.get("new") == list(range(_REQUESTS)), f"seed {self.seed}"
        assert handled.get("old", []) == old_before == list(range(len(old_before))), f"seed {self.seed}"
        assert not [ask for ask in self.shard.parked if ask.client == "old"], f"seed {self.seed}"


def clocks_of_rollback(call: WaitingReply[Any]) -> dict[str, int] | None:
    """Return the clocks of the rollback that a call failed with, or None where it was answered before."""
    try:
        call.result()
    except RolledBack as error:
        return error.clocks
    return None


def check_newer_client(seed: int) -> None:
    """Check that an older client of a worker is refused from the first message of a newer client on."""
    run = _Replaced(seed)
    old, _ = run.connection.link(incarnation=0)
    calls = run.ask_all(old, "old")
    run.connection.pass_s(run.chances.random() * 10.0)
    new, _ = run.connection.link(incarnation=1)
    answered = run.ask_all(new, "new")
    before: list[int] = []
    while "new" not in run.shard.handled:
        before = list(run.shard.handled.get("old", []))
        run.next_timer()
    run.pass_until_settled(calls + answered)
    run.check_handled(before)
    for call in answered:
        call.result()
    for call in calls[len(before) :]:
        with pytest.raises(
            WorkerHasLeft, match="worker 0: expected client 1 of this name or a newer one, given client 0"
        ):
            call.result()


def check_rollback(seed: int) -> None:
    """Check a rollback of shards and client in either order, the second one possibly some time later."""
    run = _Replaced(seed)
    link, _ = run.connection.link()
    calls = run.ask_all(link, "old")
    run.connection.pass_s(run.chances.random() * 10.0)
    later_s = run.chances.random() * 5.0
    if run.chances.random() < 0.5:
        run.connection.sessions.restart(1)
        before = list(run.shard.handled.get("old", []))
        run.connection.pass_s(later_s)
        link.replaced(1, {"w": seed})
        answered = run.ask_all(link, "new")
    else:
        link.replaced(1, {"w": seed})
        answered = run.ask_all(link, "new")
        run.connection.pass_s(later_s)
        run.connection.sessions.restart(1)
        before = list(run.shard.handled.get("old", []))
    run.pass_until_settled(calls + answered)
    run.check_handled(before)
    for call in answered:
        call.result()
    rolled_back = [clocks for call in calls if (clocks := clocks_of_rollback(call)) is not None]
    assert all(clocks == {"w": seed} for clocks in rolled_back), f"seed {seed}"


def test_requests_of_an_older_client_of_a_worker_are_refused_once_a_newer_one_exists() -> None:
    """A slow worker that had been taken for dead added its gradients together with its successor's."""
    for seed in SEEDS:
        check_newer_client(seed)


def test_no_request_sent_before_a_rollback_is_applied_after_it() -> None:
    """An add on its way was applied after the rollback, and again when its worker repeated it."""
    for seed in SEEDS:
        check_rollback(seed)


def test_a_planted_bug_that_confuses_clients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message of the older client was late, so the checks above passed with a bug."""
    receive = ShardSessions.receive

    def as_separate_clients(self: ShardSessions, message: ClientMessage) -> Any:
        session = message.session
        alone = session._replace(client=f"{session.client}, client {session.incarnation}")
        return receive(self, message._replace(session=alone))

    monkeypatch.setattr(ShardSessions, "receive", as_separate_clients)
    with pytest.raises(AssertionError, match="seed"):
        test_requests_of_an_older_client_of_a_worker_are_refused_once_a_newer_one_exists()


def test_a_planted_bug_that_confuses_generations_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message from before the rollback was late, so the checks above passed with a bug."""
    receive = ShardSessions.receive

    def of_any_generation(self: ShardSessions, message: Any) -> Any:
        self.generation = message.session.generation
        return receive(self, message)

    monkeypatch.setattr(ShardSessions, "receive", of_any_generation)
    with pytest.raises(AssertionError, match="seed"):
        test_no_request_sent_before_a_rollback_is_applied_after_it()


@pytest.mark.soak
def test_replacements_hold_for_many_more_seeds(for_each_soak_seed: ForEachSeed) -> None:
    """A rare order of messages was missed by the seeds of the short tests."""
    for_each_soak_seed(check_newer_client)
    for_each_soak_seed(check_rollback)
