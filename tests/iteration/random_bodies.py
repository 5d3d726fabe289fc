"""Random bodies of iterations; listeners at many places record their calls.

In a bounded one a record makes at most ``ROUNDS_MAX`` rounds, and the outputs of an epoch follow from its inputs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from iteration.iteration_support import Dawdle, Log, callbacks, check_listener
from iteration.loop_ways import Loop, Remembering

from streamiter import (
    IterationBodyResult,
    IterationListener,
    Operator,
    OperatorLifeCycle,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    replayed,
)
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.iteration import terminate_after
from streamiter.operators.source import Collected

SEEN = OutputTag("seen")
ROUNDS_MAX = 5


class RememberingInOrder(Remembering):
    """A `Remembering` that handles one epoch after the other."""

    epochs_in_order = True


class OfOneRound(Operator, IterationListener):
    """Emits the sum of its records at the end of its round, and checks the order of its calls."""

    def __init__(self) -> None:
        self._sum = 0
        self._epoch: int | None = None
        self._met: list[str] = []

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: int, out: Any) -> None:
        self._add("input", record)

    def process_left(self, record: int, out: Any) -> None:
        self._add("left", record)

    def process_right(self, record: int, out: Any) -> None:
        self._add("right", record)

    def _add(self, input_name: str, record: int) -> None:
        assert not {input_name, "callback", "terminated", "close"} & set(self._met), self._met
        assert self._epoch in (None, self._context.epoch)
        self._epoch = self._context.epoch
        self._sum += record

    def input_ended(self, name: str, out: Any) -> None:
        assert name not in self._met
        self._met.append(name)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        assert self._epoch == epoch_watermark == context.epoch
        assert set(self._met) in ({"input"}, {"left", "right"})
        assert not context.is_ending
        self._met.append("callback")

    def on_iteration_terminated(self, context: Any, out: Any) -> None:
        assert context.is_ending
        self._met.append("terminated")

    def finish(self, out: Any) -> None:
        assert self._met[-1] in ("callback", "terminated")
        out.emit(self._sum % 7)
        self._met.append("finish")

    def close(self) -> None:
        self._met.append("close")
        assert self._met.count("close") == 1

    def snapshot(self) -> Any:
        return {"sum": self._sum, "epoch": self._epoch, "met": list(self._met)}

    def restore(self, state: Any) -> None:
        self._sum, self._epoch, self._met = state["sum"], state["epoch"], list(state["met"])


class LeftFirst(OfOneRound):
    """Wants all records of one input in its round before the other input, as a hash join does."""

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return None if "left" in self._met else ("left",)

    def process_right(self, record: int, out: Any) -> None:
        assert "left" in self._met
        super().process_right(record, out)


class LeftLeads(Operator, IterationListener):
    """Begins each epoch with a record of input ``left`` if the epoch has one, as a step with a variable does."""

    epochs_in_order = True

    def __init__(self) -> None:
        self._turn, self._led = 0, -1

    def open(self, context: Any) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("left",) if self._led < self._turn else None

    def process_left(self, record: int, out: Any) -> None:
        self._led = self._context.epoch
        self.process_right(record, out)

    def process_right(self, record: int, out: Any) -> None:
        assert self._context.epoch >= self._turn
        out.emit(record)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        assert epoch_watermark == self._turn
        self._turn = epoch_watermark + 1

    def snapshot(self) -> Any:
        return [self._turn, self._led]

    def restore(self, state: Any) -> None:
        self._turn, self._led = state


class GoRound(Operator, IterationListener):
    """Emits every record with its epoch, and feeds it back minus one until it is 0 or the last round is reached."""

    def __init__(self, *, synchronous: bool, rounds_max: int = ROUNDS_MAX) -> None:
        self._synchronous, self._rounds_max = synchronous, rounds_max
        self._kept: dict[int, list[int]] = {}

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: int, out: Any) -> None:
        epoch = self._context.epoch
        out.emit((epoch, record), tag=SEEN)
        if record > 0 and epoch < self._rounds_max:
            if self._synchronous:
                self._kept.setdefault(epoch, []).append(record - 1)
            else:
                out.emit(record - 1)

    process_left = process_right = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        for record in self._kept.pop(epoch_watermark, ()):
            out.emit(record)

    def snapshot(self) -> Any:
        return [(epoch, list(records)) for epoch, records in self._kept.items()]

    def restore(self, state: Any) -> None:
        self._kept = {epoch: list(records) for epoch, records in state}


class Pass(Operator):
    """Passes every batch on."""

    def process_batch(self, batch: Any, out: Any) -> None:
        out.emit_batch(batch)

    process_left_batch = process_right_batch = process_batch


class PassKeyed(Operator):
    """Passes each record on."""

    def process(self, record: int, out: Any) -> None:
        out.emit(record)


@dataclass
class MadeBody:
    """The outputs of a random loop, and the logs of its steps."""

    log: Log
    seen: list[Collected] = field(default_factory=list)
    has_criteria: bool = False
    in_order: set[str] = field(default_factory=set)

    def heard(self) -> dict[Any, list[int]]:
        """Return the epochs of the callbacks of each listener."""
        return {instance: callbacks(entries) for instance, entries in self.log.items()}

    def check_listeners(self) -> None:
        """Check the rules for every listener."""
        for (name, _), entries in self.log.items():
            check_listener(entries, in_order=name in self.in_order)

    def outputs(self) -> list[list[Any]]:
        return [sorted(collected.items) for collected in self.seen]


class Maker:
    """Makes one loop; the same seed makes the same loop."""

    def __init__(self, seed: int, loop: Loop) -> None:
        self._seed, self._loop = seed, loop
        self._chosen = random.Random(seed)
        self._may_listen = True
        self.made = MadeBody(loop.log)

    def bounded(self) -> MadeBody:
        """Make a bounded loop, of which each result follows from its inputs."""
        chosen = self._chosen
        self.made.has_criteria = chosen.random() < 0.4
        whole = chosen.random() < 0.15
        self._may_listen = not whole
        variables = [self._source(6) for _ in range(chosen.randint(1, 3))]
        data: list[Any] = [self._source(4) for _ in range(chosen.randint(0, 2))]
        data = [replayed(stream) if chosen.random() < 0.5 else stream for stream in data]
        self.made.seen = self._loop.collect(
            variables,
            data,
            self._body_per_round if whole else self._body,
            operator_life_cycle=OperatorLifeCycle.PER_ROUND if whole else OperatorLifeCycle.ALL_ROUND,
            feedback_limits=self._feedback_limits(),
            replay_memory_bytes=chosen.choice([0, 1 << 20]),
        )
        return self.made

    def unbounded(self) -> Callable[[], None]:
        """Make an unbounded loop, in which each record counts down; return a function that checks its results."""
        chosen = self._chosen
        items, group = self._items(5), chosen.choice([None, 1, 3])
        starts = [(0, record) for record in items]
        streams: list[Stream] = []
        if chosen.random() < 0.7:
            given, subtasks = self._items(4), chosen.randint(1, 3)
            stream = self._loop.items(given, subtasks)
            streams = [stream if group is None else epochs_every(stream, records=group).rebalance()]
            starts += [(0 if group is None else at // subtasks // group, record) for at, record in enumerate(given)]
        ahead = chosen.choice([None, 0, 1, 3]) if not streams or group is not None else None

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            turn = self._turn([self._steps(stream) for stream in [*variables, *data]], rounds_max=100)
            return IterationBodyResult([self._steps(turn).rebalance()], [turn.side_output(SEEN)])

        variable, limits = self._loop.items(items, chosen.randint(1, 3)), self._feedback_limits()
        config: dict[str, Any] = {"max_epochs_ahead": ahead, "feedback_limits": limits, "is_unbounded": True}
        self.made.seen = self._loop.collect([variable], streams, body, **config)

        def check() -> None:
            self.made.check_listeners()
            expected = [(epoch + done, record - done) for epoch, record in starts for done in range(record + 1)]
            assert self.made.outputs() == [sorted(expected)]

        return check

    def _items(self, highest: int) -> list[int]:
        chosen = self._chosen
        return [chosen.randint(0, highest) for _ in range(chosen.choice([0, 1, 5, 10]))]

    def _source(self, highest: int) -> Stream:
        return self._loop.items(self._items(highest), self._chosen.randint(1, 3))

    def _feedback_limits(self) -> FeedbackLimits:
        return FeedbackLimits(memory_bytes=self._chosen.choice([0, 200, 1 << 20]))

    def _body(self, variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        chosen = self._chosen
        streams = [self._steps(stream) for stream in [*variables, *data]]
        if chosen.random() < 0.5:
            self._part_per_round(streams)
        turns = [self._turn(chosen.sample(streams, k=min(len(streams), 2))) for _ in variables]
        feedback = [self._steps(turn, short=True).rebalance() for turn in turns]
        # This stream has an observer only.
        self._listen(chosen.choice(streams))
        outputs = [turn.side_output(SEEN) for turn in turns]
        outputs += [stream.process(Show) for stream in chosen.sample(streams, k=1)]
        return IterationBodyResult(feedback, outputs, self._criteria(turns))

    def _body_per_round(self, variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        chosen = self._chosen
        streams = [*variables, *data]
        self.made.has_criteria = False
        summed = [self._sum(chosen.sample(streams, k=min(len(streams), 2))) for _ in variables]
        turns = [
            stream.rebalance().process(lambda: GoRound(synchronous=False), parallelism=chosen.randint(1, 3))
            for stream in summed
        ]
        return IterationBodyResult([turn.rebalance() for turn in turns], [turn.side_output(SEEN) for turn in turns])

    def _criteria(self, turns: list[Stream]) -> Stream | None:
        if not self.made.has_criteria:
            return None
        chosen = self._chosen
        if chosen.random() < 0.5:
            return terminate_after(chosen.choice(turns), rounds=chosen.randint(1, 4))
        return chosen.choice(turns).filter(lambda x: x % 3 > 0)

    def _turn(self, streams: list[Stream], rounds_max: int = ROUNDS_MAX) -> Stream:
        chosen = self._chosen
        parallelism, synchronous = chosen.randint(1, 3), chosen.random() < 0.3

        def make() -> GoRound:
            return GoRound(synchronous=synchronous, rounds_max=rounds_max)

        if len(streams) == 1:
            return streams[0].rebalance().process(make, parallelism=parallelism)
        left, right = (stream.rebalance() for stream in streams)
        if chosen.random() < 0.3:
            led = connect(left=left, right=right).process(LeftLeads, parallelism=chosen.randint(1, 3))
            return led.rebalance().process(make, parallelism=parallelism)
        return connect(left=left, right=right).process(make, parallelism=parallelism)

    def _part_per_round(self, streams: list[Stream]) -> None:
        """Put some of the streams through a part that has new operators in each round."""
        chosen = self._chosen
        places = chosen.sample(range(len(streams)), k=min(len(streams), chosen.randint(1, 2)))

        def part(given: list[Stream]) -> list[Stream]:
            self._may_listen = False
            given = [self._steps(stream, short=True) for stream in given]
            self._may_listen = True
            return [self._sum(given), *given[1:]]

        for place, stream in zip(places, for_each_round([streams[at] for at in places], part), strict=True):
            streams[place] = stream

    def _sum(self, streams: list[Stream]) -> Stream:
        chosen, parallelism = self._chosen, self._chosen.randint(1, 2)
        if len(streams) == 1:
            if chosen.random() < 0.3:
                return streams[0].reduce_all(max)
            return streams[0].partition_by(lambda x: x).process(OfOneRound, parallelism=parallelism)
        left, right = (stream.partition_by(lambda x: x) for stream in streams)
        make = chosen.choice([OfOneRound, LeftFirst])
        return connect(left=left, right=right).process(make, parallelism=parallelism)

    def _listen(self, stream: Stream) -> Stream:
        name = f"listener {len(self._loop.flow.steps)}"
        in_order = self._chosen.random() < 0.4
        if in_order:
            self.made.in_order.add(name)
        log, kind = self.made.log, RememberingInOrder if in_order else Remembering
        return stream.process(lambda: kind(log), name=name)

    def _steps(self, stream: Stream, *, short: bool = False) -> Stream:
        for _ in range(self._chosen.randint(0, 1 if short else 3)):
            stream = self._step(stream)
        return stream

    def _step(self, stream: Stream) -> Stream:
        chosen = self._chosen
        parallelism, seed = chosen.randint(1, 3), chosen.randint(0, 99)
        ways: list[Callable[[], Stream]] = [
            lambda: stream.map(lambda x: x),
            lambda: stream.rebalance().process(Pass, parallelism=parallelism),
            lambda: stream.key_by(lambda x: x).process(PassKeyed, parallelism=parallelism),
            lambda: stream.partition_by(lambda x: x).process(Pass, parallelism=parallelism),
            lambda: stream.rebalance().process(lambda: Dawdle(seed), parallelism=parallelism),
            lambda: stream.filter(lambda x: x % 2 == 0).union(stream.filter(lambda x: x % 2 == 1)),
            lambda: connect(
                left=stream.filter(lambda x: x % 3 == 0).rebalance(), right=stream.filter(lambda x: x % 3 != 0)
            ).process(Pass),
            lambda: stream.batch(3).flat_map(list),
        ]
        if self._may_listen:
            ways += 4 * [lambda: self._listen(stream)]
        return chosen.choice(ways)()


class Show(Operator):
    """Emits each record with its epoch."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        out.emit((self._context.epoch, record))
