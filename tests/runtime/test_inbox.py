"""The inbox: turns, joined batches, wake-ups, the room of records set aside; all else is in ``inbox_scripts.txt``."""

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest
from operators.operator_harness import stored
from runtime.inbox_run import InboxRun, array, barrier, data, held_records
from runtime.inbox_script import OPTIONS
from support.examples import random_examples

from streamiter.engine.graph.channels import Channel
from streamiter.engine.inbox.alignment import BarrierAlignment
from streamiter.engine.inbox.inbox import Inbox, Posted, nothing
from streamiter.engine.inbox.order import ARRIVAL, BEFORE_ALL_EPOCHS
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import AwaitedInput, PortProgress
from streamiter.errors import InternalError
from streamiter.operators.frontier import Frontier
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    CheckpointBarrier,
    Columns,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    ReadToEnd,
)


def test_a_flood_on_one_channel_does_not_starve_another() -> None:
    """While one partition caught up on a week of backlog, the others were not read."""
    run = InboxRun(["input", "input"])
    # Batches of alternating kinds cannot be joined, so that the flood stays a hundred batches.
    for number in range(100):
        run.put_all(0, data(number) if number % 2 else array(number))
    run.put_all(1, data(1000))
    run.put_all(1, array(1001))
    run.run()
    assert run.records()[:4] == [0, 1000, 1, 1001]
    assert len(run.records()) == 102


def test_a_channel_that_never_runs_empty_leaves_others_their_turns() -> None:
    """The first channel was filled as fast as it was read, and the inbox read no other channel."""
    run = InboxRun(["input", "input", "input"])
    run.put_all(0, data(0))
    run.put_all(1, data(1000))
    run.put_all(2, data(2000))
    for number in range(1, 10):
        run.step()
        run.put_all(0, data(number))
    assert {1000, 2000} <= set(run.records()[:5])


