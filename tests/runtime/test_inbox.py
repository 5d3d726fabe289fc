"""The inbox: turns, joining, wanted inputs, watermarks, ends."""

import asyncio

import numpy as np
import pytest
from runtime.inbox_run import InboxRun, Seen, array, data

from streamiter.engine.graph.channels import Channel
from streamiter.engine.inbox.inbox import Inbox, Posted, nothing
from streamiter.engine.inbox.port_log import Port
from streamiter.errors import ConfigurationError
from streamiter.values.records import CheckpointBarrier, Columns, DataBatch, EndOfData, EndOfInput, EpochWatermark, Idle


class TestTurns:
    def test_a_flood_on_one_channel_does_not_starve_another(self) -> None:
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

    def test_a_channel_that_never_runs_empty_leaves_others_their_turns(self) -> None:
        """The first channel was filled as fast as it was read, and the inbox read no other channel."""
        run = InboxRun(["input", "input", "input"])
        run.put_all(0, data(0))
        run.put_all(1, data(1000))
        run.put_all(2, data(2000))
        for number in range(1, 10):
            run.step()
            run.put_all(0, data(number))
        assert {1000, 2000} <= set(run.records()[:5])

    async def test_the_gate_wakes_when_a_channel_gets_an_item_or_a_notice_is_posted(self) -> None:
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

    def test_posted_notices_come_first(self) -> None:
        """Timers and stops waited behind a backlog."""
        run = InboxRun(["input"])
        run.put_all(0, data(1))
        run.inbox.post(nothing)
        assert [type(entry) for entry in run.run()] == [Posted, Seen]

    def test_items_in_a_channel_from_before_the_gate_are_read(self) -> None:
        """A task upstream put records before the task that reads them existed, and the inbox did not see them."""
        channel = Channel("a → b")
        channel.try_put(data(1))
        inbox = Inbox([Port(0, "input", channel)])
        polled = inbox.poll()
        assert polled is not None
        assert isinstance(polled[1], DataBatch)
        assert polled[1].records == [1]


class TestJoining:
    def test_small_batches_that_wait_are_joined(self) -> None:
        """A step that had fallen behind read its small batches one by one, and did not catch up."""
        run = InboxRun(["input"])
        for number in range(5):
            run.put_all(0, data(number))
        run.run()
        assert [batch.records for batch in run.batches] == [[0, 1, 2, 3, 4]]

    def test_batches_of_different_epochs_stay_apart(self) -> None:
        """A record in the wrong epoch made a gradient wrong."""
        run = InboxRun(["input"])
        run.put_all(0, data(0, epoch=0), data(1, epoch=0), data(2, epoch=1), data(3, epoch=0))
        run.run()
        assert [(batch.epoch, batch.records) for batch in run.batches] == [(0, [0, 1]), (1, [2]), (0, [3])]

    def test_batches_of_different_kinds_stay_apart(self) -> None:
        """A list joined with an array changed the type of its records."""
        run = InboxRun(["input"])
        columns = DataBatch(Columns({"x": [1]}))
        run.put_all(0, data(0), data(1), array(2), array(3), DataBatch(np.array([4.5])))
        run.run()
        assert [len(batch.records) for batch in run.batches] == [2, 2, 1]
        assert run.batches[1].records.dtype == np.int64  # type: ignore[union-attr]
        run.put_all(0, columns, columns)
        run.inbox.poll()

    def test_nothing_is_joined_across_a_control_record(self) -> None:
        """Records after a barrier, which belong to the next checkpoint, were joined with records before it."""
        run = InboxRun(["input"])
        run.put_all(0, data(0), EpochWatermark(0), data(1, epoch=1), CheckpointBarrier(1), data(2, epoch=1))
        run.run()
        assert run.told() == ["0", "watermark 0", "1", "barrier 1", "2"]

    def test_a_joined_batch_is_bounded(self) -> None:
        """A backlog became one batch that took minutes."""
        run = InboxRun(["input"], limit_records=100_000)
        for _ in range(10):
            run.put_all(0, DataBatch(list(range(3000))))
        run.run()
        assert [len(batch.records) for batch in run.batches] == [6000] * 5


class TestWatermarks:
    def test_the_watermark_is_the_least_of_all_channels(self) -> None:
        """A callback came before the slowest channel's records, and averaged half of the gradients."""
        run = InboxRun(["a", "a", "b"])
        run.put_all(0, EpochWatermark(0), EpochWatermark(3))
        run.put_all(1, EpochWatermark(1))
        assert run.run() == []
        run.put_all(2, EpochWatermark(0))
        run.run()
        run.put_all(2, EpochWatermark(5))
        run.run()
        assert run.told() == ["watermark 0", "watermark 1"]

    def test_a_channel_whose_data_has_ended_delays_no_epoch(self) -> None:
        """One empty partition stopped all callbacks forever."""
        run = InboxRun(["a", "b"])
        run.put_all(0, EpochWatermark(4))
        run.put_all(1, EndOfData())
        run.run()
        assert run.told() == ["b ended", "watermark 4"]

    def test_the_end_of_all_data_comes_once_and_the_task_continues(self) -> None:
        """An operator that reads only data ended before its iteration."""
        run = InboxRun(["a", "b"])
        run.put_all(0, EndOfData())
        run.put_all(1, EndOfData())
        run.run()
        assert run.told() == ["a ended", "b ended", "end of data"]
        run.put_all(0, EndOfInput(7))
        run.put_all(1, EndOfInput(7))
        run.run()
        assert run.told()[3:] == ["end"]
        end = run.trace[-1]
        assert isinstance(end, EndOfInput)
        assert end.epoch == 7

    def test_an_input_ends_with_the_last_of_its_channels(self) -> None:
        """``input_ended`` was called while another partition still had records."""
        run = InboxRun(["a", "a", "b"])
        run.put_all(0, EndOfInput())
        run.put_all(2, EndOfInput())
        run.run()
        assert run.told() == ["b ended"]
        run.put_all(1, data(1), EndOfInput())
        run.run()
        assert run.told() == ["b ended", "1", "a ended", "end"]


