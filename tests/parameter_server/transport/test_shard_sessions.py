"""The replies of a shard's sessions to calls that arrive early, repeatedly, or from before a rollback."""

from __future__ import annotations

import random
from random import Random
from typing import Any

from parameter_server.transport.recording_shard import Ask, RecordingShard
from support.examples import random_examples

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import ClientMessage, GiveUp, SessionId
from streamiter.parameter_server.transport import ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

SESSION = SessionId("worker 0")


def some_arrivals(random: Random) -> tuple[list[int], int]:
    """Return request numbers in random order, some of them repeated, and the number of requests."""
    count = random.randint(1, 12)
    numbers = [random.randint(1, count) for _ in range(random.randrange(40))] + list(range(1, count + 1))
    random.shuffle(numbers)
    return numbers, count


@random_examples(some_arrivals)
def test_any_arrivals_are_handled_once_in_order_and_repetitions_get_the_same_outcome(
    given: tuple[list[int], int],
) -> None:
    """Calls of an actor interleave, or repeat after a lost connection, and were handled twice or out of order."""
    numbers, count = given
    shard = RecordingShard(SimulatedTime(), random.Random(0))
    sessions = ShardSessions(shard)
    outcomes: list[tuple[int, Any]] = [
        (number, sessions.receive(ClientMessage(SESSION, number, (), Ask("worker 0", number, "answered"))))
        for number in numbers
    ]
    assert shard.handled == {"worker 0": list(range(1, count + 1))}
    for number, outcome in outcomes:
        assert (outcome.result() if isinstance(outcome, WaitingReply) else outcome) == number - 1
    assert sessions.kept == count


def test_an_outcome_is_kept_until_the_client_has_it_and_no_longer() -> None:
    """An outcome was forgotten before its lost reply was sent again, or was kept forever and filled the memory."""
    shard = RecordingShard(SimulatedTime(), random.Random(0))
    sessions = ShardSessions(shard)
    first = ClientMessage(SESSION, 1, (), Ask("worker 0", 1, "answered"))
    assert sessions.receive(first) == sessions.receive(first) == 0
    assert sessions.receive(ClientMessage(SESSION, 2, (1,), Ask("worker 0", 2, "answered"))) == 1
    assert sessions.kept == 1
    assert sessions.receive(first) is None  # a late repetition
    assert shard.handled == {"worker 0": [1, 2]}


def test_calls_that_wait_for_an_outcome_return_when_the_shard_is_rolled_back() -> None:
    """Calls of an actor from before the rollback stayed open forever."""
    sessions = ShardSessions(RecordingShard(SimulatedTime(), random.Random(0)))
    outcome = sessions.receive(ClientMessage(SESSION, 1, (), Ask("worker 0", 0, "waits")))
    early = sessions.receive(ClientMessage(SESSION, 3, (), Ask("worker 0", 2, "answered")))
    assert not outcome.is_settled
    sessions.restart(1)
    assert outcome.result() is None
    assert early.result() is None


def test_calls_of_a_client_that_was_replaced_are_refused() -> None:
    """A reply of None let the old client continue as if its adds had been applied."""
    sessions = ShardSessions(RecordingShard(SimulatedTime(), random.Random(0)))
    waiting = sessions.receive(ClientMessage(SESSION, 1, (), Ask("worker 0", 0, "waits")))
    newer = SESSION._replace(incarnation=SESSION.incarnation + 1)
    assert sessions.receive(ClientMessage(newer, 1, (), Ask("worker 0", 1, "answered"))) == 1
    assert isinstance(waiting, WaitingReply)
    assert "use the newest client" in str(waiting.result())


def test_an_answered_request_is_not_cancelled_any_more() -> None:
    """A cancellation arrived after the reply had been sent, and the shard cancelled a finished request."""
    shard = RecordingShard(SimulatedTime(), random.Random(0))
    sessions = ShardSessions(shard)
    asked = Ask("worker 0", 0, "waits")
    waiting = sessions.receive(ClientMessage(SESSION, 1, (), asked))
    shard.release(asked)
    assert isinstance(waiting, WaitingReply)
    assert waiting.result() == 0
    assert sessions.receive(ClientMessage(SESSION, 2, (), GiveUp(1))) is None
    sessions.restart(1)
    assert shard.given_up == []
