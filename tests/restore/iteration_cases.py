"""Cases of iterations: the state at the border of a loop, its epochs and rounds, and records in the loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from restore.case import Case, Pieces, fed, turns

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
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.order import Marks
from streamiter.engine.inbox.port_log import LaterEpochs
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.engine.tasks.chain import Rounds
from streamiter.iteration.border import CriteriaHead, Entrance, Head, LoopMember, ReceivedEpochs, ReceivingHead
from streamiter.iteration.helpers import (
    LastRound,
    MapWith,
    ReduceEpoch,
    TerminateAfter,
    all_reduce,
    last_round,
    map_with,
    terminate_after,
)
from streamiter.iteration.marked_streams import Replayer
from streamiter.iteration.progress import EpochCounts
from streamiter.iteration.stamping import CatchingUp, Stamper, TimedStamper
from streamiter.operators import Context, Output
from streamiter.operators.source import Positions, SourceBatch

WORDS = ["to", "be", "or", "not", "--", "to", "be", "that", "--", "is", "the"]


class WithEpochs(Operator, IterationListener):
    """Emits each record with its epoch, each callback with the earlier records, and the end."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        self.came.append((self.context.epoch, record))
        out.emit((self.context.epoch, record))

    process_left = process_right = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        # The order of records of several inputs is undefined; records of later epochs may have arrived already.
        out.emit(("epoch", epoch_watermark, sorted((c for c in self.came if c[0] <= epoch_watermark), key=repr)))
        self.came = [came for came in self.came if came[0] > epoch_watermark]

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        out.emit(("terminated", sorted(self.came, key=repr)))

    def snapshot(self) -> list[Any]:
        return list(self.came)

    def restore(self, state: list[Any]) -> None:
        self.came = list(state)


class InOrder(WithEpochs):
    """Emits the same, one epoch after the other."""

    epochs_in_order = True


# -- stamping ----------------------------------------------------------------------------------------------


def stamped_by_records(flow: Flow) -> Stream:
    return epochs_every(fed(flow, WORDS), records=3).process(WithEpochs, name="seen")


def stamped_by_marks(flow: Flow) -> Stream:
    stamped = epochs_every(fed(flow, WORDS, batch=2), marks=lambda word: word == "--")
    return stamped.process(WithEpochs, name="seen")


def stamped_by_time(flow: Flow) -> Stream:
    return epochs_every(fed(flow, WORDS), seconds=2.5).process(WithEpochs, name="seen")


class WithoutPartition(Pieces):
    """Gives all records to subtask 0; subtask 1 has no partition, and no step waits for it."""

    def open(self, context: Context, positions: Positions | None) -> None:
        self._is_silent = context.subtask_index == 1
        super().open(context, positions)

    def is_idle(self) -> bool:
        return self._is_silent

    def read(self) -> SourceBatch | None:
        return None if self._is_silent else super().read()


def stamped_with_a_silent_subtask(flow: Flow) -> Stream:
    words = flow.from_source(lambda: WithoutPartition(WORDS, 1), name="in", parallelism=2)
    return epochs_every(words, records=2).process(WithEpochs, name="seen", parallelism=1)


# -- unbounded ---------------------------------------------------------------------------------------------