class TestIdleChannels:
    """An idle channel sends one control record, and the others do not wait for it until it has data."""

    @pytest.mark.parametrize("in_order", [False, True])
    @pytest.mark.parametrize("epoch", [0, 5])
    def test_data_ends_the_idleness_of_a_channel(self, in_order: bool, epoch: int) -> None:
        """An added partition stayed idle although it had data, so no watermark waited for its epochs."""
        run = InboxRun(["input", "input"], in_order=in_order)
        run.put_all(0, Idle(), data(1, epoch=epoch))  # In order, epoch 5 is set aside.
        run.run()
        run.put_all(1, Idle())
        run.run()
        assert not any(isinstance(entry, Idle) for entry in run.trace)
        run.put_all(0, Idle())
        run.run()
        assert isinstance(run.trace[-1], Idle)

    def test_a_channel_whose_data_has_ended_does_not_count_for_idleness(self) -> None:
        """The other channels waited forever for data of a channel that had ended."""
        run = InboxRun(["input", "input"])
        run.put_all(0, Idle())
        run.put_all(1, EndOfData())
        run.run()
        assert [type(entry) for entry in run.trace] == [Idle]


class TestWantedInputs:
    def test_only_wanted_inputs_are_read(self) -> None:
        """A worker that read data before its first model predicted with zeros."""
        run = InboxRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(1, data(10, 11))
        run.put_all(0, data(1))
        run.run()
        assert run.records() == [1]
        assert run.inbox.has_parked

    def test_the_wanted_inputs_may_change_with_each_record_of_a_batch(self) -> None:
        """A changed wish waited for the end of a batch, although the limits of a batch have no meaning."""
        run = InboxRun(["a", "b"], wants=lambda run: (("a", "b")[len(run.records()) % 2],))
        run.put_all(0, data(1, 2, 3), EndOfInput())
        run.put_all(1, data(10, 20, 30), EndOfInput())
        run.run()
        assert run.told() == ["1", "10", "2", "20", "3", "30", "a ended", "b ended", "end"]

    def test_if_only_ended_inputs_are_wanted_all_are_read(self) -> None:
        """Workers with partitions of different sizes waited for each other forever."""
        run = InboxRun(["a", "b"], wants=lambda _: ("a",))
        run.put_all(1, data(10))
        run.put_all(0, data(1), EndOfInput())
        run.run()
        assert run.told() == ["1", "a ended", "10"]

    def test_if_no_input_is_wanted_only_control_records_are_read(self) -> None:
        """While an operator waited for a timer, it received no watermarks and ends."""
        run = InboxRun(["a", "b"], wants=lambda _: ())
        run.put_all(0, EpochWatermark(0), data(1, epoch=1))
        run.put_all(1, EpochWatermark(0), EndOfInput())
        run.run()
        assert run.told() == ["watermark 0", "b ended"]
        run.inbox.want(None)
        run.run()
        assert run.records() == [1]

    def test_an_unknown_name_is_an_error_that_gives_the_names(self) -> None:
        """After a typing error in a name, all inputs were read, without any message."""
        run = InboxRun(["model", "data"])
        with pytest.raises(ConfigurationError, match=r"expected names of inputs \(model, data\), given 'modle'"):
            run.inbox.want(["modle"])
        with pytest.raises(ConfigurationError, match="expected a tuple or list of names, given 'model'"):
            run.inbox.want("model")

    def test_an_end_comes_after_the_records_that_were_put_back(self) -> None:
        """The rest of a batch was lost when its channel ended."""
        run = InboxRun(["a", "b"], wants=lambda run: ("a",) if not run.records() else ("b",))
        run.put_all(0, data(1, 2, 3), EndOfInput())
        run.run()
        run.put_all(1, data(10))
        run.run()
        assert run.told() == ["1", "10"]
        run.put_all(1, EndOfInput())
        run.run()
        assert run.told() == ["1", "10", "b ended", "2", "3", "a ended", "end"]


def test_a_posted_barrier_is_passed_when_all_inputs_have_ended() -> None:
    """A head, which starts barriers itself after its initial values have ended, waited for a barrier."""
    run = InboxRun(["a"])
    assert run.inbox.expect_barrier(CheckpointBarrier(1), starts_here=True) == []
    run.put_all(0, EndOfInput())
    run.run()
    assert run.told() == ["a ended", "barrier 1", "end"]
    assert [type(event) for event in run.inbox.expect_barrier(CheckpointBarrier(2), starts_here=True)] == [
        CheckpointBarrier
    ]


def test_a_control_record_that_is_posted_is_refused_on_a_channel() -> None:
    """A control record that only the engine posts was accepted on a channel, which hid a bug in the engine."""
    run = InboxRun(["a"])
    with pytest.raises(TypeError, match="expected a control record of a channel"):
        run.inbox.accept(run.inbox.ports[0], Posted(nothing))
