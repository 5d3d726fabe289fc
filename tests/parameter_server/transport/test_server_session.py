"""The shard's memory of one client: any order of arrivals, any bounds."""

from __future__ import annotations

from random import Random

from support.examples import random_examples

from streamiter.parameter_server.transport.sessions import Received, RequestState, ServerSession

Arrivals = tuple[list[int], int, int, set[int]]


def arrivals_and_bounds(random: Random) -> Arrivals:
    """Numbers that arrive, the bounds, and the numbers that are settled at once."""
    arrivals = [random.randint(1, 12) for _ in range(random.randrange(61))]
    return (
        arrivals,
        random.randint(1, 12),
        random.randint(1, 12),
        set(random.sample(range(1, 13), random.randrange(13))),
    )


@random_examples(arrivals_and_bounds)
def test_any_arrivals_are_given_out_once_in_order_within_the_bounds(example: Arrivals) -> None:
    """Numbers that come twice, early, or above the bounds must change nothing but what they may."""
    arrivals, window, reorder, settled_at_once = example
    session = ServerSession(window=window, reorder=reorder)
    given_out: list[int] = []
    for number in arrivals:
        if session.take(number, f"request {number}"):
            assert session.outcome(number) is RequestState.RECEIVED
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
            assert outcome == (f"reply {number}" if number in settled_at_once else RequestState.RECEIVED)
        assert not session.is_over(number)


def received(random: Random) -> tuple[list[bool], int]:
    """Which replies have come to the client, and the number below which it tells of them."""
    has_it = [random.random() < 0.5 for _ in range(random.randint(1, 20))]
    return has_it, random.randint(1, len(has_it) + 1)


@random_examples(received)
def test_replies_are_kept_until_the_client_has_them_and_no_longer(example: tuple[list[bool], int]) -> None:
    """Forgotten too early, a lost reply is lost for good; too late, memory fills."""
    has_it, below = example
    session = ServerSession(window=len(has_it), reorder=1)
    for number in range(1, len(has_it) + 1):
        session.take(number, None)
        session.next_request()
        session.settle(number, f"reply {number}")
    missing = tuple(number for number in range(1, below) if not has_it[number - 1])
    session.forget(Received(below, missing))
    for number in range(1, len(has_it) + 1):
        is_kept = number >= below or number in missing
        assert session.is_over(number) is not is_kept
        assert (session.outcome(number) == f"reply {number}") is is_kept


def test_of_a_request_that_never_came_nothing_is_known() -> None:
    """Taken for one that is under way, it would be waited for without end instead of being sent again."""
    session = ServerSession(window=3, reorder=3)
    session.take(2, None)
    assert [session.outcome(number) for number in (1, 2, 3)] == [
        RequestState.UNKNOWN,
        RequestState.RECEIVED,
        RequestState.UNKNOWN,
    ]


def test_what_has_its_turn_finds_room_where_later_requests_fill_the_rest() -> None:
    """The session would stand still: what came early waits for a request for which it leaves no room."""
    session = ServerSession(window=3, reorder=3)
    assert [session.take(number, None) for number in (2, 3, 4, 1)] == [True, True, False, True]
