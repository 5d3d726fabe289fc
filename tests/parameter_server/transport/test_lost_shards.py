"""Links whose shard is lost or restored from a snapshot, and clients that are closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parameter_server.transport.connection import recording, whole_row, with_matrix
from parameter_server.transport.lossy_network import NetworkFaults
from parameter_server.transport.recording_shard import Ask

from streamiter.errors import RolledBack, ServerReset, ShardLost, WorkerHasLeft
from streamiter.parameter_server import BSP
from streamiter.parameter_server.requests import ClientMessage, ClockRequest, SessionControl, SessionId


class Unreachable:
    """A carrier whose shard has ended."""

    def send(self, message: ClientMessage, answered: Callable[[Any], None]) -> None:
        raise ConnectionResetError("the process has ended")


def test_a_shard_that_sends_nothing_for_long_is_lost() -> None:
    """A call to a shard whose function never ended waited forever."""
    connection, _ = recording(window=1)
    link, carrier = connection.link(lost_after_s=20.0)
    carrier.partitioned = True
    replies = [link.send(Ask("worker 0", index, "answered")) for index in range(2)]
    connection.pass_s(19.0)
    assert not any(reply.is_settled for reply in replies)
    connection.pass_s(12.0)
    for reply in replies:
        with pytest.raises(ShardLost, match="shard 0: expected its replies, given TimeoutError: nothing was heard"):
            reply.result()
    assert (link.unanswered, link.queued) == (0, 0)


def test_a_shard_on_which_a_call_waits_long_is_not_lost() -> None:
    """A worker that waited for a slow worker took its shard for dead."""
    connection, shard = recording()
    shard.release = lambda request: None
    link, _ = connection.link(lost_after_s=20.0)
    waiting = link.send(Ask("worker 0", 0, "waits"))
    connection.pass_s(1_000.0)
    assert not waiting.is_settled


def test_silence_counts_from_the_first_unanswered_request() -> None:
    """After a pause of some minutes the first call found its shard lost."""
    connection, _ = recording()
    link, _ = connection.link(lost_after_s=20.0)
    connection.ask(link, Ask("worker 0", 0, "answered"))
    connection.pass_s(1_000.0)
    assert connection.ask(link, Ask("worker 0", 1, "answered")) == 1


def test_calls_fail_with_the_error_of_the_carrier() -> None:
    """An error without its cause said nothing about the process that had ended."""
    connection, _ = recording()
    link, _ = connection.link()
    waiting = link.send(Ask("worker 0", 0, "waits"))
    link.replaced(0, {}, Unreachable())
    with pytest.raises(RolledBack):
        waiting.result()
    again = link.send(Ask("worker 0", 1, "answered"))
    with pytest.raises(ShardLost, match="ConnectionResetError: the process has ended") as caught:
        again.result()
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    with pytest.raises(ShardLost):
        link.send(Ask("worker 0", 2, "answered")).result()


def test_each_call_fails_with_an_error_of_its_own() -> None:
    """One error that was raised in many tasks collected the tracebacks of all."""
    connection, _ = recording()
    link, _ = connection.link()
    replies = [link.send(Ask("worker 0", index, "waits")) for index in range(2)]
    link.lost(ConnectionResetError("gone"))
    errors = []
    for reply in replies:
        with pytest.raises(ShardLost) as caught:
            reply.result()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_after_a_rollback_calls_fail_with_its_clocks_and_new_ones_are_answered() -> None:
    """Workers that continued after a rollback repeated or lost adds, or waited for replies that were gone."""
    connection, shard = recording(faults=NetworkFaults(delay_s=3.0))
    link, _ = connection.link()
    before = link.send(Ask("worker 0", 0, "answered"))
    connection.sessions.restart(1)
    link.replaced(1, {"w": 7})
    with pytest.raises(RolledBack, match="resume from its clocks: w 7") as caught:
        before.result()
    assert caught.value.clocks == {"w": 7}
    after = link.send(Ask("worker 0", 1, "answered"))
    connection.pass_s(30.0)
    assert after.result() == 0
    assert shard.handled == {"worker 0": [1]}


def test_a_lost_shard_that_is_replaced_is_used_again() -> None:
    """A worker needed a new client after each loss."""
    connection, _ = recording()
    link, _ = connection.link()
    link.lost(ConnectionResetError("gone"))
    connection.sessions.restart(1)
    link.replaced(1, {})
    assert connection.ask(link, Ask("worker 0", 0, "answered")) == 0


def test_waiting_calls_are_removed_from_a_shard_that_is_rolled_back() -> None:
    """A get from before the rollback kept its place among the waiting gets of the shard."""
    connection, shard = with_matrix(BSP(), workers=2)
    link, _ = connection.link()
    connection.ask(link, ClockRequest("w", 0))
    link.send(whole_row())
    connection.pass_s(0.5)
    connection.sessions.restart(1)
    assert shard.statistics().matrices[0].waiting == 0


def test_a_closed_link_fails_its_calls_and_takes_no_more() -> None:
    """A call was forgotten when its client was closed, and waited forever."""
    connection, _ = recording()
    link, _ = connection.link()
    waiting = link.send(Ask("worker 0", 0, "waits"))
    connection.pass_s(0.5)
    link.close()
    link.replaced(1, {})
    link.lost(ConnectionResetError("gone"))
    for reply in (waiting, link.send(Ask("worker 0", 1, "answered"))):
        with pytest.raises(ServerReset, match="shard 0: expected a client that is in use, given one that was closed"):
            reply.result()
    connection.pass_s(1.0)
    assert connection.sessions._open == {}


def test_a_late_copy_of_a_request_of_a_closed_client_is_not_applied_again() -> None:
    """A shard that had forgotten a closed client took a late first request for the request of a new client."""
    connection, shard = recording()
    session = SessionId("worker 0")
    message = ClientMessage(session, 1, (), Ask("worker 0", 0, "answered"))
    connection.sessions.receive(message)
    connection.sessions.receive(ClientMessage(session, 0, (), SessionControl.CLOSE))
    connection.sessions.receive(message)
    assert shard.handled == {"worker 0": [0]}
    newer, _ = connection.link(incarnation=1)
    assert connection.ask(newer, Ask("worker 0", 1, "answered")) == 1


def test_a_replaced_client_is_refused_after_a_rollback_too() -> None:
    """After a rollback, a worker that had been taken for dead took part again together with its successor."""
    connection, shard = recording()
    old, _ = connection.link()
    connection.ask(connection.link(incarnation=1)[0], Ask("new", 0, "answered"))
    connection.sessions.restart(1)
    old.replaced(1, {})
    with pytest.raises(WorkerHasLeft, match="expected client 1 of this name or a newer one, given client 0"):
        connection.ask(old, Ask("old", 0, "answered"))
    assert "old" not in shard.handled
