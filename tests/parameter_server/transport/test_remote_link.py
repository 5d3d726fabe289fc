"""A link to a shard in another process: its errors, its arrays, and its bound on calls under way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_server.transport.connection import Connection, add_ones, recording, whole_row, with_matrix
from parameter_server.transport.recording_shard import Ask

from streamiter.errors import OutOfRange, ParameterServerError, RolledBack, UnknownMatrix
from streamiter.parameter_server import ASP
from streamiter.parameter_server.requests import AddRequest, Changes, GetRequest, NextChanges


class RaisesOn:
    """A shard that raises a given error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def handle(self, request: Any) -> Any:
        raise self.error


def test_an_error_of_the_shard_is_raised_by_the_call_with_its_class_and_message() -> None:
    """A handler for UnknownMatrix did not catch the error of a shard in another process."""
    connection, _ = with_matrix(ASP())
    link, _ = connection.link()
    with pytest.raises(UnknownMatrix, match="matrix 'v': expected one of 'w', given 'v'"):
        connection.ask(link, GetRequest("v", 0))


def test_an_error_of_another_library_names_its_type_and_its_line() -> None:
    """A mistake in a user's function on another machine gave an error without a line of code."""
    connection = Connection(RaisesOn(ZeroDivisionError("division by zero")))
    link, _ = connection.link()
    with pytest.raises(ParameterServerError, match="a shard raised ZeroDivisionError: division by zero") as caught:
        connection.ask(link, "anything")
    assert type(caught.value) is ParameterServerError
    assert "raise self.error" in caught.value.__notes__[0]


def test_an_error_that_only_has_the_name_of_a_streamiter_error_does_not_become_it() -> None:
    """An OutOfRange error of another library was taken for the error about a wrong column."""
    connection = Connection(RaisesOn(type("OutOfRange", (Exception,), {})("of something else")))
    link, _ = connection.link()
    with pytest.raises(ParameterServerError, match="a shard raised OutOfRange: of something else") as caught:
        connection.ask(link, "anything")
    assert not isinstance(caught.value, OutOfRange)


def test_an_error_of_a_class_derived_from_a_streamiter_error_does_not_become_it() -> None:
    """A user's error class was built from its message alone, which raised another error."""

    class OutOfMyRange(OutOfRange):
        def __init__(self, low: int, high: int) -> None:
            super().__init__(f"{low} to {high}")

    connection = Connection(RaisesOn(OutOfMyRange(1, 2)))
    link, _ = connection.link()
    with pytest.raises(ParameterServerError, match="a shard raised OutOfMyRange: 1 to 2"):
        connection.ask(link, "anything")


def test_a_rollback_raised_by_the_shard_has_its_clocks() -> None:
    """A worker received a rollback without the clocks to resume from."""
    connection = Connection(RaisesOn(RolledBack("go back", {"w": 3})))
    link, _ = connection.link()
    with pytest.raises(RolledBack, match="go back") as caught:
        connection.ask(link, "anything")
    assert caught.value.clocks == {"w": 3}


def test_an_array_to_be_filled_stays_at_the_client() -> None:
    """A shard in another process got the array, and a reply to a cancelled call overwrote it."""
    connection, _ = with_matrix(ASP())
    link, _ = connection.link()
    connection.ask(link, add_ones())
    out = np.full(4, 7.0)
    assert connection.ask(link, whole_row(out)).values[0].tolist() == [1.0] * 4
    fused = connection.ask(link, AddRequest("w", 0, parts=add_ones().parts, get=whole_row(out)))
    assert fused.values[0].tolist() == [2.0] * 4
    link.send(whole_row(out)).give_up()
    connection.pass_s(60.0)
    assert link.unanswered == 0
    assert out.tolist() == [7.0] * 4


