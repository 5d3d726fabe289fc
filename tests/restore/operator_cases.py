"""Cases of operators and sources: the state of each between two records."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from restore.case import Case, fed

from streamiter import (
    Columns,
    Flow,
    Operator,
    OutputTag,
    RocksState,
    Stream,
    WindowResult,
    connect,
    epochs_every,
    session,
    sliding,
    tumbling,
)
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.states.rocks_state import RocksStates
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task import Task
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Context, Output
from streamiter.operators.calls import MapAsync
from streamiter.operators.event_time import AssignEventTime, WatermarkGenerator
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.holding import HeldInput, Join, MiniBatch, ReduceAll, Sort, _Timeouts
from streamiter.operators.keyed import KeyedOperator
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.source import Collect
from streamiter.operators.timed.steps import TimedOperator

# In a set, the order of these keys differs between processes; the numbers are easily stored inexactly.
WORDS = ["to", "be", "or", "not", "to", "be", "that", "is", "the", "question", "or", "to"]
NUMBERS = np.array([3.5, -0.0, np.nan, 1e-308, 7.25, -2.5, 0.1, 0.2, 0.3])
ROWS = Columns({"x": np.arange(9, dtype=np.int32), "half": np.arange(9) / 2})


def length(word: str) -> int:
    return len(word)


class CountsWithTimers(Operator):
    """Counts each key, and emits its total some time after its first record."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        state = self.context.state
        if not state:
            self.context.set_timer(2.5, ("total", record))
        state["count"] = state.get("count", 0) + 1
        state.setdefault("seen", []).append(record)
        out.emit((self.context.key, state["count"]))

    def on_timer(self, payload: Any, out: Output) -> None:
        out.emit((self.context.key, payload, list(self.context.state.get("seen", ()))))


class EventTimers(Operator):
    """Sets timers ahead of each record and behind the watermark, and deletes some."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        timestamp = self.context.timestamp or 0
        self.context.set_event_timer(timestamp + 25, [record])
        self.context.set_event_timer(timestamp - 1, "behind")
        self.context.delete_event_timer(timestamp + 20, [record - 2])
        out.emit((record, timestamp, self.context.event_time))

    def on_event_timer(self, payload: Any, out: Output) -> None:
        out.emit((self.context.key, payload, self.context.event_time, self.context.timestamp))


class Zip(Operator):
    """Pairs the records of two inputs in turn."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("right",) if self.left else ("left",)

    def process_left(self, record: Any, out: Output) -> None:
        self.left.append(record)

    def process_right(self, record: Any, out: Output) -> None:
        out.emit((self.left.pop() if self.left else None, record))

    def finish(self, out: Output) -> None:
        out.emit(("left", list(self.left)))

    def snapshot(self) -> list[Any]:
        return list(self.left)

    def restore(self, state: list[Any]) -> None:
        self.left = list(state)


