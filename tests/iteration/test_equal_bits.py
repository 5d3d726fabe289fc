"""Random synchronous loops of floats: each step receives the same sequence, to the last bit, at any speed of tasks.

The flows have bounded and unbounded loops, stamped and replayed data, several feedback edges, feedback in topics,
operators that choose their inputs, and a second loop behind the first.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import pytest
from iteration.iteration_support import cut_items, run
from iteration.loop_ways import WAYS, Loop, Way
from runtime.probe import turns
from support.soak import ForEachSeed

from streamiter import (
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.iteration import all_reduce, terminate_after
from streamiter.operators import Context, Output
from streamiter.operators.source import Collected

T = TypeVar("T")


class Lag(Operator):
    """Passes records on in pieces of random length, after delays; some subtasks are a hundred times slower."""

    def __init__(self, schedule: int, place: int) -> None:
        self._seed = f"{schedule} {place}"

    def open(self, context: Any) -> None:
        self._random = random.Random(f"{self._seed} {context.subtask_index}")
        self._delay_s = self._random.choice([0, 0, 0.002, 0.02, 0.2])

    async def process_batch(self, batch: Any, out: Any) -> None:
        start = 0
        while start < len(batch):
            stop = start + self._random.randint(1, 4)
            out.emit_batch(batch[start:stop])
            start = stop
            await asyncio.sleep(self._delay_s * self._random.random())


class Fold(Operator, IterationListener):
    """Adds its records in the order of arrival, and logs all its calls; its snapshot has the log."""

    def __init__(self, logs: dict[Any, list[Any]], emits: str) -> None:
        self._logs, self._emits = logs, emits
        self._log: list[Any] = []
        self._sum, self._records = 0.0, 0

    def open(self, context: Any) -> None:
        self._context = context
        self._logs[context.name, context.subtask_index] = self._log

    def process_left(self, record: float, out: Any) -> None:
        self._take("left", record, out)

    def process_right(self, record: float, out: Any) -> None:
        self._take("right", record, out)

    process = process_left

    def _take(self, side: str, record: float, out: Any) -> None:
        self._log.append((side, record.hex(), self._context.epoch))
        self._sum, self._records = small(0.97 * self._sum + record), self._records + 1
        if self._emits == "each" or (self._emits == "third" and self._records % 3 == 0):
            out.emit(self._sum)

    def input_ended(self, name: str, out: Any) -> None:
        self._log.append((name, "ended"))
        if self._emits == "callback":
            out.emit(self._sum)
        self._sum = self._sum / 3 + len(name)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        self._log.append(epoch_watermark)
        if self._emits == "callback" and self._records:
            out.emit(self._sum)
        self._sum /= 2

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        self._log.append("terminated")
        out.emit(self._sum / 11)

    def snapshot(self) -> Any:
        return [self._sum, self._records, list(self._log)]

    def restore(self, state: Any) -> None:
        self._sum, self._records = state[:2]
        self._log[:] = [tuple(entry) if isinstance(entry, list) else entry for entry in state[2]]


class InOrder(Fold):
    epochs_in_order = True


class LeftFirst(InOrder):
    """Reads all records of one input in an epoch before the other input."""

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("left",)


class Alternating(InOrder):
    """Chooses another input after each record."""

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return [("left",), ("right",), None][self._records % 3]


class WhileEarly(Operator):
    """Passes the first records of each epoch on, while the epoch is low, so that the loop ends."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._passed = rounds, dict[int, int]()

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: float, out: Any) -> None:
        epoch = self._context.epoch
        self._passed[epoch] = self._passed.get(epoch, 0) + 1
        if epoch < self._rounds and self._passed[epoch] <= 6:
            out.emit(record / 3)

    def snapshot(self) -> Any:
        return list(self._passed.items())

    def restore(self, state: Any) -> None:
        self._passed = dict(state)


def small(x: float) -> float:
    return x if abs(x) < 1e12 else x * 1e-13


def digit(x: float) -> int:
    return int(abs(x) * 100) % 7


