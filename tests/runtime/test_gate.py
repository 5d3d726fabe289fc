"""The gate: turns, joining, wanted inputs, watermarks, ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from runtime.gate_run import GateRun, Seen, array, data

from streamiter.channels import Channel
from streamiter.errors import ConfigurationError
from streamiter.records import (
    CheckpointBarrier,
    Columns,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
)
from streamiter.runtime.checkpointing.task_barriers import BarrierTrigger
from streamiter.runtime.gate import Gate
from streamiter.runtime.gate_epochs import InputEnded
from streamiter.runtime.port import Port


class TestTurns:
    def test_a_flood_on_one_channel_does_not_starve_another(self) -> None:
        """While one partition catches up on a week of backlog, the others must be read, too."""
        run = GateRun(["input", "input"])
        # Kinds that alternate cannot be joined, so that the flood stays a hundred batches.
        for number in range(100):
            run.put_all(0, data(number) if number % 2 else array(number))
        run.put_all(1, data(1000))
        run.put_all(1, array(1001))
        run.run()
        assert run.records()[:4] == [0, 1000, 1, 1001]
        assert len(run.records()) == 102

    def test_a_channel_that_never_runs_empty_leaves_others_their_turns(self) -> None:
        """The first channel is filled as fast as it is read."""
        run = GateRun(["input", "input", "input"])
        run.put_all(0, data(0))
        run.put_all(1, data(1000))
        run.put_all(2, data(2000))
        for number in range(1, 10):
            run.step()
            run.put_all(0, data(number))
        assert {1000, 2000} <= set(run.records()[:5])

    async def test_the_gate_wakes_when_a_channel_gets_an_item_or_a_control_record_is_posted(self) -> None:
        """A task that sleeps although it has input is a silent stall."""
        run = GateRun(["input"])
        for wake in (
            lambda: run.put_all(0, data(1)),
            lambda: run.put_all(0, EpochWatermark(0)),
            lambda: run.gate.post(InputEnded("input")),
        ):
            run.run()
            waiting = asyncio.create_task(run.gate.wait())
            await asyncio.sleep(0)
            assert not waiting.done()
            wake()
            await waiting

    def test_posted_control_records_come_first(self) -> None:
        """Timers and stops must not wait behind a backlog."""
        run = GateRun(["input"])
        run.put_all(0, data(1))
        run.gate.post(InputEnded("timer"))
        assert [type(entry) for entry in run.run()] == [InputEnded, Seen]

    def test_items_in_a_channel_before_the_gate_is_made_are_read(self) -> None:
        """A task upstream may put records before the task that reads them exists."""
        channel = Channel("a → b")
        channel.try_put(data(1))
        gate = Gate([Port(0, "input", channel, is_feedback=False)])
        polled = gate.poll()
        assert polled is not None
        assert isinstance(polled[1], DataBatch)
        assert polled[1].records == [1]


class TestJoining:
    def test_small_batches_that_wait_are_joined(self) -> None:
        """A step that has fallen behind catches up with larger batches."""
        run = GateRun(["input"])
        for number in range(5):
            run.put_all(0, data(number))
        run.run()
        assert [batch.records for batch in run.batches] == [[0, 1, 2, 3, 4]]

    def test_batches_of_different_epochs_stay_apart(self) -> None:
        """A record in the wrong epoch makes a gradient wrong."""
        run = GateRun(["input"])
        run.put_all(0, data(0, epoch=0), data(1, epoch=0), data(2, epoch=1), data(3, epoch=0))
        run.run()
        assert [(batch.epoch, batch.records) for batch in run.batches] == [(0, [0, 1]), (1, [2]), (0, [3])]

    def test_batches_of_different_kinds_stay_apart(self) -> None:
        """A list joined with an array would change the type of its records."""
        run = GateRun(["input"])
        columns = DataBatch(Columns({"x": [1]}))
        run.put_all(0, data(0), data(1), array(2), array(3), DataBatch(np.array([4.5])))
        run.run()
        assert [len(batch.records) for batch in run.batches] == [2, 2, 1]
        assert run.batches[1].records.dtype == np.int64  # type: ignore[union-attr]
        run.put_all(0, columns, columns)
        run.gate.poll()

    def test_nothing_is_joined_across_a_control_record(self) -> None:
        """Records behind a barrier belong to the next checkpoint."""
        run = GateRun(["input"])
        run.put_all(0, data(0), EpochWatermark(0), data(1, epoch=1), CheckpointBarrier(1), data(2, epoch=1))
        run.run()
        assert run.told() == ["0", "watermark 0", "1", "barrier 1", "2"]

    def test_a_joined_batch_is_bounded(self) -> None:
        """A backlog must not become one batch that takes minutes."""
        run = GateRun(["input"], limit_records=100_000)
        for _ in range(10):
            run.put_all(0, DataBatch(list(range(3000))))
        run.run()
        assert [len(batch.records) for batch in run.batches] == [6000] * 5


class TestWatermarks:
    def test_the_watermark_is_the_least_of_all_channels(self) -> None:
        """A callback that comes before the slowest channel's records averages half a gradient."""
        run = GateRun(["a", "a", "b"])
        run.put_all(0, EpochWatermark(0), EpochWatermark(3))
        run.put_all(1, EpochWatermark(1))
        assert run.run() == []
        run.put_all(2, EpochWatermark(0))
        run.run()
        run.put_all(2, EpochWatermark(5))
        run.run()
        assert run.told() == ["watermark 0", "watermark 1"]

    def test_a_channel_whose_data_has_ended_delays_no_epoch(self) -> None:
        """One empty partition would otherwise stop all callbacks for ever."""
        run = GateRun(["a", "b"])
        run.put_all(0, EpochWatermark(4))
        run.put_all(1, EndOfData())
        run.run()
        assert run.told() == ["b ended", "watermark 4"]

    def test_the_end_of_all_data_comes_once_and_the_task_continues(self) -> None:
        """In an iteration, an operator that reads only data exists until the iteration ends."""
        run = GateRun(["a", "b"])
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
        """``input_ended`` must not come while another partition brings records."""
        run = GateRun(["a", "a", "b"])
        run.put_all(0, EndOfInput())
        run.put_all(2, EndOfInput())
        run.run()
        assert run.told() == ["b ended"]
        run.put_all(1, data(1), EndOfInput())
        run.run()
        assert run.told() == ["b ended", "1", "a ended", "end"]


