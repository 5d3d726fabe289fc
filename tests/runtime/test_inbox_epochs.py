"""Epochs at an inbox: the watermark of several channels, and operators with ``epochs_in_order``."""

from random import Random
from typing import Any

import pytest
from runtime.inbox_run import InboxRun, Seen, data
from support.examples import random_examples

from streamiter.engine.graph.channels import Channel
from streamiter.engine.inbox.order import ARRIVAL, BEFORE_ALL_EPOCHS
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import AwaitedInput, PortProgress
from streamiter.errors import InternalError
from streamiter.operators.frontier import Frontier
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    CheckpointBarrier,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    EventTimeWatermark,
    ReadToEnd,
)

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


def test_a_watermark_that_decreases_is_an_internal_error() -> None:
    """A decreasing watermark repeated callbacks, or an equal one was refused."""
    run = InboxRun(["a"])
    run.put_all(0, EpochWatermark(3), data(1, epoch=4), EpochWatermark(3), data(2, epoch=4), EpochWatermark(2))
    with pytest.raises(InternalError, match="0 → step: expected watermarks that only grow, given 2 after 3"):
        run.run()
    assert run.told() == ["watermark 3", "1", "2"]


def test_a_watermark_behind_the_end_of_data_does_not_hold_back_the_others() -> None:
    """A channel whose data had ended brought one more watermark, and its operator waited for its next epochs."""
    run = InboxRun(["a", "b"])
    run.put_all(0, EndOfData(0), EpochWatermark(1))
    run.put_all(1, EpochWatermark(4))
    run.run()
    assert run.told() == ["a ended", "watermark 4"]


def test_records_of_later_epochs_wait_and_come_in_epoch_order() -> None:
    """Feedback ahead of its epoch stayed in the channel, and delayed the watermark after it."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(0, data(2, epoch=2), data(1, epoch=1), data(0, epoch=0), EpochWatermark(2))
    run.put_all(1, EpochWatermark(0))
    run.run()
    assert run.told() == ["0", "watermark 0", "1"]
    run.put_all(1, EpochWatermark(1))
    run.run()
    assert run.told()[3:] == ["watermark 1", "2"]
    run.put_all(1, EpochWatermark(2))
    run.run()
    assert run.told()[5:] == ["watermark 2"]


def test_a_watermark_waits_for_the_records_that_were_set_aside_before_it() -> None:
    """The watermark had arrived, and the callback of epoch 3 came before the records of epoch 3."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(1, data(30, epoch=3), EpochWatermark(3))
    run.put_all(0, EpochWatermark(0), EpochWatermark(1), EpochWatermark(2), EpochWatermark(3))
    run.run()
    assert run.told() == ["watermark 2", "30", "watermark 3"]


def test_an_unwanted_input_s_records_come_before_their_watermark_too() -> None:
    """In synchronous training, the examples set aside for a model came after the watermark of their epoch."""
    run = InboxRun(["model", "examples"], in_order=True, wants=lambda run: None if "100" in run.told() else ("model",))
    run.put_all(1, EpochWatermark(0), data(1, epoch=1), EpochWatermark(1))
    run.put_all(0, EpochWatermark(0), data(100, epoch=1), EpochWatermark(1))
    run.run()
    assert run.told() == ["watermark 0", "100", "1", "watermark 1"]


def test_an_input_ends_only_after_its_records_that_were_set_aside() -> None:
    """Records came after ``input_ended``, and were lost."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(0, data(2, epoch=2), EpochWatermark(2), EndOfInput())
    run.run()
    assert run.told() == []
    run.put_all(1, EpochWatermark(0), EpochWatermark(1))
    run.run()
    assert run.told() == ["watermark 1", "2", "a ended"]


def test_the_end_comes_after_all_records_that_were_set_aside() -> None:
    """The task ended when all inputs had ended, and lost the records that it held."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(0, data(20, epoch=2), data(50, epoch=5), EndOfInput())
    run.put_all(1, EpochWatermark(0), data(30, epoch=3), EndOfInput())
    run.run()
    assert run.records() == [20, 30, 50]
    assert run.told()[-1] == "end"
    assert run.has_ended