async def test_the_gate_wakes_when_a_channel_gets_an_item_or_a_notice_is_posted() -> None:
    """A task slept although it had input: a silent stall."""
    run = InboxRun(["input"])
    for wake in (
        lambda: run.put_all(0, data(1)),
        lambda: run.put_all(0, EpochWatermark(0)),
        lambda: run.inbox.post(nothing),
    ):
        run.run()
        waiting = asyncio.ensure_future(run.inbox.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        wake()
        await waiting


def test_items_in_a_channel_from_before_the_gate_are_read() -> None:
    """A task upstream put records before the task that reads them existed, and the inbox did not see them."""
    channel = Channel("a → b")
    channel.try_put(data(1))
    inbox = Inbox([Port(0, "input", channel)])
    polled = inbox.poll()
    assert polled is not None
    assert isinstance(polled[1], DataBatch)
    assert polled[1].records == [1]


def test_batches_of_different_kinds_stay_apart() -> None:
    """A list joined with an array changed the type of its records."""
    run = InboxRun(["input"])
    columns = DataBatch(Columns({"x": [1]}))
    run.put_all(0, data(0), data(1), array(2), array(3), DataBatch(np.array([4.5])))
    run.run()
    assert [len(batch.records) for batch in run.batches] == [2, 2, 1]
    assert run.batches[1].records.dtype == np.int64  # type: ignore[union-attr]
    run.put_all(0, columns, columns)
    run.inbox.poll()


def test_a_joined_batch_is_bounded() -> None:
    """A backlog became one batch that took minutes."""
    run = InboxRun(["input"], limit_records=100_000)
    for _ in range(10):
        run.put_all(0, DataBatch(list(range(3000))))
    run.run()
    assert [len(batch.records) for batch in run.batches] == [6000] * 5


def test_a_control_record_that_is_posted_is_refused_on_a_channel() -> None:
    """A control record that only the engine posts was accepted on a channel, which hid a bug in the engine."""
    run = InboxRun(["a"])
    with pytest.raises(TypeError, match="expected a control record of a channel"):
        run.inbox.accept(run.inbox.ports[0], Posted(nothing))


Steps = list[tuple[int, int | None]]


def some_steps(random: Random) -> Steps:
    """Return steps: a channel and the growth of its watermark, or None if the channel ends."""
    growths = (1, 1, 2, 3, None) if random.random() < 0.5 else (1, 1, 1, 1, 1, 1, 2, 3, 3, None)
    return [(random.randrange(4), random.choice(growths)) for _ in range(random.randrange(41))]


@random_examples(some_steps)
def test_the_watermark_is_the_least_of_the_unfinished_channels_and_never_decreases(steps: Steps) -> None:
    """A watermark that was too early gave wrong results, or one that was too late stopped the loop."""
    frontier = Frontier(range(4), BEFORE_ALL_EPOCHS)
    watermarks: dict[int, int] = dict.fromkeys(range(4), BEFORE_ALL_EPOCHS)
    expected = highest = BEFORE_ALL_EPOCHS
    for channel, growth in steps:
        if channel not in watermarks:
            continue
        if growth is None:
            del watermarks[channel]
            frontier.end(channel)
        else:
            watermarks[channel] += growth
            frontier.reach(channel, watermarks[channel])
        highest = max([highest, *watermarks.values()])
        least = min(watermarks.values(), default=highest)
        assert frontier.settle() is (least > expected)
        expected = max(expected, least)
        assert frontier.value == expected
        assert frontier.all_ended == (not watermarks)
        assert frontier.slowest == min(watermarks, key=watermarks.__getitem__, default=None)


def test_a_task_without_channels_is_restored() -> None:
    """The restore of a source failed, because a task without channels has no greatest watermark."""
    source, restored = InboxRun([]), InboxRun([])
    restored.inbox.restore(source.inbox.snapshot(), PlainData())
    assert restored.inbox.poll() is None


def test_records_set_aside_are_in_the_snapshot_and_come_once_after_a_restore() -> None:
    """Records set aside on disk were missing in the snapshot."""
    run = InboxRun(["a", "b"], in_order=True)
    ahead = [data(*range(100 * epoch, 100 * epoch + 50), epoch=epoch) for epoch in (3, 2, 4)]
    run.put_all(0, *ahead, EpochWatermark(4), CheckpointBarrier(1))
    run.put_all(1, EpochWatermark(0), CheckpointBarrier(1))
    run.run()
    assert run.records() == []

    restored = InboxRun(["a", "b"], in_order=True, restored=run.snapshots[1])
    restored.put_all(1, EpochWatermark(4))
    restored.run()
    assert restored.records() == [*range(200, 250), *range(300, 350), *range(400, 450)]
    assert [word for word in restored.told() if word.startswith("watermark")] == [
        f"watermark {epoch}" for epoch in (1, 2, 3, 4)
    ]


ORDERS: dict[str, dict[str, Any]] = {
    "arrival": {},
    **{name: OPTIONS[name] for name in ("by epoch", "by epoch and port")},
}


@pytest.mark.parametrize(("before", "after"), [(before, after) for before in ORDERS for after in ORDERS])
def test_the_state_of_an_inbox_restores_one_with_another_order(before: str, after: str) -> None:
    """A loop that became synchronous could not read its records again, or only with watermarks made anew."""
    run = InboxRun(["a", "b"], **ORDERS[before], wants=lambda _: ("b",))
    run.put_all(1, CheckpointBarrier(1))
    waiting = [data(5, epoch=1), EpochWatermark(1), data(6, epoch=2), EpochWatermark(2), EndOfData(2)]
    run.put_all(0, EpochWatermark(0), *waiting, CheckpointBarrier(1))
    run.run()
    assert (run.records(), run.told()[-1]) == ([], "barrier 1")
    again = InboxRun(["a", "b"], **ORDERS[after], restored=run.snapshots[1])
    again.put_all(0, EndOfInput(2))
    again.put_all(1, EpochWatermark(0), data(10, epoch=1), EpochWatermark(2), EndOfData(2), EndOfInput(2))
    again.run()
    assert sorted(again.records()) == [5, 6, 10]
    assert again.told()[-1] == "end"
    if after != "arrival":
        assert again.told().index("watermark 1") < again.told().index("6")


def test_the_first_channels_of_an_unread_table_are_named() -> None:
    """A log line named the thousand channels of a table."""
    ports = [Port(number, "table", Channel(f"table {number}")) for number in range(5)]
    progress = PortProgress(
        ports, [], order=ARRIVAL, on_due=print, on_data_ended=lambda: None, awaited=AwaitedInput("table")
    )
    alone = PortProgress(
        ports[:1], [], order=ARRIVAL, on_due=print, on_data_ended=lambda: None, awaited=AwaitedInput("table")
    )
    found = "its input 'table' must first be read to its end: table "
    assert alone.unread_table() == f"{found}0"
    assert progress.unread_table() == f"{found}0, table 1, table 2 and 2 more"
    for port in ports[:2]:
        progress.bring(port, ReadToEnd())
    assert progress.unread_table() == f"{found}2, table 3, table 4"
    for port in ports[2:4]:
        progress.bring(port, ReadToEnd())
    assert progress.unread_table() == f"{found}4"


def test_many_checkpoints_set_aside_no_more_than_two_channels_hold() -> None:
    """A learner was slower than its topic, and each barrier moved the content of its channel into the snapshot."""
    run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
    sizes = []
    for checkpoint in range(1, 30):
        while run.put(1, data(checkpoint)):
            pass
        run.put_all(0, barrier(checkpoint))
        run.put_all(1, barrier(checkpoint))
        run.run()
        sizes.append(len(held_records(run.snapshots[checkpoint], in_order=False)))
    assert max(sizes) <= 2 * 4, sizes


def full_of_records_set_aside() -> InboxRun:
    run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
    run.put_all(1, data(10, 11, 12, 13), barrier())
    run.put_all(0, barrier())
    run.run()
    return run


def test_records_take_room_until_they_are_handled() -> None:
    """A slow step took all held records at once, seemed to hold none, and received as many again."""
    run = full_of_records_set_aside()
    run.inbox.want(None)
    polled = run.inbox.poll()
    assert polled is not None
    assert not run.put(1, data(14))
    run.inbox.poll()
    assert run.put(1, data(14))


async def test_a_waiting_producer_continues_when_records_are_handled() -> None:
    """A producer waited forever for a read from a channel that was already empty."""
    run = full_of_records_set_aside()
    waiting = asyncio.create_task(run.channels[1].wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    run.wants = None
    run.inbox.want(None)
    run.run()
    await waiting


async def test_a_waiting_producer_continues_when_a_barrier_is_expected() -> None:
    """The channel was empty, but full of records set aside, and the barrier was behind a batch without room."""
    run = full_of_records_set_aside()
    waiting = asyncio.create_task(run.channels[1].wait_for_room())
    await asyncio.sleep(0)
    run.inbox.expect_barrier(barrier(2))
    run.run()
    await waiting
    run.put_all(1, data(14), barrier(2))
    run.put_all(0, barrier(2))
    run.run()
    assert held_records(run.snapshots[2], in_order=False) == [10, 11, 12, 13, 14]


def test_a_barrier_on_a_channel_that_waits_for_others_is_an_internal_error() -> None:
    """A channel brought the same barrier twice, which hid an error of the task before it."""
    run = InboxRun(["a", "b"])
    alignment, port = BarrierAlignment(run.inbox.ports), run.inbox.ports[1]
    assert alignment.bring(port, barrier())
    with pytest.raises(InternalError, match=r"1 → step: expected a barrier .* given one on a channel that is blocked$"):
        alignment.bring(port, barrier())


def test_a_snapshot_is_plain_data() -> None:
    """A value in the snapshot could not be encoded, and the first checkpoint in production failed."""
    run = InboxRun(["a", "b"], in_order=True, wants=lambda _: ("a",))
    run.put_all(0, EpochWatermark(0), data(5, epoch=5), barrier())
    run.put_all(1, EpochWatermark(0), array(10, 11, epoch=1), EpochWatermark(1), EndOfData(), EndOfInput(2))
    run.run()
    kept = stored(run.snapshots[1])
    assert sorted(held_records(kept(), in_order=True)) == [5, 10, 11]
    restored = InboxRun(["a", "b"], in_order=True, restored=kept())
    restored.put_all(0, EpochWatermark(1))
    restored.run()
    assert isinstance(restored.batches[0].records, np.ndarray), "as it came"