def _round_and_round(flow: Flow, config: IterationConfig) -> dict[str, Stream]:
    """Build a loop whose records are a number and its remaining rounds, with a listener for all epochs."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        seen = variables[0].union(data[0]).map(lambda x: x)
        back = seen.filter(lambda x: x[1] > 0).map(lambda x: (x[0], x[1] - 1))
        return IterationBodyResult([back], {"seen": seen, "heard": seen.process(WithEpochs, name="heard")})

    initial = fed(flow, [(100 + number, number % 3) for number in range(3)], name="initial")
    data = epochs_every(fed(flow, [(number, number % 4) for number in range(7)], name="data"), records=2)
    outputs: dict[str, Stream] = iterate_unbounded_streams([initial], [data], body, config)
    return outputs


def unbounded_loop(flow: Flow) -> dict[str, Stream]:
    return _round_and_round(flow, IterationConfig())


def unbounded_synchronous_loop(flow: Flow) -> dict[str, Stream]:
    return _round_and_round(flow, IterationConfig(max_epochs_ahead=0))


def unbounded_loop_on_disk(flow: Flow) -> dict[str, Stream]:
    limits = FeedbackLimits(memory_bytes=0)
    return _round_and_round(flow, IterationConfig(feedback_limits=limits, max_epochs_ahead=0))


def _sum_of(flow: Flow, listener: type[Operator]) -> dict[str, Stream]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        both = connect(left=variables[0], right=data[0]).process(listener, name="both")
        back = variables[0].filter(lambda n: n < 5).map(lambda n: n + 1)
        return IterationBodyResult([back], {"both": both})

    numbers = fed(flow, [0, 2], name="numbers")
    words = epochs_every(fed(flow, WORDS, name="words"), records=3)
    outputs: dict[str, Stream] = iterate_unbounded_streams([numbers], [words], body)
    return outputs


def listener_of_two_inputs(flow: Flow) -> dict[str, Stream]:
    return _sum_of(flow, WithEpochs)


def epochs_in_order(flow: Flow) -> dict[str, Stream]:
    return _sum_of(flow, InOrder)


# -- bounded -----------------------------------------------------------------------------------------------


def bounded_with_criteria(flow: Flow) -> dict[str, Stream]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        halved = variables[0].map(lambda x: x / 2)
        outputs = {
            "halved": halved,
            "last": last_round(halved, name="last"),
            "heard": halved.process(WithEpochs, name="heard"),
        }
        return IterationBodyResult([halved], outputs, halved.filter(lambda x: x > 0.25))

    outputs: dict[str, Stream] = iterate_bounded_streams_until_termination(
        [fed(flow, [4.0, 3.0], name="start")], [], body
    )
    return outputs


def bounded_with_rounds_and_replay(flow: Flow) -> dict[str, Stream]:
    return _rounds_of_sums(flow, IterationConfig())


def bounded_with_replay_from_disk(flow: Flow) -> dict[str, Stream]:
    return _rounds_of_sums(flow, IterationConfig(replay_memory_bytes=0))


def _rounds_of_sums(flow: Flow, config: IterationConfig) -> dict[str, Stream]:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        scaled = map_with(data[0], variables[0], lambda factor, batch: factor * batch, name="scaled")
        sums = all_reduce(scaled, name="sums").filter(lambda _: True, parallelism=1)
        back = variables[0].map(lambda n: n + 1)
        criteria = terminate_after(sums, rounds=4, name="rounds")
        return IterationBodyResult([back], {"sums": sums, "last": last_round(sums, name="last")}, criteria)

    data = fed(flow, np.arange(10.0), batch=3, name="data", parallelism=2)
    outputs: dict[str, Stream] = iterate_bounded_streams_until_termination(
        [fed(flow, [1.0], name="start")], [replayed(data)], body, config
    )
    return outputs


def bounded_with_tolerance(flow: Flow) -> Stream:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[list[Stream]]:
        halved = variables[0].map(lambda x: x / 2)
        return IterationBodyResult([halved], [halved], terminate_after(halved, rounds=9, tolerance=0.6, name="end"))

    starts = [fed(flow, [4.0, 3.0], name="start")]
    [halved] = iterate_bounded_streams_until_termination(starts, [], body)
    return halved


def bounded_with_a_step_for_each_round(flow: Flow) -> dict[str, Stream]:
    def within(streams: Sequence[Stream]) -> list[Stream]:
        [numbers] = streams
        return [
            numbers.reduce_all(lambda a, b: a + b, name="sum"),
            numbers.sort(lambda x: -x, name="descending"),
            numbers.process(WithEpochs, name="heard"),
        ]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        raised = variables[0].map(lambda n: n + 1)
        total, descending, heard = for_each_round([variables[0].union(data[0])], within)
        outputs = {"sum": total, "descending": descending, "heard": heard}
        return IterationBodyResult([raised.filter(lambda n: n < 9)], outputs)

    data = replayed(fed(flow, [10, 20, 30], name="data"))
    outputs: dict[str, Stream] = iterate_bounded_streams_until_termination(
        [fed(flow, [1, 5], name="start")], [data], body
    )
    return outputs


LOOP = (LoopMember, ReceivingHead, Head, Entrance, ReceivedEpochs)

CASES = [
    Case(stamped_by_records, (CatchingUp, Stamper)),
    Case(stamped_by_marks, (Stamper,)),
    Case(stamped_by_time, (TimedStamper,)),
    # With this seed the silent subtask ends late.
    Case(stamped_with_a_silent_subtask, (Stamper,), {"seed": 15}),
    Case(unbounded_loop, LOOP),
    Case(unbounded_loop, (*LOOP, FeedbackChannel), turns(ordered=False)),
    Case(unbounded_synchronous_loop, (*LOOP, Inbox), {"cuts": 5}),
    Case(unbounded_synchronous_loop, (*LOOP, EpochCounts), turns()),
    Case(unbounded_loop_on_disk, (*LOOP, SpillQueue), turns()),
    Case(listener_of_two_inputs, LOOP, {"cuts": 6}),
    Case(epochs_in_order, (*LOOP, LaterEpochs, Marks), {"cuts": 6}),
    Case(epochs_in_order, (*LOOP, LaterEpochs), turns(ordered=False)),
    Case(bounded_with_criteria, (Head, CriteriaHead, LastRound), turns()),
    Case(bounded_with_rounds_and_replay, (Replayer, ReplayCache, ReduceEpoch, MapWith, TerminateAfter), turns()),
    Case(bounded_with_rounds_and_replay, (Replayer, MapWith), {"cuts": 4, "compare_state": False}),
    Case(bounded_with_replay_from_disk, (Replayer, ReplayCache), turns(3)),
    Case(bounded_with_tolerance, (TerminateAfter,), turns()),
    Case(bounded_with_a_step_for_each_round, (Rounds,), turns(8)),
]