def test_at_the_end_of_an_iteration_later_epochs_have_no_callbacks() -> None:
    """Records after the last epoch, which has no callback, were not handled, or caused a callback."""
    run = InboxRun(["model", "examples"], in_order=True)
    run.put_all(1, EpochWatermark(0), EndOfData())
    run.put_all(0, EpochWatermark(0), EpochWatermark(1), data(2, epoch=2), data(4, epoch=4), data(3, epoch=3))
    run.run()
    run.put_all(0, EndOfInput(2))
    run.put_all(1, EndOfInput(2))
    run.run()
    assert run.told() == ["watermark 0", "examples ended", "watermark 1", "2", "3", "4", "model ended", "end"]


def test_at_the_end_wanted_records_come_first_and_all_are_handled() -> None:
    """A worker that wanted its model at the end received the examples first, or never."""
    run = InboxRun(["examples", "model"], in_order=True, wants=lambda run: None if 200 in run.records() else ("model",))
    run.put_all(0, EpochWatermark(0), data(20, epoch=2), data(21, epoch=2), EndOfInput(2))
    run.put_all(1, EpochWatermark(0), data(200, epoch=2), EndOfInput(2))
    run.run()
    assert run.records() == [200, 20, 21]
    assert run.has_ended


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
    "epoch": {"in_order": True},
    "epoch, port": {"in_order": True, "merges_in_order": True},
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


def test_while_no_input_is_wanted_an_ordered_gate_reads_nothing() -> None:
    """An entrance that was throttled set all data of its sources aside, on disk."""
    run = InboxRun(["a", "b"], merges_in_order=True, wants=lambda run: ())
    for port in (0, 1):
        run.put_all(port, data(port), data(port + 10, epoch=1))
    run.run()
    assert [channel.records for channel in run.channels] == [2, 2]
    assert (run.records(), run.inbox.held_records) == ([], 0)


def test_each_callback_comes_between_the_records_of_two_epochs() -> None:
    """A callback came before the last record of its epoch, or after the first of the next."""
    run = InboxRun(["a", "b"], in_order=True)
    for port in (0, 1):
        for epoch in (3, 1, 2, 0):
            run.put_all(port, data(10 * epoch + port, epoch=epoch))
        run.put_all(port, *(EpochWatermark(epoch) for epoch in range(4)))
    run.run()
    epochs = [entry.epoch for entry in run.trace if isinstance(entry, (Seen, EpochWatermark))]
    assert epochs == sorted(epochs)


