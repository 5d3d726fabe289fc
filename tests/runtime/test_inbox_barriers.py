"""The inbox and checkpoint barriers: alignment, held records, snapshot and restore, the feedback log."""

from __future__ import annotations

import asyncio
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints.deferred_support import unnamed_files
from operators.operator_harness import stored
from runtime.inbox_run import InboxRun, array, data, held_records, spill_queue

from streamiter.engine.graph.channels import Channel
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.alignment import BarrierAlignment, BarrierReturned
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.snapshot import SnapshotPart
from streamiter.engine.tasks.task_barriers import TaskBarriers, TaskState
from streamiter.errors import InternalError
from streamiter.operators.operator import Boundary
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, Control, DataBatch, EndOfData, EndOfInput, EpochWatermark, Idle


def barrier(checkpoint: int = 1) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint)


class TestAlignment:
    def test_a_channel_that_has_brought_the_barrier_waits_for_the_others(self) -> None:
        """A record from after the barrier was in the snapshot, and counted twice after a restore."""
        run = InboxRun(["input", "input"])
        run.put_all(0, data(1), barrier(), data(2))
        run.run()
        assert run.told() == ["1"]
        run.put_all(1, data(10))
        run.run()
        run.put_all(1, barrier(), data(20))
        run.run()
        assert run.told()[:3] == ["1", "10", "barrier 1"]
        assert sorted(run.told()[3:]) == ["2", "20"]

    def test_the_end_of_a_channel_counts_as_its_barrier(self) -> None:
        """A partition that ended during a checkpoint failed it, or blocked it forever."""
        run = InboxRun(["input", "input"])
        run.put_all(0, barrier(), data(2))
        run.put_all(1, data(10), EndOfInput())
        run.run()
        assert run.told() == ["10", "barrier 1", "2"]

    def test_a_channel_that_had_ended_brings_none(self) -> None:
        """Checkpoints stopped after a bounded input had ended, although an endless input continued."""
        run = InboxRun(["a", "b"])
        run.put_all(1, EndOfInput())
        run.run()
        for checkpoint in (1, 2):
            run.put_all(0, data(checkpoint), barrier(checkpoint))
        run.run()
        assert run.told() == ["b ended", "1", "barrier 1", "2", "barrier 2"]

    def test_a_barrier_behind_the_end_of_its_channel_is_an_internal_error(self) -> None:
        """A barrier after the end of an input, which a channel must not have, blocked the ended channel."""
        run = InboxRun(["a", "b"])
        run.put_all(0, EndOfInput(), barrier())
        with pytest.raises(InternalError, match=r"on an open channel only, given one on a channel that is ended$"):
            run.run()
        alignment, port = BarrierAlignment(run.inbox.ports), run.inbox.ports[1]
        assert alignment.bring(port, barrier())
        with pytest.raises(
            InternalError, match=r"1 → step: expected a barrier .* given one on a channel that is blocked$"
        ):
            alignment.bring(port, barrier())

    def test_the_channels_that_delay_a_barrier_have_names(self) -> None:
        """The message of an abandoned checkpoint named a channel that had ended, or had brought the barrier."""
        run = InboxRun(["a", "b", "c"])
        assert run.inbox.barriers.awaited() == []
        run.put_all(0, barrier())
        run.put_all(2, EndOfInput())
        run.run()
        assert run.inbox.barriers.awaited() == ["1 → step"]
        run.put_all(1, barrier())
        run.run()
        assert run.inbox.barriers.awaited() == []

    def test_a_barrier_that_channels_bring_does_not_start_at_their_end(self) -> None:
        """A task whose inputs ended gave its state twice: at the barrier that it had made up, and at its end."""
        run = InboxRun(["a"])
        assert run.inbox.expect_barrier(barrier()) == []
        assert run.inbox.barriers.is_due
        run.put_all(0, EndOfInput())
        run.run()
        assert run.told() == ["a ended", "end"]

    def test_a_barrier_that_has_passed_is_not_expected_any_more(self) -> None:
        """A channel from another process brought the barrier before the job told of it, and the inbox waited again."""
        run = InboxRun(["a"])
        run.put_all(0, barrier())
        run.run()
        run.inbox.expect_barrier(barrier())
        assert not run.inbox.barriers.is_due
        run.put_all(0, EndOfInput())
        run.run()
        assert len(run.inbox.expect_barrier(barrier(2), starts_here=True)) == 1
        assert run.inbox.expect_barrier(barrier(2), starts_here=True) == []

    def test_barriers_of_several_checkpoints_pass_in_order(self) -> None:
        """The second barrier arrived before all channels had the first, and passed before it."""
        run = InboxRun(["input", "input"])
        run.put_all(0, barrier(1), data(1), barrier(2), data(2))
        run.put_all(1, data(10), barrier(1), data(20), barrier(2))
        run.run()
        told = run.told()
        assert (told[0], told[1], sorted(told[2:4]), told[4:]) == ("10", "barrier 1", ["1", "20"], ["barrier 2", "2"])


