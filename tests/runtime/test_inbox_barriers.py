"""The inbox and checkpoint barriers: alignment, held records, snapshot and restore."""

import asyncio

import numpy as np
import pytest
from operators.operator_harness import stored
from runtime.inbox_run import InboxRun, array, barrier, data, held_records

from streamiter.engine.inbox.alignment import BarrierAlignment
from streamiter.errors import InternalError
from streamiter.values.records import CheckpointBarrier, EndOfData, EndOfInput, EpochWatermark


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

    def test_an_expected_barrier_passes_if_no_input_is_wanted(self) -> None:
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

    async def test_a_waiting_producer_continues_when_a_barrier_is_expected(self) -> None:
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
    def test_a_restored_inbox_continues_where_the_snapshot_was_taken(self) -> None:
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