def test_a_watermark_comes_before_a_barrier_that_was_posted_while_its_records_were_handled() -> None:
    """The snapshot at a posted barrier had the watermark, but its callback was lost with the run that crashed then."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(0, data(1, epoch=1), EpochWatermark(1))
    run.run()
    run.put_all(1, EpochWatermark(1))
    while not run.records():
        run.step()
    run.inbox.post(CheckpointBarrier(1))
    polled = run.inbox.poll()
    assert polled is not None
    assert isinstance(polled[1], EpochWatermark)


# -- the order of merging ------------------------------------------------------------------------------------------


def merging(*inputs: str, **options: Any) -> InboxRun:
    """Return an inbox that merges in order, of an operator without ``epochs_in_order``."""
    return InboxRun(inputs, in_order=True, merges_in_order=True, epochs_in_order=False, **options)


def test_records_of_an_epoch_come_in_the_order_of_the_ports() -> None:
    """A sum of floats depended on which of two subtasks was faster."""
    run = merging("a", "a")
    run.put_all(1, data(10), EpochWatermark(0), data(11, epoch=1))
    run.put_all(0, data(0))
    run.run()
    assert run.records() == [0]
    run.put_all(0, data(1), EpochWatermark(0))
    run.run()
    assert run.told() == ["0", "1", "10", "watermark 0"]
    run.put_all(0, data(2, epoch=1), EpochWatermark(1))
    run.run()
    assert run.told()[4:] == ["2", "11"]


def test_a_record_that_waits_for_another_port_fills_no_channel() -> None:
    """The task before a channel that was not read fed the other channel, too, and both waited."""
    run = merging("a", "a", limit_records=1)
    for record in range(10, 20):
        run.put_all(1, data(record))
        run.run()
    run.put_all(0, EndOfInput())
    run.run()
    assert run.records() == list(range(10, 20))


def test_wanted_records_come_before_the_order_and_before_lower_epochs() -> None:
    """An operator that reads the model first received examples, because they had the lower epoch."""
    run = merging("examples", "model", wants=lambda run: None if run.records() else ("model",))
    run.put_all(0, data(1), data(2))
    run.put_all(1, EpochWatermark(2), data(100, epoch=3))
    run.run()
    assert run.records() == [100, 1, 2]


def test_a_wanted_record_waits_for_a_callback_that_may_come_before_it() -> None:
    """The callback of epoch 0 came before or after the model of epoch 1, by the speed of the examples."""
    run = merging("examples", "model", wants=lambda _: ("model",))
    run.put_all(1, EpochWatermark(0), data(100, epoch=1))
    assert run.run() == []
    run.put_all(0, EpochWatermark(0))
    run.run()
    assert run.told() == ["watermark 0", "100"]


def test_an_input_ends_at_the_place_of_its_next_record() -> None:
    """The end of an input was told before or after the records of another input, whichever had arrived first."""
    run = merging("a", "b")
    run.put_all(1, data(10), EndOfData(0))
    run.put_all(0, data(0))
    run.run()
    assert run.told() == ["0"]
    run.put_all(0, EpochWatermark(0))
    run.run()
    assert run.told() == ["0", "10", "b ended", "watermark 0"]


def test_no_end_comes_before_a_record_while_no_input_is_wanted() -> None:
    """The end of the slower port came last, with a watermark behind the end of the input: the loop never ended."""
    wanted: list[tuple[str, ...] | None] = [None]
    run = merging("a", "a", wants=lambda _: wanted[0])
    run.put_all(1, EpochWatermark(1), data(10, epoch=2), EndOfInput())
    run.run()
    wanted[0] = ()
    run._ask()
    run.put_all(0, EpochWatermark(3), EndOfInput())
    run.run()
    assert run.told() == ["watermark 1"]
    wanted[0] = None
    run._ask()
    run.run()
    assert run.told() == ["watermark 1", "10", "watermark 3", "a ended", "end"]


def test_records_of_the_end_of_the_iteration_come_last() -> None:
    """Records that an operator emitted after the end of its data came before those of the last epoch, or behind."""
    run = merging("a", "b")
    run.put_all(0, EndOfData(0))
    run.put_all(1, EpochWatermark(0))
    run.run()
    run.put_all(0, data(5, epoch=1), EndOfInput(1))
    run.put_all(1, data(10, epoch=1), EndOfInput(1))
    run.run()
    assert run.records() == [10, 5]
    assert run.has_ended


def test_a_gate_that_merges_in_order_lets_a_barrier_pass() -> None:
    """The port whose turn it was waited for a barrier that was behind records before their turn."""
    run = merging("a", "a")
    run.put_all(0, data(0), CheckpointBarrier(1), data(1))
    run.put_all(1, data(10), EpochWatermark(0), CheckpointBarrier(1), EpochWatermark(1))
    run.run()
    assert run.told() == ["0", "barrier 1", "1"]
    again = merging("a", "a", restored=run.snapshots[1])
    again.put_all(0, data(1), EpochWatermark(0))
    again.run()
    assert again.told() == ["1", "10", "watermark 0"]


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_table_is_read_when_the_records_before_its_end_are_handled(ends_first: bool) -> None:
    """The end of a channel overtook its records of later epochs, and the next step did not wait for them."""
    run = InboxRun(["input", "input"], in_order=True)
    run.put_all(0, data(7, epoch=3), *([] if ends_first else [ReadToEnd()]), EndOfInput())
    run.put_all(1, data(1, epoch=0), ReadToEnd())
    run.run()
    assert not any(isinstance(each, ReadToEnd) for each in run.trace)
    run.put_all(1, EpochWatermark(3))
    run.run()
    kinds = [type(each) for each in run.trace]
    assert run.records() == [1, 7]
    assert kinds.count(ReadToEnd) == 1
    assert kinds.index(ReadToEnd) > run.trace.index(Seen(0, 3, 7))


@pytest.mark.parametrize("merges_in_order", [False, True])
def test_an_input_is_complete_when_it_brings_no_more_records_of_the_epoch(merges_in_order: bool) -> None:
    """A round ended while records of its epoch waited behind an input that was not read, and they were lost."""
    run = InboxRun(["a", "b", "c"], in_order=True, merges_in_order=merges_in_order)
    complete = run.inbox.inputs_complete
    assert [complete(epoch) for epoch in (0, 1)] == [[], []]
    run.put_all(0, EpochWatermark(0), data(5, epoch=1))
    run.run()
    assert [complete(epoch) for epoch in (0, 1)] == [["a"], []]
    run.put_all(0, EpochWatermark(1))
    run.run()
    assert complete(1) == [], "a record of epoch 1 waits"
    run.put_all(1, EndOfData())
    run.put_all(2, EndOfInput())
    run.run()
    assert complete(1) == ["a", "b", "c"]
    assert complete(2) == ([] if merges_in_order else ["b", "c"]), "in order, the others come after it"


def test_an_input_that_has_ended_brings_no_record_before_those_that_wait() -> None:
    """A round waited for the input of an iteration that had ended, while a record of a later epoch waited there."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(1, data(5, epoch=5), EndOfInput(6))
    run.run()
    assert [run.inbox.inputs_complete(epoch) for epoch in (4, 5)] == [["b"], []]


