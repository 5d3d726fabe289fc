"""A carrier whose calls return their answers, as those of an actor do."""

from __future__ import annotations

import asyncio
import random

from parameter_server.transport.recording_shard import Ask, RecordingShard

from streamiter.parameter_server.transport.sessions import (
    ClientMessage,
    Received,
    SessionId,
    ShardSessions,
)
from streamiter.testing.simulation.simulated_time import SimulatedTime


async def test_calls_that_return_their_answer_may_overtake_each_other() -> None:
    """Methods of an actor interleave: one that came too early has to wait for the one before it."""
    time = SimulatedTime()
    shard = RecordingShard(time, random.Random(0))
    sessions = ShardSessions(shard)
    calls = [
        asyncio.create_task(
            sessions.answer(
                ClientMessage(
                    SessionId("worker 0"), number, Received(4, (1, 2, 3)), Ask("worker 0", number, "answered")
                )
            )
        )
        for number in (3, 2, 1)
    ]
    answers = await asyncio.wait_for(asyncio.gather(*calls), 10)
    assert [answer.outcome for answer in answers if answer is not None] == [2, 1, 0]
    assert shard.handled == {"worker 0": [1, 2, 3]}


async def test_calls_that_wait_for_an_answer_return_when_the_shard_goes_back() -> None:
    """The actor's calls of before the rollback would stay open for ever."""
    time = SimulatedTime()
    sessions = ShardSessions(RecordingShard(time, random.Random(0)))
    ask = Ask("worker 0", 0, "waits")
    call = asyncio.create_task(
        sessions.answer(ClientMessage(SessionId("worker 0"), 1, Received(2, (1,)), ask))
    )
    await asyncio.sleep(0)
    assert not call.done()
    sessions.restart(1)
    assert await asyncio.wait_for(call, 10) is None