class TestUnwantedInputs:
    def test_the_deadlock_of_a_barrier_behind_data_that_is_not_wanted(self) -> None:
        """A worker waited for its model, whose channel the barrier blocked, and the other barrier was behind unread
        data.
        """
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(1, data(10, 11), barrier(), data(12))
        run.put_all(0, barrier(), data(1))
        run.run()
        assert run.told() == ["barrier 1", "1"]
        assert held_records(run.snapshots[1], in_order=False) == [10, 11]
        run.inbox.want(None)
        run.wants = None
        run.run()
        assert run.records() == [1, 10, 11, 12]

    def test_a_barrier_that_starts_here_does_not_wait_for_an_end_after_unwanted_data(self) -> None:
        """An entrance held data for an epoch that could not complete, because the loop waited for the barrier."""
        run = InboxRun(["data"], wants=lambda _: ())
        run.put_all(0, data(10, 11), EndOfInput())
        assert run.inbox.expect_barrier(barrier(1), starts_here=True) == []
        run.run()
        assert run.told() == ["barrier 1"]
        assert held_records(run.snapshots[1], in_order=False) == [10, 11]
        [again] = run.inbox.expect_barrier(barrier(2), starts_here=True)
        assert isinstance(again, CheckpointBarrier)
        run.wants = None
        run.inbox.want(None)
        run.run()
        assert run.told() == ["barrier 1", "10", "11", "data ended", "end"]

    def test_data_that_arrives_during_the_alignment_is_held_too(self) -> None:
        """The inbox stopped making room, so the producer waited with a full channel and never sent its barrier."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=2)
        run.put_all(0, barrier(), data(1))
        for number in range(10, 20, 2):
            run.put_all(1, data(number, number + 1))
            run.run()
        assert run.told() == []
        run.put_all(1, barrier())
        run.run()
        assert run.told() == ["barrier 1", "1"]
        assert held_records(run.snapshots[1], in_order=False) == list(range(10, 20))

    def test_records_behind_the_barrier_never_come_before_it(self) -> None:
        """The alignment completed while the inbox visited its ports; records of the next port passed the barrier."""
        run = InboxRun(["model", "data", "model"], wants=lambda _: ("model",))
        run.put_all(0, barrier(), data(1))
        run.run()
        run.put_all(1, data(10), barrier(), data(11))
        run.put_all(2, barrier(), data(2))
        run.run()
        assert run.told()[0] == "barrier 1"

    def test_an_unwanted_input_that_ends_without_a_barrier_does_not_block_the_barrier(self) -> None:
        """The inbox held the data and the end of the input, and waited forever for a barrier that could not come."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(0, barrier(), data(1))
        run.put_all(1, data(10), EndOfInput())
        run.run()
        assert run.told() == ["barrier 1", "1"]
        run.put_all(0, EndOfInput())
        run.run()
        assert run.told()[2:] == ["model ended", "10", "data ended", "end"]

    def test_the_end_that_was_held_is_in_the_snapshot(self) -> None:
        """The task before the inbox had ended, so it sent no end after a restore, and the job never ended."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(0, barrier())
        run.put_all(1, data(10), EndOfInput(3))
        run.run()
        restored = InboxRun(["model", "data"], restored=run.snapshots[1])
        restored.put_all(0, EndOfInput(3))
        restored.run()
        assert restored.records() == [10]
        end = restored.trace[-1]
        assert isinstance(end, EndOfInput)
        assert end.epoch == 3

    def test_an_end_that_was_held_and_restored_brings_no_barrier_either(self) -> None:
        """The next checkpoint after a restore waited for the channel of a task that had ended."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(0, barrier())
        run.put_all(1, data(10), EndOfInput())
        run.run()
        restored = InboxRun(["model", "data"], restored=run.snapshots[1], wants=lambda _: ("model",))
        restored.put_all(0, barrier(2))
        restored.run()
        assert restored.told() == ["barrier 2"]

    def test_control_at_the_front_of_an_unwanted_input_is_taken(self) -> None:
        """A watermark or barrier waited until its input was wanted, and delayed all other tasks."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(1, EpochWatermark(0), barrier())
        run.put_all(0, EpochWatermark(0), barrier())
        run.run()
        assert run.told() == ["watermark 0", "barrier 1"]

    def test_an_announced_barrier_passes_if_no_input_is_wanted(self) -> None:
        """Both barriers were behind data while the operator waited for a timer, and no barrier reached the inbox."""
        run = InboxRun(["a", "b"], wants=lambda _: ())
        run.put_all(0, data(1), barrier(), data(2))
        run.put_all(1, data(10), barrier())
        run.run()
        assert run.told() == []
        run.inbox.expect_barrier(barrier())
        run.run()
        assert run.told() == ["barrier 1"]
        assert sorted(held_records(run.snapshots[1], in_order=False)) == [1, 10]
        run.inbox.want(None)
        run.wants = None
        run.run()
        assert sorted(run.records()) == [1, 2, 10]


def test_data_that_is_not_admitted_stays_in_its_channel_and_lets_a_barrier_pass() -> None:
    """An entrance took a batch of an epoch too far ahead, and kept it where neither order nor limits applied."""
    run = InboxRun(["data"])
    run.inbox.admit_up_to(0)
    run.put_all(0, data(1), data(2, epoch=1), EpochWatermark(1))
    run.run()
    assert (run.told(), run.channels[0].records, run.inbox.is_ahead) == (["1"], 1, True)
    run.put_all(0, barrier())
    run.inbox.expect_barrier(barrier())
    run.run()
    assert (run.told(), held_records(run.snapshots[1], in_order=False)) == (["1", "barrier 1"], [2])
    run.inbox.admit_up_to(1)
    run.run()
    assert run.told() == ["1", "barrier 1", "2", "watermark 1"]


class TestRecordsSetAside:
    """Records set aside are in memory and in each snapshot, so they count toward the limit of their channel."""

    def test_many_checkpoints_set_aside_no_more_than_two_channels_hold(self) -> None:
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

    def test_records_put_back_take_the_room_of_their_channel(self) -> None:
        """The channel was filled again after each batch of which one record was wanted."""
        run = InboxRun(["a", "b"], wants=lambda run: ("a",) if not run.records() else ("b",), limit_records=4)
        run.put_all(0, data(1, 2, 3, 4))
        run.run()
        assert run.records() == [1]
        assert run.put(0, data(5))
        assert not run.put(0, data(6))

    def test_restored_records_take_the_room_of_their_channel(self) -> None:
        """A job that was restarted several times took the same amount of memory again each time."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
        run.put_all(1, data(10, 11, 12, 13), barrier())
        run.put_all(0, barrier())
        run.run()
        restored = InboxRun(["model", "data"], restored=run.snapshots[1], limit_records=4)
        assert not restored.put(1, data(14))
        restored.run()
        assert restored.records() == [10, 11, 12, 13]
        assert restored.put(1, data(14))

    def test_records_take_room_until_they_are_handled(self) -> None:
        """A slow step took all held records at once, seemed to hold none, and received as many again."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
        run.put_all(1, data(10, 11, 12, 13), barrier())
        run.put_all(0, barrier())
        run.run()
        run.inbox.want(None)
        polled = run.inbox.poll()
        assert polled is not None
        assert not run.put(1, data(14))
        run.inbox.poll()
        assert run.put(1, data(14))

    async def test_a_waiting_producer_continues_when_records_are_handled(self) -> None:
        """A producer waited forever for a read from a channel that was already empty."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
        run.put_all(1, data(10, 11, 12, 13), barrier())
        run.put_all(0, barrier())
        run.run()
        waiting = asyncio.create_task(run.channels[1].wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        run.wants = None
        run.inbox.want(None)
        run.run()
        await waiting

    async def test_a_waiting_producer_continues_when_a_barrier_is_announced(self) -> None:
        """The channel was empty, but full of records set aside, and the barrier was behind a batch without room."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",), limit_records=4)
        run.put_all(1, data(10, 11, 12, 13), barrier())
        run.put_all(0, barrier())
        run.run()
        waiting = asyncio.create_task(run.channels[1].wait_for_room())
        await asyncio.sleep(0)
        run.inbox.expect_barrier(barrier(2))
        run.run()
        await waiting
        run.put_all(1, data(14), barrier(2))
        run.put_all(0, barrier(2))
        run.run()
        assert held_records(run.snapshots[2], in_order=False) == [10, 11, 12, 13, 14]


class TestSnapshot:
    def test_a_restored_gate_continues_where_the_snapshot_was_taken(self) -> None:
        """A callback from before the snapshot was called again, or held records were lost."""
        run = InboxRun(["a", "b"], wants=lambda _: ("a",))
        run.put_all(0, EpochWatermark(0), data(1, epoch=1), barrier())
        run.put_all(1, EpochWatermark(0), array(10, 11, epoch=1), barrier())
        run.run()
        assert run.told() == ["watermark 0", "1", "barrier 1"]

        restored = InboxRun(["a", "b"], restored=run.snapshots[1])
        restored.put_all(0, EpochWatermark(1), EndOfInput())
        restored.put_all(1, EpochWatermark(1), EndOfInput())
        restored.run()
        assert restored.told()[:3] == ["10", "11", "watermark 1"]
        assert isinstance(restored.batches[0].records, np.ndarray)

    def test_inputs_that_had_ended_stay_ended(self) -> None:
        """The task before the inbox had ended and did not report again, so a restored inbox waited forever."""
        run = InboxRun(["a", "b"])
        run.put_all(0, EndOfInput())
        run.put_all(1, data(1), barrier())
        run.run()
        restored = InboxRun(["a", "b"], restored=run.snapshots[1])
        restored.put_all(1, EpochWatermark(0), barrier(2), EndOfInput())
        restored.run()
        assert restored.told() == ["watermark 0", "barrier 2", "b ended", "end"]

    def test_is_plain_data(self) -> None:
        """A value in the snapshot could not be encoded, and the first checkpoint in production failed."""
        run = InboxRun(["a", "b"], in_order=True, wants=lambda _: ("a",))
        run.put_all(0, EpochWatermark(0), data(5, epoch=5), barrier())
        run.put_all(1, EpochWatermark(0), data(10, epoch=1), EpochWatermark(1), EndOfData(), EndOfInput(2))
        run.run()
        kept = stored(run.snapshots[1])
        assert sorted(held_records(kept(), in_order=True)) == [5, 10]


class Looped:
    """An inbox with an initial input and a feedback channel, as at the head of a loop."""

    def __init__(self, *, on_disk: bool = False) -> None:
        """``on_disk``: the feedback channel keeps all but some small batches on disk."""
        self.initial = Channel("initial → head")
        in_memory = SpillQueue(
            name="head", directory=tempfile.gettempdir(), memory_limit_bytes=1 << 20, disk_limit_bytes=0
        )
        self.feedback = FeedbackChannel("tail → head", spill_queue() if on_disk else in_memory)
        ports = [Port(0, "initial", self.initial), Port(1, "feedback", self.feedback)]
        self.inbox = Inbox(ports, make_feedback_queue=spill_queue)
        self.events: list[Control] = []
        self.records: list[int] = []

    def run(self) -> None:
        while (polled := self.inbox.poll()) is not None:
            port, message = polled
            if isinstance(message, DataBatch):
                self.records += [int(record) for record in message.records]
            else:
                assert isinstance(message, Control)
                self.events += [message] if port is None else self.inbox.accept(port, message)

    def feed_back(self, *items: DataBatch | Control) -> None:
        for item in items:
            if isinstance(item, DataBatch):
                self.feedback.put(item)
            else:
                self.feedback.put_control(item)

    def close(self) -> None:
        self.inbox.close()
        self.feedback.close()

    def logged(self) -> Any:
        """Return the content of the log in a snapshot, encoded and decoded."""
        [returned] = [event for event in self.events if isinstance(event, BarrierReturned)]
        return stored(returned.logged)()

    def logged_items(self) -> list[str]:
        """Return the content of the log as the head of a restored job receives it."""
        restored = Looped()
        restored.inbox.restore(restored.inbox.snapshot(), PlainData(), self.logged())
        told: list[str] = []
        while (polled := restored.inbox.poll()) is not None:
            port, message = polled
            assert port is not None
            assert port.index == 1
            told.append(
                f"{list(message.records)} of {message.epoch}" if isinstance(message, DataBatch) else repr(message)
            )
        restored.close()
        return told


class HeadTask:
    """A task of this inbox, as far as its barriers use it."""

    name = "head[0]"
    feeder = None
    chain: Any = SimpleNamespace(write_control=lambda barrier: None)
    first: Any = SimpleNamespace(step=SimpleNamespace(name="head"), subtask=0)

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox

    async def snapshot(self) -> TaskState:
        return {"operators": {}, "positions": {}, "inbox": self.inbox.snapshot()}


class TestFeedbackLog:
    def test_holds_feedback_between_the_barrier_and_its_return(self) -> None:
        """Without the log, records in the loop were lost at each restore."""
        head = Looped()
        head.feedback.put(data(1))
        head.run()
        assert head.inbox.start_feedback_log(barrier()) is None
        head.feed_back(data(2, epoch=1), EpochWatermark(1), data(3, epoch=2), Idle())
        head.feed_back(barrier(), data(4, epoch=2))
        head.run()
        assert head.records == [1, 2, 3, 4]
        assert head.logged_items() == ["[2] of 1", "EpochWatermark(1)", "[3] of 2", "Idle()"]

    @pytest.mark.parametrize("suspends", [False, True])
    def test_the_end_of_a_feedback_channel_counts_as_the_return_of_the_barrier(self, suspends: bool) -> None:
        """A head that was told late of the end waited for the barrier of a task that had ended before the barrier."""
        head = Looped()
        assert head.inbox.start_feedback_log(barrier()) is None
        if suspends:
            head.inbox.only_feedback()
        head.feed_back(data(2, epoch=5), EndOfInput(5))
        head.run()
        assert head.logged_items() == ["[2] of 5", "EndOfInput(5)"]

    def test_a_feedback_channel_that_had_ended_brings_no_barrier_back(self) -> None:
        """The same, if the end came before the head took its snapshot."""
        head = Looped()
        head.feed_back(EndOfInput(5))
        head.run()
        returned = head.inbox.start_feedback_log(barrier())
        assert isinstance(returned, BarrierReturned)
        assert returned.logged == []

    def test_a_barrier_that_has_already_returned_leaves_nothing_to_log(self) -> None:
        """A head waited for a barrier that another head had already sent through the loop."""
        head = Looped()
        head.feedback.put_control(barrier())
        head.feedback.put(data(4))
        head.run()
        assert head.records == [], "it would be in the snapshot, and be sent again after a restart"
        returned = head.inbox.start_feedback_log(barrier())
        assert isinstance(returned, BarrierReturned)
        assert (returned.checkpoint, returned.logged) == (1, [])
        head.run()
        assert head.records == [4]

    def test_feedback_never_waits_for_the_alignment_of_the_inputs(self) -> None:
        """The feedback channel waited for the barrier of the loop, which comes from this very task."""
        head = Looped()
        head.initial.try_put(data(1))
        head.initial.put_control(barrier())
        head.feedback.put(data(2))
        head.run()
        assert sorted(head.records) == [1, 2]
        assert [type(event) for event in head.events] == [CheckpointBarrier]

    def test_restored_feedback_is_in_the_next_snapshot_once(self) -> None:
        """After a restore, feedback of the old snapshot was logged again in the next checkpoint, and so doubled."""
        head = Looped()
        head.inbox.start_feedback_log(barrier())
        head.feed_back(data(6, epoch=1), EpochWatermark(1), data(7, epoch=2), barrier())
        head.run()
        restored = Looped()
        restored.inbox.restore(head.inbox.snapshot(), PlainData(), head.logged())
        assert restored.feedback.records == 2
        restored.inbox.poll()
        again = restored.inbox.snapshot()
        restored.inbox.start_feedback_log(barrier(2))
        restored.feed_back(data(8, epoch=2), barrier(2))
        restored.run()
        assert restored.records == [7, 8]
        assert [port["held"] for port in again] == [[], []]
        assert restored.logged_items() == ["EpochWatermark(1)", "[7, 8] of 2"]
        assert restored.feedback.records == 0

    def test_the_log_goes_to_disk_above_its_memory_and_is_read_from_there(self) -> None:
        """A loop with more feedback than memory could be neither checkpointed nor restored."""
        before = unnamed_files()
        head, restored = Looped(), Looped(on_disk=True)
        head.inbox.start_feedback_log(barrier())
        blocks = [array(*range(start, start + 100), epoch=start) for start in range(0, 1000, 100)]
        for block in blocks:
            head.feed_back(block)
            head.run()
        head.feed_back(barrier())
        assert len(unnamed_files()) > len(before)
        head.run()
        head.close()
        restored.inbox.restore(restored.inbox.snapshot(), PlainData(), head.logged())
        assert len(unnamed_files()) > len(before)
        restored.feed_back(array(1000, epoch=1000))
        restored.run()
        assert restored.records == list(range(1001))
        restored.close()
        assert unnamed_files() == before

    def test_an_abandoned_log_leaves_no_file(self) -> None:
        """A checkpoint was abandoned while its log grew, and the next checkpoint contained the old log."""
        before = unnamed_files()
        head = Looped()
        head.inbox.start_feedback_log(barrier())
        head.feed_back(array(*range(100)), array(*range(100)), array(*range(100)))
        head.run()
        head.inbox.feedback.close()
        assert unnamed_files() == before
        head.feed_back(data(5), barrier())
        head.run()
        assert head.logged() == []
        head.events.clear()
        head.inbox.start_feedback_log(barrier(2))
        head.feed_back(data(6), barrier(2))
        head.run()
        assert head.logged_items() == ["[6] of 0"]

    async def test_a_log_that_was_complete_before_its_checkpoint_was_abandoned_leaves_no_file(self) -> None:
        """The barrier had returned, and the log was forgotten with the state: its file stayed open."""
        before, head, given = unnamed_files(), Looped(), list[list[SnapshotPart]]()
        barriers = TaskBarriers(
            HeadTask(head.inbox), None, lambda task, checkpoint, parts: given.append(parts), PlainData()
        )
        await barriers.pass_barrier(barrier())
        head.feed_back(array(*range(100)), array(*range(100)), barrier())
        head.run()
        [returned] = (event for event in head.events if isinstance(event, BarrierReturned))
        assert len(unnamed_files()) > len(before)
        barriers.abandon(1)
        barriers.barrier_returned(returned)
        assert given == [[]]
        assert unnamed_files() == before

    async def test_a_head_reports_a_checkpoint_behind_its_state(self) -> None:
        """A loop decided its end within the report: the end was in the state, although others had not received it."""
        told, head = list[str](), Looped()

        class Reporting(Boundary):
            def checkpoint_begins(self, checkpoint: int) -> None:
                told.append(f"begins {checkpoint}")

            def checkpoint_ends(self, checkpoint: int) -> None:
                told.append(f"ends {checkpoint}")

        class Telling(HeadTask):
            async def snapshot(self) -> TaskState:
                told.append("state")
                return await super().snapshot()

        barriers = TaskBarriers(Telling(head.inbox), Reporting(), lambda *_: told.append("given"), PlainData())
        await barriers.pass_barrier(barrier())
        assert told == ["state", "begins 1"]
        head.feed_back(barrier())
        head.run()
        [returned] = (event for event in head.events if isinstance(event, BarrierReturned))
        barriers.barrier_returned(returned)
        assert told[2:] == ["given", "ends 1"]

    def test_restored_feedback_that_is_never_handled_leaves_no_file(self) -> None:
        """A job that failed right after its restore left files open."""
        before = unnamed_files()
        head, restored = Looped(), Looped(on_disk=True)
        head.inbox.start_feedback_log(barrier())
        head.feed_back(array(*range(100)), array(*range(100)), barrier())
        head.run()
        restored.inbox.restore(restored.inbox.snapshot(), PlainData(), head.logged())
        assert len(unnamed_files()) > len(before)
        restored.close()
        assert unnamed_files() == before

    def test_after_a_suspending_barrier_feedback_is_only_logged(self) -> None:
        """Feedback was handled after the barrier at which the job stops."""
        head = Looped()
        head.inbox.only_feedback()
        head.inbox.start_feedback_log(barrier())
        head.initial.try_put(data(1))
        head.feedback.put(data(2))
        head.feedback.put_control(barrier())
        head.run()
        assert head.records == []
        assert head.logged_items() == ["[2] of 0"]