@pytest.mark.parametrize("merges_in_order", [False, True])
def test_the_end_of_the_data_has_the_epoch_that_its_channels_have_brought(merges_in_order: bool) -> None:
    """A step in a loop heard of the end of its data in epoch 0, although its source had come to epoch 3."""
    run = InboxRun(["a", "b"], in_order=True, merges_in_order=merges_in_order)
    run.put_all(0, EpochWatermark(1), EndOfData(3))
    run.put_all(1, EpochWatermark(1), EndOfData(2))
    run.run()
    assert repr(run.trace[-1]) == "EndOfData(3)"


@pytest.mark.parametrize("merges_in_order", [False, True])
def test_the_end_of_the_data_is_told_unless_only_the_end_of_the_input_brings_it(merges_in_order: bool) -> None:
    """A step emitted its result at the end of its data, and again at the end of its input, or never."""
    both = InboxRun(["a"], in_order=True, merges_in_order=merges_in_order)
    both.put_all(0, EndOfData(3), EndOfInput(4))
    both.run()
    assert both.told() == ["a ended", "end of data", "end"]
    one = InboxRun(["a"], in_order=True, merges_in_order=merges_in_order)
    one.put_all(0, EndOfInput())
    one.run()
    assert one.told() == ["a ended", "end"]


@pytest.mark.parametrize(("merges_in_order", "told"), [(False, []), (True, ["end of data"])])
def test_an_end_of_the_data_that_waits_is_told_before_the_end_of_the_input(
    merges_in_order: bool, told: list[str]
) -> None:
    """Ports in a fixed order: the end of the input had arrived before the turn of the end of the data, which was lost.

    Otherwise the end of the input, which follows at once, says as much.
    """
    run = InboxRun(["a", "b"], in_order=True, merges_in_order=merges_in_order)
    run.put_all(1, data(5, epoch=5), EndOfData(5), EndOfInput(5))
    run.run()
    assert run.told() == []
    assert run.inbox.inputs_complete(3) == ([] if merges_in_order else ["b"])
    run.put_all(0, EndOfData(5), EndOfInput(5))
    run.run()
    assert [each for each in run.told() if "watermark" not in each] == ["a ended", "5", "b ended", *told, "end"]


def test_the_event_time_of_a_channel_that_has_ended_does_not_count() -> None:
    """A window stayed open until the end of the job, because one of two files had ended in the morning."""
    for end in (EndOfData(), EndOfInput()):
        run = InboxRun(["a", "b"], timed_ports=[0, 1])
        run.put_all(0, EventTimeWatermark(70))
        run.put_all(1, EventTimeWatermark(30), end)
        run.run()
        assert [each.time for each in run.trace if isinstance(each, EventTimeWatermark)] == [30, 70]


def test_a_record_of_a_later_epoch_does_not_complete_the_epochs_before_it() -> None:
    """A channel had brought epoch 1 and a record of epoch 5; epochs 2 to 4 were complete before their records came."""
    run = InboxRun(["a", "b"], in_order=True)
    run.put_all(1, EpochWatermark(9))
    run.put_all(0, data(5, epoch=5), EpochWatermark(1))
    run.run()
    assert run.told() == ["watermark 1"]
    run.put_all(0, data(2, epoch=2), EpochWatermark(5))
    run.run()
    assert run.told()[1:] == ["2", "watermark 4", "5", "watermark 5"]


def test_a_table_is_not_read_because_its_records_are_handled() -> None:
    """A join began when the first records of its table had been handled, with a mark behind them."""
    run = InboxRun(["table", "table"], in_order=True)
    run.put_all(0, data(2, epoch=2), EpochWatermark(1), EpochWatermark(2))
    run.put_all(1, EpochWatermark(2), ReadToEnd())
    run.run()
    assert run.told() == ["watermark 1", "2", "watermark 2"]
    run.put_all(0, ReadToEnd())
    run.run()
    assert isinstance(run.trace[-1], ReadToEnd)


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
