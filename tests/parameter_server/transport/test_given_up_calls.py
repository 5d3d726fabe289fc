"""Cancelled calls to a shard in another process: gets are removed from the shard, all other calls are done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from parameter_server.transport.connection import add_ones, recording, whole_row, with_matrix
from parameter_server.transport.recording_shard import Ask

from streamiter.parameter_server import BSP, SSP
from streamiter.parameter_server.requests import AbandonBarrier, ClockRequest, PassBarrier


def test_a_cancelled_get_is_taken_from_the_shard() -> None:
    """Calls with a time limit left gets on the shard, more with every try."""
    connection, shard = with_matrix(BSP(), workers=2)
    link, _ = connection.link()
    connection.ask(link, ClockRequest("w", 0))
    waiting = link.send(whole_row())
    connection.pass_s(1.0)
    assert shard.statistics().matrices[0].waiting == 1
    waiting.give_up()
    connection.pass_s(1.0)
    assert shard.statistics().matrices[0].waiting == 0
    assert link.unanswered == 0


def test_a_get_that_is_cancelled_before_it_is_sent_is_not_sent() -> None:
    """Calls with a time limit piled up on a link whose shard did not answer."""
    connection, shard = with_matrix(BSP(), workers=2, window=1)
    link, _ = connection.link()
    connection.ask(link, ClockRequest("w", 0))
    first = link.send(whole_row())
    for _ in range(10):
        link.send(whole_row()).give_up()
    assert link.queued == 0
    shard.handle(ClockRequest("w", 1))
    connection.pass_s(1.0)
    assert first.result().clock == 1
    assert shard.statistics().matrices[0].gets == 1


def test_a_cancelled_clock_is_counted() -> None:
    """A worker was at different clocks on different shards forever."""
    connection, shard = with_matrix(BSP(), window=1)
    link, _ = connection.link()
    link.send(ClockRequest("w", 0)).give_up()
    connection.pass_s(1.0)
    parked = link.send(add_ones())
    link.send(ClockRequest("w", 0)).give_up()
    connection.pass_s(1.0)
    assert parked.is_settled
    assert shard.statistics().matrices[0].minimum_clock == 2


def test_a_get_that_is_cancelled_while_the_connection_is_lost_is_taken_from_the_shard() -> None:
    """A message was lost, and the cancelled get stayed on the shard until its clock came, or forever."""
    connection, shard = with_matrix(BSP(), workers=2)
    link, carrier = connection.link()
    connection.ask(link, ClockRequest("w", 0))
    waiting = link.send(whole_row())
    connection.pass_s(5.0)
    carrier.partitioned = True
    waiting.give_up()
    carrier.partitioned = False
    connection.pass_s(20.0)
    assert shard.statistics().matrices[0].waiting == 0


def test_cancelling_a_call_from_before_a_rollback_cancels_no_later_call() -> None:
    """Numbers restart after a rollback, and a worker that cancelled an old call cancelled a new one."""
    connection, shard = recording()
    link, _ = connection.link()
    old = [link.send(Ask("old", index, "waits")) for index in range(2)]
    connection.pass_s(0.5)
    connection.sessions.restart(1)
    new: list[Any] = []

    def clean_up() -> None:
        new.extend(link.send(Ask("new", index, "waits")) for index in range(2))
        old[1].give_up()

    old[0].when_settled(clean_up)
    link.replaced(1, {})
    connection.pass_s(60.0)
    assert [ask.client for ask in shard.given_up] == ["old", "old"]
    assert all(reply.is_settled for reply in new)


def test_an_add_that_is_held_for_a_checkpoint_is_done_even_if_it_is_cancelled() -> None:
    """A call of a cancelled task or a replaced client was lost, although the shard had accepted it."""
    connection, shard = with_matrix(SSP(staleness=1), workers=2)
    link, _ = connection.link()
    connection.ask(link, PassBarrier(0, 1))
    held = link.send(add_ones())
    connection.pass_s(5.0)
    held.give_up()
    connection.pass_s(5.0)
    connection.ask(connection.link(incarnation=1)[0], AbandonBarrier(1))
    assert shard.matrices["w"].blocks[0].get(0, None).tolist() == [1.0, 1.0, 1.0, 1.0]


async def test_a_cancelled_call_ends_at_once() -> None:
    """A task could not be cancelled while its shard did not answer."""
    connection, _ = recording()
    link, carrier = connection.link()
    carrier.partitioned = True
    waiting = link.send(Ask("worker 0", 0, "answered"))

    async def call() -> Any:
        return await waiting

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiting.is_settled