class Periodic(Operator):
    """Emits the new records every three seconds; its first timer is set in ``open``."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def open(self, context: Context) -> None:
        self.context = context
        context.set_timer(3.0)

    def process(self, record: Any, out: Output) -> None:
        self.came.append(record)

    def on_timer(self, payload: Any, out: Output) -> None:
        out.emit(self.came)
        self.came = []
        self.context.set_timer(3.0)

    def snapshot(self) -> list[Any]:
        return list(self.came)

    def restore(self, state: list[Any]) -> None:
        self.came = list(state)


class RunningSum(Operator):
    """Waits for a moment with each record, as a step that calls a server does."""

    def __init__(self) -> None:
        self.total = 0

    def open(self, context: Context) -> None:
        self.context = context

    async def process(self, record: int, out: Output) -> None:
        await self.context.clock.sleep(0.25)
        self.total += record
        out.emit(self.total)

    async def snapshot(self) -> int:
        return self.total

    async def restore(self, state: int) -> None:
        self.total = state


class RunningSumInAThread(RunningSum):
    """Adds in a thread."""

    runs_in_thread = True

    def process(self, record: int, out: Output) -> None:  # type: ignore[override]
        self.total += record
        out.emit(self.total)


async def ask(word: str) -> str:
    """Answer after a time that differs from word to word."""
    for _ in range(len(word) % 4):
        await asyncio.sleep(0)
    return word.upper()


# -- keyed -------------------------------------------------------------------------------------------------


def keyed_reduce(flow: Flow) -> Stream:
    words = fed(flow, [(word, number) for number, word in enumerate(WORDS)])
    return words.key_by(lambda pair: pair[0]).reduce(lambda a, b: (a[0], a[1] + b[1]), name="sums")


def keyed_reduce_batch(flow: Flow) -> Stream:
    rows = fed(flow, np.arange(11.0), batch=2)
    return rows.key_by_batch(lambda batch: batch.astype(np.int64) % 3).reduce(np.add, name="sums")


def stateful_map(flow: Flow) -> Stream:
    def remember(seen: list[str], word: str) -> tuple[list[str], tuple[str, ...]]:
        seen.append(word)
        return seen, tuple(seen)

    return fed(flow, WORDS).key_by(length).stateful_map(remember, list, name="seen")


def keyed_process(flow: Flow) -> Stream:
    return fed(flow, WORDS).key_by(length).process(CountsWithTimers, name="count")


def keyed_process_with_time_to_live(flow: Flow) -> Stream:
    return fed(flow, WORDS).key_by(length).process(CountsWithTimers, name="count", time_to_live_s=4.0)


def keyed_over_two_subtasks(flow: Flow) -> Stream:
    words = fed(flow, WORDS, parallelism=2)
    return words.key_by(lambda word: word).process(CountsWithTimers, name="count", parallelism=2)


# -- keyed, on disk ----------------------------------------------------------------------------------------


# An operator that finds the keys itself, and one with ``context.state``; others differ in nothing.


def keyed_reduce_batch_on_disk(flow: Flow) -> Stream:
    flow.state = ON_DISK
    return keyed_reduce_batch(flow)


def keyed_process_on_disk(flow: Flow) -> Stream:
    flow.state = ON_DISK
    return keyed_process_with_time_to_live(flow)


ON_DISK = RocksState(Path(tempfile.gettempdir(), "streamiter-restore"), memory_bytes=16 << 20)


# -- records held until a batch is full, or until the end ------------------------------------------------------


def mini_batches(flow: Flow) -> dict[str, Stream]:
    return {
        "lists": fed(flow, WORDS, name="words").batch(5),
        "arrays": fed(flow, NUMBERS, batch=2, name="numbers").batch(5),
        "columns": fed(flow, ROWS, batch=2, name="rows").batch(4).map(lambda rows: (rows["x"], rows["half"])),
    }


def mini_batches_with_a_timeout(flow: Flow) -> Stream:
    return fed(flow, WORDS, batch=2).batch(5, timeout_s=2.5)


def mini_batches_of_epochs(flow: Flow) -> Stream:
    return epochs_every(fed(flow, WORDS), records=4).batch(3, timeout_s=2.0)


def at_the_end(flow: Flow) -> dict[str, Stream]:
    numbers, words = fed(flow, NUMBERS, batch=2, name="numbers"), fed(flow, WORDS, name="words")
    return {
        # A sum with NaN is NaN, whatever was lost, and other sums of floats depend on the order.
        "reduced": numbers.map(lambda x: 0 if x != x else round(1000 * x)).reduce_all(lambda a, b: a + b, name="sum"),
        "sorted": words.sort(length, name="sorted"),
        "joined": words.map(lambda word: {"n": len(word), "word": word}).join(
            fed(flow, [{"n": 2, "name": "two"}, {"n": 3, "name": "three"}, {"n": 2, "name": "too"}], name="names"),
            on="n",
            name="joined",
        ),
    }


def collected(flow: Flow) -> dict[str, Any]:
    words = fed(flow, WORDS).map(str.upper)
    items = words.collect(name="items")
    return {"stream": words, "items": lambda: items.items}


# -- windows and joins by time --------------------------------------------------------------------------------

VISITS = [{"user": n % 3, "at": n * 10 - n * 37 % 60, "id": n} for n in range(24)]


def visits_by_user(flow: Flow, name: str, visits: list[dict[str, int]]) -> KeyedStream:
    stream = fed(flow, visits, name=name).event_time("at", unit="ms", check_unit=False, name=f"times of {name}")
    return stream.key_by(lambda visit: visit["user"])


def timed_windows(flow: Flow) -> dict[str, Stream]:
    keyed = visits_by_user(flow, "visits", VISITS)
    windows = {"tumbling": tumbling(0.04), "session": session(0.04), "sliding": sliding(0.05)}
    late = OutputTag("late")
    results = {
        name: keyed.window(
            window, name=name, allowed_lateness_s=0.03, early_every_s=2, late=late, results="retracting"
        ).aggregate(ids=("collect", "id"), mean=("mean", "at"), first="first", seen=("profile", "at"))
        for name, window in windows.items()
    }
    by_clock = keyed.window(tumbling(5), time="processing", early_every_s=2, name="clock").aggregate(("sum", "id"))
    return {**results, "late": results["tumbling"].side_output(late), "clock": by_clock}


def timed_joins(flow: Flow) -> dict[str, Stream]:
    left, right = visits_by_user(flow, "left", VISITS), visits_by_user(flow, "right", VISITS[::-1])
    table = fed(flow, VISITS[:6], name="table").key_by(lambda visit: visit["user"])
    return {
        "interval": left.interval_join(right, lower_s=-0.02, upper_s=0.03, how="full", name="interval"),
        "one": left.interval_join(right, lower_s=0, upper_s=None, how="full", one_to_one=True, kept_max=3, name="one"),
        "clock": left.interval_join(right, lower_s=-2, upper_s=3, how="full", time="processing", name="clock"),
        "window": left.window_join(right, session(0.02), how="full", name="window"),
        "as of": left.join_table(right, value="id", allowed_lateness_s=0.05, name="as of"),
        "now": left.join_table(table, time="processing", name="now"),
        "before": left.as_of_window(right, 0.05, name="before").aggregate(("sum", "id")),
        "once": left.deduplicate(lambda visit: visit["id"] % 2, within_s=0.03, name="once"),
        "window now": left.window_join(right, tumbling(5), how="left", time="processing", name="window now"),
        "once now": left.deduplicate(lambda visit: visit["id"] % 2, within_s=4, time="processing", name="once now"),
    }


# -- several inputs, timers, waiting --------------------------------------------------------------------------


def wanted_inputs(flow: Flow) -> Stream:
    left, right = fed(flow, range(7), name="left"), fed(flow, WORDS, batch=3, name="right")
    return connect(left=left, right=right).process(Zip, name="zip")


def timers_of_a_step(flow: Flow) -> Stream:
    return fed(flow, WORDS).process(Periodic, name="periodic")


def awaited_steps(flow: Flow) -> dict[str, Stream]:
    numbers = fed(flow, range(6))
    return {
        "awaited": numbers.process(RunningSum, name="awaited"),
        "thread": numbers.process(RunningSumInAThread, name="thread"),
    }


def calls_of_a_service(flow: Flow) -> dict[str, Stream]:
    words = fed(flow, WORDS, batch=3)
    return {
        "in order": words.map_async(ask, concurrency=2, name="in order"),
        "of epochs": epochs_every(words, records=4).map_async(ask, concurrency=3, name="of epochs").batch(3),
    }


def stateless_steps(flow: Flow) -> Stream:
    numbers = fed(flow, range(9), batch=2).map(lambda x: x * 3).filter(lambda x: x % 2 == 0)
    listed = numbers.flat_map(lambda x: range(x % 5)).map_batch(lambda batch: [x + 1 for x in batch])
    return listed.filter_batch(lambda batch: [x > 1 for x in batch])


def turns_of_a_rebalance(flow: Flow) -> Stream:
    return fed(flow, range(9)).rebalance().process(Tagged, name="tagged", parallelism=3)


class Tagged(Operator):
    """Emits the subtask of each record."""

    def open(self, context: Context) -> None:
        self.subtask = context.subtask_index

    def process(self, record: Any, out: Output) -> None:
        out.emit((self.subtask, record))


def timed(flow: Flow) -> Stream:
    records = [(7 * number) % 10 + 3 * number for number in range(12)]
    stream = fed(flow, records)
    return stream.event_time(lambda n: 10 * n, unit="ms", check_unit=False, out_of_orderness_s=0.03, name="times")


def event_time(flow: Flow) -> dict[str, Stream]:
    """Timers with and without keys, mini-batches that hold the watermark back, and a second event time."""
    stream = timed(flow)
    return {
        "keyed": stream.key_by(lambda n: n % 3).process(EventTimers, name="keyed"),
        "plain": stream.process(EventTimers, name="plain"),
        "batches": stream.batch(5, name="fives").map(list),
        "again": stream.event_time(lambda n: 5 * n, unit="ms", check_unit=False, name="other times").process(
            EventTimers, name="again"
        ),
    }


def event_time_over_channels(flow: Flow) -> dict[str, Stream]:
    """Watermarks of several channels; no record may be needed to know them again."""
    stream = timed(flow).rebalance().map(lambda n: n, parallelism=2, name="two")
    keyed = stream.key_by(lambda n: n % 3).process(EventTimers, parallelism=1, name="keyed")
    return {"keyed": keyed, "batches": stream.batch(3, name="threes").map(list)}


CASES = [
    Case(keyed_reduce, (KeyedOperator,)),
    Case(keyed_reduce_batch, (KeyedOperator,)),
    Case(stateful_map, (KeyedOperator,)),
    Case(keyed_process, (KeyedState, OperatorInstance, Task, Inbox, Port)),
    Case(keyed_process_with_time_to_live, (KeyedState,)),
    Case(keyed_over_two_subtasks, (KeyedState,), {"cuts": 4}),
    Case(keyed_reduce_batch_on_disk, (RocksStates,), {"cuts": 4}),
    Case(keyed_process_on_disk, (RocksStates,), {"cuts": 4}),
    Case(mini_batches, (MiniBatch, HeldInput), {"cuts": 8}),
    Case(mini_batches_with_a_timeout, (MiniBatch, _Timeouts)),
    Case(mini_batches_of_epochs, (MiniBatch, _Timeouts)),
    Case(at_the_end, (ReduceAll, Sort, Join), {"cuts": 8}),
    Case(collected, (Collect,)),
    Case(event_time, (AssignEventTime, WatermarkGenerator, StepTimes), {"cuts": 8}),
    Case(event_time_over_channels, (StepTimes, HeldInput), {"cuts": 4}),
    # The input that the inbox holds depends on the time of the barrier.
    Case(wanted_inputs, (Inbox,), {"compare_state": False}),
    Case(timers_of_a_step, (OperatorInstance,)),
    Case(awaited_steps, (OperatorInstance,)),
    # Which calls have returned depends on the time of the barrier.
    Case(calls_of_a_service, (MapAsync,), {"compare_state": False}),
    Case(stateless_steps, (OperatorInstance,), {"cuts": 3}),
    Case(turns_of_a_rebalance, (Task,), {"cuts": 4}),
    # Where no window is open at the cut, the numbers of windows begin anew.
    Case(timed_windows, (TimedOperator,), {"cuts": 8, "structs": (WindowResult,), "compare_state": False}),
    # The records that the inboxes hold depend on the time of the barrier.
    Case(timed_joins, (TimedOperator, KeyedOperator), {"cuts": 6, "compare_state": False}),
]