class TestIdleChannels:
    """An idle channel says so once. Others do not wait for it until it brings data."""

    @pytest.mark.parametrize("in_order", [False, True])
    @pytest.mark.parametrize("epoch", [0, 5])
    def test_data_ends_the_idleness_of_a_channel(self, in_order: bool, epoch: int) -> None:
        """An added partition once stayed idle although it brought data, so nothing waited for its epochs."""
        run = GateRun(["input", "input"], in_order=in_order)
        run.put_all(0, Idle(), data(1, epoch=epoch))  # In order, that of a later epoch is set aside.
        run.run()
        run.put_all(1, Idle())
        run.run()
        assert not any(isinstance(entry, Idle) for entry in run.trace)
        run.put_all(0, Idle())
        run.run()
        assert isinstance(run.trace[-1], Idle)

    def test_a_channel_whose_data_has_ended_does_not_count_for_idleness(self) -> None:
        """It brings no data, so the others would wait for it without end."""
        run = GateRun(["input", "input"])
        run.put_all(0, Idle())
        run.put_all(1, EndOfData())
        run.run()
        assert [type(entry) for entry in run.trace] == [Idle]


class TestWantedInputs:
    def test_only_wanted_inputs_are_read(self) -> None:
        """A worker that takes data before its first model predicts with zeros."""
        run = GateRun(["model", "data"], wants=lambda _: ("model",))
        run.put_all(1, data(10, 11))
        run.put_all(0, data(1))
        run.run()
        assert run.records() == [1]
        assert run.gate.has_parked

    def test_the_wanted_inputs_may_change_with_each_record_of_a_batch(self) -> None:
        """The limits of a batch have no meaning, so the change must not wait for the end of the batch."""
        run = GateRun(["a", "b"], wants=lambda run: (("a", "b")[len(run.records()) % 2],))
        run.put_all(0, data(1, 2, 3), EndOfInput())
        run.put_all(1, data(10, 20, 30), EndOfInput())
        run.run()
        assert run.told() == ["1", "10", "2", "20", "3", "30", "a ended", "b ended", "end"]

    def test_if_only_ended_inputs_are_wanted_all_are_read(self) -> None:
        """Otherwise workers with partitions of different sizes would wait for each other without end."""
        run = GateRun(["a", "b"], wants=lambda _: ("a",))
        run.put_all(1, data(10))
        run.put_all(0, data(1), EndOfInput())
        run.run()
        assert run.told() == ["1", "a ended", "10"]

    def test_if_no_input_is_wanted_only_control_records_are_read(self) -> None:
        """An operator may wait for a timer; watermarks and ends still arrive."""
        run = GateRun(["a", "b"], wants=lambda _: ())
        run.put_all(0, EpochWatermark(0), data(1, epoch=1))
        run.put_all(1, EpochWatermark(0), EndOfInput())
        run.run()
        assert run.told() == ["watermark 0", "b ended"]
        run.gate.want(None)
        run.run()
        assert run.records() == [1]

    def test_an_unknown_name_is_an_error_that_gives_the_names(self) -> None:
        """A typing error once had the effect that all inputs were read, without any message."""
        run = GateRun(["model", "data"])
        with pytest.raises(
            ConfigurationError, match=r"expected names of inputs \(model, data\), given 'modle'"
        ):
            run.gate.want(["modle"])
        with pytest.raises(ConfigurationError, match="expected a tuple or list of names, given 'model'"):
            run.gate.want("model")

    def test_an_end_comes_after_the_records_that_were_put_back(self) -> None:
        """The rest of a batch must not be lost when its channel ends."""
        run = GateRun(["a", "b"], wants=lambda run: ("a",) if not run.records() else ("b",))
        run.put_all(0, data(1, 2, 3), EndOfInput())
        run.run()
        run.put_all(1, data(10))
        run.run()
        assert run.told() == ["1", "10"]
        run.put_all(1, EndOfInput())
        run.run()
        assert run.told() == ["1", "10", "b ended", "2", "3", "a ended", "end"]


def test_a_posted_barrier_is_passed_when_all_inputs_have_ended() -> None:
    """A head starts barriers itself after its initial values have ended."""
    run = GateRun(["a"])
    assert run.gate.accept_trigger(CheckpointBarrier(1)) == []
    run.put_all(0, EndOfInput())
    run.run()
    assert run.told() == ["a ended", "barrier 1", "end"]
    assert [type(event) for event in run.gate.accept_trigger(CheckpointBarrier(2))] == [CheckpointBarrier]


def test_a_control_record_that_is_posted_is_refused_on_a_channel() -> None:
    """Only the engine makes these control records, so this is a bug of the engine."""
    run = GateRun(["a"])
    with pytest.raises(TypeError, match="expected a control record of a channel"):
        run.gate.accept(run.gate.ports[0], BarrierTrigger(CheckpointBarrier(1)))