class Maker:
    """Makes one flow; the same seed makes the same flow, and the seed of the loop decides the speed of its tasks."""

    def __init__(self, seed: int, loop: Loop) -> None:
        self._chosen, self._looped, self._schedule = random.Random(seed), loop, loop.seed
        self._places, self.log = count(), dict[Any, list[Any]]()
        outputs = self._loop([])
        if self._is_bounded and self._chosen.random() < 0.3:
            outputs = self._loop([output.rebalance() for output in outputs])
        for output in outputs:
            output.collect()

    def _loop(self, data: list[Any]) -> list[Stream]:
        chosen = self._chosen
        self._is_bounded = bounded = chosen.random() < 0.5
        variables = [self._source([1, 4, 9]) for _ in range(chosen.randint(1, 3))]
        for _ in range(chosen.randint(0, 2)):
            stream = self._source([0, 1, 7, 20])
            if not bounded and chosen.random() < 0.7:
                stream = self._stamped(stream)
                if chosen.random() < 0.4:
                    stream = stream.union(self._stamped(self._source([7, 20])))
            stream = chosen.choice([stream, stream.rebalance(), stream.partition_by(digit)])
            data.append(replayed(stream) if bounded and chosen.random() < 0.5 else stream)
        limits = FeedbackLimits(memory_bytes=chosen.choice([0, 300, 1 << 20]))
        outputs: list[Stream] = self._looped.iterate(
            variables, data, self._body, is_unbounded=not bounded, feedback_limits=limits
        )
        return outputs

    def _source(self, sizes: Sequence[int]) -> Stream:
        chosen = self._chosen
        numbers = [chosen.uniform(-1, 1) * 10 ** chosen.randint(-8, 8) for _ in range(chosen.choice(sizes))]
        stream = self._looped.items(numbers, chosen.randint(1, 3))
        place = next(self._places)
        return stream.process(lambda: Lag(self._schedule, place))

    def _stamped(self, stream: Stream) -> Stream:
        if self._chosen.random() < 0.3:
            return epochs_every(stream, marks=lambda x: digit(x) < 2)
        return epochs_every(stream, records=self._chosen.randint(1, 5))

    def _body(self, variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        chosen = self._chosen
        streams = [self._steps(self._dealt(stream)) for stream in [*variables, *data]]
        for _ in range(chosen.randint(1, 3)):
            streams[chosen.randrange(len(streams))] = self._join(streams)
        if self._is_bounded and chosen.random() < 0.3:
            place = chosen.randrange(len(streams))
            [streams[place]] = for_each_round(
                [streams[place]], lambda given: [given[0].rebalance().reduce_all(lambda a, b: small(0.9 * a + b))]
            )
        rounds = chosen.randint(1, 5)
        turns = [self._join(streams) for _ in variables]
        feedback = [self._fed_back(turn, turns, rounds) for turn in turns]
        criteria = None
        if self._is_bounded and chosen.random() < 0.4:
            criteria = terminate_after(chosen.choice(turns), rounds=3, tolerance=chosen.choice([None, 1e-30]))
        return IterationBodyResult(feedback, [self._join([*turns, *streams])], criteria)

    def _fed_back(self, turn: Stream, turns: Sequence[Stream], rounds: int) -> Stream:
        chosen = self._chosen
        back = self._steps(turn).rebalance().process(lambda: WhileEarly(rounds), parallelism=chosen.randint(1, 3))
        back = chosen.choice([back.rebalance(), back.broadcast(), back.partition_by(digit)])
        if chosen.random() < 0.3:
            other = chosen.choice(turns).rebalance().process(lambda: WhileEarly(rounds))
            back = back.union(other.rebalance())
        return back

    def _join(self, streams: Sequence[Stream]) -> Stream:
        chosen, log = self._chosen, self.log
        emits, parallelism = chosen.choice(["each", "third", "callback"]), chosen.randint(1, 3)
        given = [self._dealt(stream) for stream in chosen.sample(streams, k=min(len(streams), 2))]
        if len(given) == 1 or chosen.random() < 0.3:
            kind: type[Fold] = chosen.choice([Fold, InOrder])
            return given[0].union(*given[1:]).process(lambda: kind(log, emits), parallelism=parallelism)
        kind = chosen.choice([Fold, InOrder, LeftFirst, Alternating])
        return connect(left=given[0], right=given[1]).process(lambda: kind(log, emits), parallelism=parallelism)

    def _dealt(self, stream: Stream) -> Stream:
        ways = [stream.rebalance, stream.rebalance, stream.broadcast, lambda: stream.partition_by(digit)]
        return self._chosen.choice(ways)()

    def _steps(self, stream: Stream) -> Stream:
        for _ in range(self._chosen.randint(0, 2)):
            stream = self._step(stream)
        return stream

    def _step(self, stream: Stream) -> Stream:
        parallelism, place, log = self._chosen.randint(1, 3), next(self._places), self.log
        ways: list[Callable[[], Stream]] = [
            lambda: stream.rebalance().process(lambda: Lag(self._schedule, place), parallelism=parallelism),
            lambda: stream.partition_by(digit).process(lambda: Fold(log, "each"), parallelism=parallelism),
            lambda: stream.key_by(digit).stateful_map(
                lambda total, x: (small(0.9 * total + x), small(0.9 * total + x)), 0.0, parallelism=parallelism
            ),
            lambda: stream.filter(lambda x: digit(x) < 3).rebalance().union(stream.filter(lambda x: digit(x) > 2)),
            lambda: stream.batch(3).map(lambda numbers: small(sum(numbers))),
            lambda: all_reduce(stream, lambda a, b: small(0.9 * a + b)),
        ]
        return self._chosen.choice(ways)()


def log_of(seed: int, schedule: int, way: Way) -> dict[Any, list[Any]]:
    """Return the logs of all steps in a run of one flow, in simulated time."""
    return replace(way, is_simulated=True).run(lambda loop: Maker(seed, loop), schedule).log


def check(seed: int) -> None:
    """Check one flow, half of them through topics, at two speeds, and stopped and resumed."""
    at_once, schedule = Way(through_topics=seed % 2 == 1), 1_000 * seed
    expected = log_of(seed, schedule, at_once)
    assert log_of(seed, schedule + 1, at_once) == expected
    assert log_of(seed, schedule + 2, replace(at_once, stopped_by="snapshot")) == expected


@pytest.mark.parametrize("seed", range(4))
def test_each_step_has_the_same_sequence_at_any_speed(seed: int) -> None:
    """A step added its floats in another order in one of two runs, or a loop stood still in one of them."""
    check(seed)


def check_processes(seed: int) -> None:
    """Check one flow without topics in one process, and stopped and resumed in two and three."""
    expected = log_of(2 * seed, 1_000 * seed, Way())
    for processes in (2, 3):
        way = Way(processes=processes, stopped_by="checkpoint")
        assert log_of(2 * seed, 1_000 * seed + processes, way) == expected


@pytest.mark.parametrize("seed", range(3))
def test_each_step_has_the_same_sequence_in_any_number_of_processes(seed: int) -> None:
    """A model trained in two processes had other last digits, or a resumed one had some feedback twice."""
    check_processes(seed)


@pytest.mark.soak
@pytest.mark.parametrize("check", [check, check_processes])
def test_each_step_of_any_loop_has_the_same_sequence(
    check: Callable[[int], None], for_each_soak_seed: ForEachSeed
) -> None:
    """Only one arrangement in a hundred had another order."""
    for_each_soak_seed(check)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_loop_with_repartitioned_stamped_data_ends_if_epochs_may_be_ahead(ahead: int) -> None:
    """An entrance with a batch too far ahead read no channel, not even one with records of the current epoch."""

    def build(loop: Loop) -> Collected:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            mixed = (
                variables[0].rebalance().union(data[0].rebalance().process(lambda: Lag(loop.seed, 0), parallelism=2))
            )
            return IterationBodyResult([mixed.filter(lambda x: x < 0).rebalance()], [mixed])

        data = epochs_every(loop.items(range(60), parallelism=3), records=4).rebalance()
        [passed] = loop.collect([loop.items([0] * 5, parallelism=2)], [data], body, is_unbounded=True)
        return passed

    for seed in range(6):
        assert sorted(WAYS["in simulated time"].run(build, seed, ahead).items) == sorted([*[0] * 5, *range(60)])


def test_records_before_their_turn_beyond_the_limit_on_disk_end_the_job() -> None:
    """A loop set aside all data of one subtask, and filled the disk."""
    flow = Flow("limit")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0]], [data[0].rebalance().map(float, parallelism=1)])

    config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=0, disk_bytes=2_000))
    data = cut_items(flow, [n / 7 for n in range(2_000)], parallelism=2)
    iterate_bounded_streams_until_termination([flow.from_items([])], [data], body, config)
    with pytest.raises(StreamiterError, match="expected at most 2000 bytes of batches waiting on disk"):
        run(flow)


