"""The shard's memory of one client: any order of arrivals, any bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamiter.parameter_server.transport.messages import Received, Standing
from streamiter.parameter_server.transport.server_session import ServerSession


@given(
    arrivals=st.lists(st.integers(1, 12), max_size=60),
    window=st.integers(1, 12),
    reorder=st.integers(1, 12),
    settled_at_once=st.sets(st.integers(1, 12)),
)
def test_any_arrivals_are_given_out_once_in_order_within_the_bounds(
    arrivals: list[int], window: int, reorder: int, settled_at_once: set[int]
) -> None:
    """Numbers that come twice, early, or above the bounds must change nothing but what they may."""
    session = ServerSession(window=window, reorder=reorder)
    given_out: list[int] = []
    for number in arrivals:
        if session.take(number, f"request {number}"):
            assert session.outcome(number) is Standing.RECEIVED
        while (following := session.next_request()) is not None:
            assert following == (len(given_out) + 1, f"request {len(given_out) + 1}")
            given_out.append(following[0])
            if following[0] in settled_at_once:
                session.settle(following[0], f"reply {following[0]}")
        assert session.kept <= window
        assert session.early <= reorder
    for number in range(1, 13):
        outcome = session.outcome(number)
        if number in given_out:
            assert outcome == (f"reply {number}" if number in settled_at_once else Standing.RECEIVED)
        assert not session.is_over(number)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.data())
def test_replies_are_kept_until_the_client_has_them_and_no_longer(
    has_it: list[bool], data: st.DataObject
) -> None:
    """Forgotten too early, a lost reply is lost for good; too late, memory fills."""
    session = ServerSession(window=len(has_it), reorder=1)
    for number in range(1, len(has_it) + 1):
        session.take(number, None)
        session.next_request()
        session.settle(number, f"reply {number}")
    below = data.draw(st.integers(1, len(has_it) + 1))
    missing = tuple(number for number in range(1, below) if not has_it[number - 1])
    session.forget(Received(below, missing))
    for number in range(1, len(has_it) + 1):
        is_kept = number >= below or number in missing
        assert session.is_over(number) is not is_kept
        assert (session.outcome(number) == f"reply {number}") is is_kept


def test_what_has_its_turn_finds_room_where_later_requests_fill_the_rest() -> None:
    """The session would stand still: what came early waits for a request for which it leaves no room."""
    session = ServerSession(window=3, reorder=3)
    assert [session.take(number, None) for number in (2, 3, 4, 1)] == [True, True, False, True]
