"""The calls of a listener in a loop, and their order."""

import asyncio
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
from iteration.iteration_support import (
    SMALL,
    CutItems,
    Endless,
    Log,
    Witness,
    callbacks,
    check_listener,
    cut_items,
    ended,
    kinds,
    run,
    run_shuffled,
)
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.engine.graph.feedback import FeedbackLimits

SEEDS = range(3)


def test_a_listener_of_stamped_data_only_has_callbacks_for_the_epochs_of_the_data() -> None:
    """Of two stamped streams of different lengths, the last epochs of the longer one had no callbacks."""
    for lengths in ((2, 5), (5, 2)):
        flow, log = Flow("loop"), Log()

        def body(variables: list[Stream], data: list[Stream], log: Log = log) -> IterationBodyResult:
            both = connect(left=data[0], right=data[1]).process(lambda: Witness(log), name="both")
            both.process(lambda: Witness(log), name="behind it")
            return IterationBodyResult(variables, [])

        streams = [epochs_every(flow.from_items(range(length)), records=1) for length in lengths]
        iterate_unbounded_streams([flow.from_items([])], streams, body)
        run(flow, limits=SMALL)
        for name in ("both", "behind it"):
            check_listener(log[name, 0])
            assert callbacks(log[name, 0]) == [0, 1, 2, 3, 4]


# -- the end of an input ---------------------------------------------------------------------------------


def test_the_end_of_data_is_reported_at_its_own_end_while_another_stream_continues() -> None:
    """The end of a stream was reported at the end of its epoch, which endless data never reaches."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=data[0], right=data[1]).process(lambda: Witness(log), name="both")
        return IterationBodyResult([variables[0]], [both])

    async def main() -> None:
        [out] = iterate_unbounded_streams(
            [flow.from_items([])], [flow.from_items([1, 2]), flow.from_source(Endless([3]))], body
        )
        out.collect()
        job = await flow.start()
        await until(lambda: ("input ended", "left") in log["both", 0])
        assert kinds(log["both", 0], "callback", "terminated") == []
        await job.stop("drain")
        await ended(job)

    run_shuffled(main())
    check_listener(log["both", 0])


async def test_records_emitted_at_a_late_end_of_stamped_data_are_fed_back() -> None:
    """All epochs of the data were complete when the job was drained, and the loop ended without the last report."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        model = variables[0].process(lambda: Witness(log, on_record=lambda *_: None), name="model")
        worker = connect(variable=model, data=data[0]).process(
            lambda: Witness(log, on_record=lambda *_: None, on_ended=lambda name, out: out.emit(name)), name="worker"
        )
        return IterationBodyResult([worker], [])

    data = epochs_every(flow.from_source(Endless(range(4))), records=2)
    iterate_unbounded_streams([flow.from_items(["start"])], [data], body)
    job = await flow.start()
    await until(lambda: job.statistics().loops[0].epoch_complete == 1)
    await job.stop("drain")
    assert ("record", "data", 3) in log["model", 0]
    for step in ("model", "worker"):
        check_listener(log[step, 0])


# -- wanted inputs ---------------------------------------------------------------------------------------


class Picky(Witness):
    """Wants the inputs that ``wishes`` names, in turn: one wish for each record."""

    def __init__(self, log: Log, wishes: Sequence[tuple[str, ...] | None], **options: Any) -> None:
        super().__init__(log, **options)
        self._wishes = list(wishes)
        self._handled = 0

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return self._wishes[min(self._handled, len(self._wishes) - 1)]

    def process(self, record: Any, out: Any) -> None:
        self._handled += 1
        super().process(record, out)

    process_left = process_right = process_variable = process_data = process