class Slow(Operator):
    """Its first subtask takes several turns of the loop for each record."""

    def open(self, context: Context) -> None:
        self.turns = 7 if context.subtask_index == 0 else 0

    async def process(self, record: int, out: Output) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        out.emit(record)


def slow_loop() -> tuple[Flow, Collected]:
    """Return a synchronous loop with two initial and two data channels, one of which is slow."""

    def spread(stream: Stream, name: str) -> Stream:
        return stream.rebalance().map(lambda record: record, parallelism=2, name=name)

    flow = Flow("slow")
    initial = spread(flow.from_items([0] * 4, name="initial"), "spread")
    data = epochs_every(spread(flow.from_items(list(range(1, 41)), name="data"), "spread data"), records=4)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        slow = data[0].process(Slow, name="slow", parallelism=2)
        back = slow.map(lambda record: record, name="back", parallelism=2).rebalance()
        return IterationBodyResult([back], [variables[0].map(lambda record: record, name="seen")])

    [seen] = iterate_unbounded_streams([initial.rebalance()], [data], body, IterationConfig(max_epochs_ahead=0))
    return flow, seen.collect()


async def test_a_synchronous_loop_is_restored_at_any_turn() -> None:
    """An end of data waited behind feedback that was set aside. The restored head took it for feedback, and failed."""
    flow, whole = slow_loop()
    await (await flow.start()).wait()
    restored = 0
    for first_turns in range(20, 400, 9):
        flow, _ = slow_loop()
        job = await flow.start()
        await turns(first_turns)
        try:
            snapshot = await job.snapshot()
        except ConfigurationError:  # The job has ended.
            break
        await job.stop("abort")
        flow, seen = slow_loop()
        await (await flow.start(snapshot=snapshot)).wait()
        assert sorted(seen.items) == sorted(whole.items), first_turns
        restored += 1
    assert restored > 10
