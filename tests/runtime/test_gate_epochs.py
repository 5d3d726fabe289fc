"""The gate of an operator with ``epochs_in_order``: records of later epochs wait for their turn."""

from __future__ import annotations

from runtime.gate_run import GateRun, Seen, data

from streamiter.records import CheckpointBarrier, EndOfData, EndOfInput, EpochWatermark


def test_records_of_later_epochs_wait_and_come_in_epoch_order() -> None:
    """Feedback that has run ahead; holding the channel instead would hold the watermark that frees it."""
    run = GateRun(["a", "b"], in_order=True)
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
    """Its channel had brought it already: the callback of epoch 3 came before the records of epoch 3."""
    run = GateRun(["a", "b"], in_order=True)
    run.put_all(1, data(30, epoch=3), EpochWatermark(3))
    run.put_all(0, EpochWatermark(0), EpochWatermark(1), EpochWatermark(2), EpochWatermark(3))
    run.run()
    assert run.told() == ["watermark 2", "30", "watermark 3"]


def test_an_unwanted_input_s_records_come_before_their_watermark_too() -> None:
    """Synchronous training: examples of the next epoch are set aside while the model is awaited."""
    run = GateRun(
        ["model", "examples"],
        in_order=True,
        wants=lambda run: None if "100" in run.told() else ("model",),
    )
    run.put_all(1, EpochWatermark(0), data(1, epoch=1), EpochWatermark(1))
    run.put_all(0, EpochWatermark(0), data(100, epoch=1), EpochWatermark(1))
    run.run()
    assert run.told() == ["watermark 0", "100", "1", "watermark 1"]


def test_an_input_has_ended_only_when_what_was_set_aside_of_it_is_handled() -> None:
    """``input_ended`` closes an account; records that follow it would be lost in it."""
    run = GateRun(["a", "b"], in_order=True)
    run.put_all(0, data(2, epoch=2), EpochWatermark(2), EndOfInput())
    run.run()
    assert run.told() == []
    run.put_all(1, EpochWatermark(0), EpochWatermark(1))
    run.run()
    assert run.told() == ["watermark 1", "2", "a ended"]


def test_the_end_comes_after_all_that_waits() -> None:
    """All inputs have ended while records are held: the task ended at once and lost them."""
    run = GateRun(["a", "b"], in_order=True)
    run.put_all(0, data(20, epoch=2), data(50, epoch=5), EndOfInput())
    run.put_all(1, EpochWatermark(0), data(30, epoch=3), EndOfInput())
    run.run()
    assert run.records() == [20, 30, 50]
    assert run.told()[-1] == "end"
    assert run.has_ended


def test_where_an_iteration_ends_later_epochs_are_handled_without_callbacks() -> None:
    """The ending epoch has none; what ran ahead of it counts all the same."""
    run = GateRun(["model", "examples"], in_order=True)
    run.put_all(1, EpochWatermark(0), EndOfData())
    run.put_all(0, EpochWatermark(0), EpochWatermark(1), data(2, epoch=2), data(4, epoch=4), data(3, epoch=3))
    run.run()
    run.put_all(0, EndOfInput(2))
    run.put_all(1, EndOfInput(2))
    run.run()
    assert run.told() == ["watermark 0", "examples ended", "watermark 1", "2", "3", "4", "model ended", "end"]


def test_at_the_end_what_is_wanted_comes_first_and_nothing_is_left() -> None:
    """A worker that still wants its model at the end gets it before the examples, and then those too."""
    run = GateRun(
        ["examples", "model"], in_order=True, wants=lambda run: None if 200 in run.records() else ("model",)
    )
    run.put_all(0, EpochWatermark(0), data(20, epoch=2), data(21, epoch=2), EndOfInput(2))
    run.put_all(1, EpochWatermark(0), data(200, epoch=2), EndOfInput(2))
    run.run()
    assert run.records() == [200, 20, 21]
    assert run.has_ended


def test_what_is_set_aside_is_in_the_snapshot_and_comes_once_after_a_restore() -> None:
    """Also where it lay on disk; the first version of this could not be written down at all."""
    run = GateRun(["a", "b"], in_order=True)
    ahead = [data(*range(100 * epoch, 100 * epoch + 50), epoch=epoch) for epoch in (3, 2, 4)]
    run.put_all(0, *ahead, EpochWatermark(4), CheckpointBarrier(1))
    run.put_all(1, EpochWatermark(0), CheckpointBarrier(1))
    run.run()
    assert run.records() == []

    restored = GateRun(["a", "b"], in_order=True, restored=run.snapshots[1])
    restored.put_all(1, EpochWatermark(4))
    restored.run()
    assert restored.records() == [*range(200, 250), *range(300, 350), *range(400, 450)]
    assert [word for word in restored.told() if word.startswith("watermark")] == [
        f"watermark {epoch}" for epoch in (1, 2, 3, 4)
    ]


def test_callbacks_lie_between_the_records_of_their_epochs() -> None:
    """Each epoch: all its records, then its callback, then the next."""
    run = GateRun(["a", "b"], in_order=True)
    for port in (0, 1):
        for epoch in (3, 1, 2, 0):
            run.put_all(port, data(10 * epoch + port, epoch=epoch))
        run.put_all(port, *(EpochWatermark(epoch) for epoch in range(4)))
    run.run()
    epochs = [entry.epoch for entry in run.trace if isinstance(entry, (Seen, EpochWatermark))]
    assert epochs == sorted(epochs)