@pytest.mark.parametrize("seed", SEEDS)
def test_records_come_from_the_wanted_input_only(seed: int) -> None:
    """A worker read examples before the parameters had arrived, and learned with the wrong ones."""
    flow, log = Flow("loop"), Log()
    wishes = [("left",), ("left",), ("right",), ("left",), None]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        picky = connect(left=data[0], right=data[1]).process(lambda: Picky(log, wishes), name="picky")
        return IterationBodyResult([variables[0]], [picky])

    streams = [cut_items(flow, [(name, number) for number in range(5)], seed=seed) for name in ("left", "right")]
    iterate_unbounded_streams([flow.from_items([])], streams, body)
    run(flow, seed=seed, limits=SMALL)
    records = [entry[1] for entry in kinds(log["picky", 0], "record")]
    assert records[:4] == [("left", 0), ("left", 1), ("right", 0), ("left", 2)]
    assert len(records) == 10
    check_listener(log["picky", 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_all_inputs_are_read_if_only_ended_ones_are_wanted(seed: int) -> None:
    """Workers with uneven partitions waited forever for data of the shorter partition."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        picky = connect(left=data[0], right=data[1], variable=variables[0]).process(
            lambda: Picky(log, [("left", "right"), ("left",)], on_record=lambda *_: None), name="picky"
        )
        return IterationBodyResult([picky], [])

    streams = [cut_items(flow, range(3), seed=seed), cut_items(flow, range(100, 120), seed=seed + 1)]
    iterate_unbounded_streams([flow.from_items(["start"])], streams, body)
    run(flow, seed=seed, limits=SMALL)
    entries = log["picky", 0]
    assert sorted(map(str, (entry[1] for entry in kinds(entries, "record")))) == sorted(
        ["start", *map(str, range(3)), *map(str, range(100, 120))]
    )
    at = entries.index(("input ended", "left"))
    before = [entry[1] for entry in entries[:at] if entry[0] == "record"]
    assert "start" not in before
    assert sum(number not in (0, 1, 2) for number in before) <= 1
    check_listener(entries)


# -- epochs in order -------------------------------------------------------------------------------------


class InOrder(Picky):
    epochs_in_order = True


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("parallelism", [1, 2])
def test_epochs_in_order_means_no_record_before_its_turn(seed: int, parallelism: int) -> None:
    """Asynchronous feedback and stamped data are ahead of their epoch, and were handled too early."""
    flow, log = Flow("loop"), Log()
    wishes: list[tuple[str, ...] | None] = [("data",), None]
    if parallelism == 1:
        wishes = [("variable",), ("data",), None, ("data",), ("data", "variable"), None]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        free = variables[0].map(lambda x: x - 1).filter(lambda x: x >= 0)
        connect(variable=free.rebalance(), data=data[0].rebalance()).process(
            lambda: InOrder(log, wishes), name="in order", parallelism=parallelism
        ).process(lambda: Witness(log), name="behind it")
        return IterationBodyResult([free], [])

    data = epochs_every(cut_items(flow, [("data", number) for number in range(17)], seed=seed), records=3)
    initial = cut_items(flow, [9, 4, 4, 1, 0], seed=seed)
    iterate_unbounded_streams([initial], [data], body)
    run(flow, seed=seed, limits=SMALL)
    entries = [entry for subtask in range(parallelism) for entry in log["in order", subtask]]
    for subtask in range(parallelism):
        check_listener(log["in order", subtask], in_order=True)
        check_listener(log["behind it", subtask], in_order=True)
        assert callbacks(log["in order", subtask]) == list(range(10))
    expected: list[tuple[Any, int]] = [(("data", number), number // 3) for number in range(17)]
    expected += [(left, epoch) for start in (9, 4, 4, 1, 0) for epoch, left in enumerate(range(start - 1, -1, -1))]
    assert sorted((entry[1:] for entry in kinds(entries, "record")), key=repr) == sorted(expected, key=repr)


def test_at_termination_the_rest_is_handled_in_epoch_order_before_terminated() -> None:
    """Records from a timer or the end of an input, in epochs without a callback, came after the termination."""
    flow, log = Flow("loop"), Log()

    def ahead(epoch: int, context: Any, out: Any) -> None:
        if epoch == 0:
            context.set_timer(0.0)

    class Late(Witness):
        def on_timer(self, payload: Any, out: Any) -> None:
            out.emit("timer")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        late = variables[0].process(
            lambda: Late(log, on_callback=ahead, on_terminated=lambda context, out: out.emit("last")), name="late"
        )
        late.process(lambda: InOrder(log, [None]), name="in order")
        return IterationBodyResult([late.filter(lambda x: False)], [])

    iterate_unbounded_streams([flow.from_items(["start"])], [], body)
    run(flow)
    entries = log["in order", 0]
    check_listener(entries, in_order=True)
    assert entries.index(("record", "last", 1)) < entries.index(("terminated", 1))


def test_records_set_aside_go_to_disk_above_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast source far ahead of a slow epoch filled the memory of its consumer."""
    opened: list[str] = []
    make = tempfile.TemporaryFile

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append("file")
        return make(*arguments, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    flow, log = Flow("loop"), Log()

    async def main() -> None:
        all_data_is_there = asyncio.Event()

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            both = connect(variable=variables[0], data=data[0]).process(lambda: InOrder(log, [None]), name="in order")
            return IterationBodyResult([both.filter(lambda x: False)], [])

        stamped = epochs_every(
            flow.from_source(lambda: CutItems([bytes([number]) * 10_000 for number in range(90)], 0)), records=1
        )
        held_open = flow.from_source(lambda: CutItems([b"start"], 0, at_end=all_data_is_there.wait))
        config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=100_000))
        iterate_unbounded_streams([held_open], [stamped], body, config)
        job = await flow.start()
        await until(lambda: job.statistics().step("data 0").records_in == 90)
        assert len(kinds(log["in order", 0], "record")) == 2
        all_data_is_there.set()
        await ended(job)

    run_shuffled(main())
    assert opened
    check_listener(log["in order", 0], in_order=True)
    data = [entry for entry in kinds(log["in order", 0], "record") if entry[1] != b"start"]
    assert data == [("record", bytes([number]) * 10_000, number) for number in range(90)]