@pytest.mark.parametrize("window", [1, 4], ids=["queued", "sent"])
def test_a_cancelled_add_is_done_with_the_values_that_it_had(window: int) -> None:
    """A repeated add sent the values that the caller had put into its array after it cancelled the call."""
    connection, shard = with_matrix(ASP(), window=window)
    link, carrier = connection.link()
    carrier.partitioned = True
    link.send(add_ones())
    delta = np.full(4, 10.0)
    link.send(add_ones(delta)).give_up()
    delta[:] = 500.0
    carrier.partitioned = False
    connection.pass_s(60.0)
    assert shard.matrices["w"].blocks[0].get(0, None).tolist() == [11.0, 11.0, 11.0, 11.0]


def test_a_request_that_waits_is_not_sent_again() -> None:
    """A gradient of many MB was sent every second while its worker waited for a clock."""
    connection, shard = recording()
    link, carrier = connection.link()
    waiting = link.send(Ask("worker 0", 0, "waits"))
    connection.pass_s(30.0)
    assert carrier.requests_sent == {1: 1}
    shard.release(Ask("worker 0", 0, "waits"))
    connection.pass_s(1.0)
    assert waiting.result() == 0


def test_a_request_that_is_cancelled_before_it_is_sent_keeps_no_place_on_the_shard() -> None:
    """The shard received cancellations only of calls that had already been sent."""
    connection, shard = recording(window=1)
    link, _ = connection.link()
    first = link.send(Ask("worker 0", 0, "endless"))
    link.send(Ask("worker 0", 1, "endless")).give_up()
    first.give_up()
    connection.pass_s(1.0)
    assert (link.unanswered, link.queued, shard.parked) == (0, 0, {})
    assert shard.handled == {"worker 0": [0, 1]}


def test_requests_above_the_window_wait_in_the_client_and_follow_in_order() -> None:
    """A client that sent without a bound filled the memory of the shard."""
    connection, shard = recording(window=2)
    link, _ = connection.link()
    waits = Ask("worker 0", 0, "waits")
    replies = [link.send(waits), *(link.send(Ask("worker 0", index, "answered")) for index in range(1, 6))]
    assert (link.unanswered, link.queued) == (2, 4)
    connection.pass_s(100.0)
    assert [reply.result() for reply in replies] == [0, 1, 2, 3, 4, 5]
    assert shard.handled == {"worker 0": [0, 1, 2, 3, 4, 5]}


def test_a_request_that_waits_long_does_not_block_later_requests() -> None:
    """A waiting subscription blocked all later requests, because the window counted from the oldest request."""
    connection, shard = recording(window=2)
    shard.release = lambda request: None
    link, _ = connection.link()
    link.send(Ask("worker 0", 0, "waits"))
    for index in range(1, 50):
        assert connection.ask(link, Ask("worker 0", index, "answered")) == index


def test_the_shard_forgets_replies_of_a_client_that_makes_no_more_calls() -> None:
    """Rows of many MB stayed on the shard until their worker made its next call."""
    connection, _ = recording()
    link, _ = connection.link()
    connection.ask(link, Ask("worker 0", 0, "answered"))
    connection.pass_s(1.0)
    assert connection.sessions.kept == 0
    connection.pass_s(20.0)
    assert connection.time.next_timer_s is None


def test_subscriptions_leave_room_for_other_calls() -> None:
    """Subscriptions took all places of the window, and an add of the same client was never sent."""
    connection, _ = with_matrix(ASP(), window=4)
    link, _ = connection.link()
    for number in range(2):
        first: Changes = connection.ask(link, NextChanges("w", 0, subscription=number))
        link.send(NextChanges("w", 0, subscription=number, after=first.number))
    with pytest.raises(ParameterServerError, match=r"shard 0: expected at most 2 subscriptions .*, given one more"):
        connection.ask(link, NextChanges("w", 0, subscription=2))
    connection.ask(link, add_ones())
    assert isinstance(connection.ask(link, NextChanges("w", 0, subscription=2)), Changes)
