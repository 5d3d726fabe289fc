"""The feedback of a checkpoint: a head logs it between its snapshot and the return of the barrier."""

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints.deferred_support import unnamed_files
from operators.operator_harness import stored
from runtime.inbox_run import array, barrier, data, spill_queue

from streamiter.engine.graph.channels import Channel
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.alignment import BarrierReturned
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.snapshot import SnapshotPart
from streamiter.engine.tasks.task_barriers import TaskBarriers, TaskState
from streamiter.operators.operator import Boundary
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, Control, DataBatch, EndOfInput, EpochWatermark, Idle


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


def test_the_log_holds_feedback_between_the_barrier_and_its_return() -> None:
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
def test_the_end_of_a_feedback_channel_counts_as_the_return_of_the_barrier(suspends: bool) -> None:
    """A head that was told late of the end waited for the barrier of a task that had ended before the barrier."""
    head = Looped()
    assert head.inbox.start_feedback_log(barrier()) is None
    if suspends:
        head.inbox.only_feedback()
    head.feed_back(data(2, epoch=5), EndOfInput(5))
    head.run()
    assert head.logged_items() == ["[2] of 5", "EndOfInput(5)"]


def test_a_feedback_channel_that_had_ended_brings_no_barrier_back() -> None:
    """The same, if the end came before the head took its snapshot."""
    head = Looped()
    head.feed_back(EndOfInput(5))
    head.run()
    returned = head.inbox.start_feedback_log(barrier())
    assert isinstance(returned, BarrierReturned)
    assert returned.logged == []


def test_a_barrier_that_has_already_returned_leaves_nothing_to_log() -> None:
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


def test_feedback_never_waits_for_the_alignment_of_the_inputs() -> None:
    """The feedback channel waited for the barrier of the loop, which comes from this very task."""
    head = Looped()
    head.initial.try_put(data(1))
    head.initial.put_control(barrier())
    head.feedback.put(data(2))
    head.run()
    assert sorted(head.records) == [1, 2]
    assert [type(event) for event in head.events] == [CheckpointBarrier]


def test_restored_feedback_is_in_the_next_snapshot_once() -> None:
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


def test_the_log_goes_to_disk_above_its_memory_and_is_read_from_there() -> None:
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


def test_an_abandoned_log_leaves_no_file() -> None:
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


async def test_a_log_that_was_complete_before_its_checkpoint_was_abandoned_leaves_no_file() -> None:
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


async def test_a_head_reports_a_checkpoint_behind_its_state() -> None:
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


def test_restored_feedback_that_is_never_handled_leaves_no_file() -> None:
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


def test_after_a_suspending_barrier_feedback_is_only_logged() -> None:
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
