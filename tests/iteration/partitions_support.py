"""Topics whose partitions a test fills one by one, and steps that record the stamped streams of these topics."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from iteration.iteration_support import Dawdle, Log, Witness

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.engine.job.job import Job
from streamiter.testing import VirtualClock
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, Topic


async def made(partitions: int) -> Topic:
    """Create a topic in memory."""
    topic = MemoryBroker().topic("clicks")
    await topic.create(partitions=partitions)
    return topic


async def write(topic: Topic, partition: int, numbers: Iterable[int]) -> None:
    """Append numbers to a partition."""
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([b"%d" % number for number in numbers], partition=partition))
    await writer.close()


def train(stamped: Stream, log: Log) -> None:
    """Add a synchronous loop; its one step is called at every epoch, and feeds back in each of the first epochs."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(variable=variables[0], data=data[0].rebalance()).process(
            lambda: Witness(
                log,
                on_record=lambda record, context, out: None,
                on_callback=lambda epoch, context, out: out.emit(("model", epoch)) if epoch < 12 else None,
            ),
            name="train",
            parallelism=1,
        )
        return IterationBodyResult([both], [])

    initial = stamped.flow.from_items([("model", -1)])
    iterate_unbounded_streams([initial], [stamped], body, IterationConfig(max_epochs_ahead=0))


def data_of(log: Log) -> list[tuple[int, int]]:
    """Return the numbers that the loop was trained with, and their epochs."""
    return [(entry[1], entry[2]) for entry in log["train", 0] if entry[0] == "record" and type(entry[1]) is int]


def before(name: str, source: Stream, seed: int) -> Stream:
    """Add steps between the source and the stamps."""
    if name == "tasks":
        return source.process(lambda: Dawdle(seed)).map(lambda x: x).process(lambda: Dawdle(seed))
    return source if name == "nothing" else source.map(lambda x: x)


# -- steps behind the stamps -------------------------------------------------------------------------------


Entry = tuple[int, str, int, int]
"""The subtask, "record" or "callback", the epoch, the number."""


class Track(Operator, IterationListener):
    """Emits its records and callbacks in order."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        number = record["x"] if isinstance(record, dict) else record
        out.emit((self._context.subtask_index, "record", self._context.epoch, int(number)))

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit((context.subtask_index, "callback", epoch_watermark, -1))


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": np.array,
    "columns": lambda numbers: Columns({"x": numbers}),
}


def number_of(record: Any) -> int:
    return int(record["x"] if isinstance(record, dict) else record)


def is_mark(record: Any) -> bool:
    return number_of(record) % 7 == 3


WAYS: dict[str, dict[str, Any]] = {
    "records": {"records": 4},
    "records, idle": {"records": 4, "idle_timeout": 8},
    "one record": {"records": 1},
    "marks": {"marks": is_mark},
    "marks, idle": {"marks": is_mark, "idle_timeout": 3},
    "seconds": {"seconds": 5},
    "seconds, idle": {"seconds": 5, "idle_timeout": 2},
}


def tracked(stamped: Stream) -> Any:
    return stamped.process(Track, name="track").collect(name="seen")


def records_in(seen: list[Entry], subtask: int) -> list[tuple[int, int]]:
    """Return the numbers of a subtask with their epochs."""
    return [(entry[3], entry[2]) for entry in seen if entry[0] == subtask and entry[1] == "record"]


def callbacks_in(seen: list[Entry], subtask: int) -> list[int]:
    return [entry[2] for entry in seen if entry[0] == subtask and entry[1] == "callback"]


def check(seen: list[Entry], subtasks: int) -> None:
    """Check each subtask: epochs never decrease, and each watermark comes after the records of its epoch."""
    for subtask in range(subtasks):
        heard = callbacks_in(seen, subtask)
        assert heard == list(range(len(heard))), heard
        watermark, epoch = -1, 0
        for of, kind, at, number in seen:
            if of != subtask:
                continue
            if kind == "callback":
                watermark = at
            else:
                assert at > watermark, f"{number} of epoch {at} after watermark {watermark}"
                assert at >= epoch, f"{number} of epoch {at} after epoch {epoch}"
                epoch = at


async def settled(clock: VirtualClock) -> None:
    """Let the tasks run until they have nothing more to do at this time."""
    for _ in range(5):
        await clock.advance(0)


async def timed_job(parallelism: int = 2, *, partitions: int = 2, **ways: Any) -> tuple[VirtualClock, Topic, Job, Any]:
    """Start a job with its own virtual clock that stamps the partitions of a topic."""
    clock, topic, flow = VirtualClock(), await made(partitions), Flow("stamps")
    seen = tracked(epochs_every(flow.source(topic, parallelism=parallelism), **ways))
    return clock, topic, await flow.start(clock=clock), seen
