"""Loops through topics that are stopped and restarted: a flow, its outputs, and the content of its checkpoints."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import orjson

from streamiter import (
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    feedback_through,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.engine.graph.feedback import TopicRange
from streamiter.engine.storage.store import CheckpointStore
from streamiter.engine.tasks.task_barriers import PartName
from streamiter.iteration.border import FEEDBACK
from streamiter.topics import ReadRequest, Topic
from streamiter.values.deferred import entries_of
from streamiter.values.plain_data import PlainData

MakeTopic = Callable[..., Awaitable[Topic]]

Kind = Literal["synchronous", "one ahead", "asynchronous", "unbounded"]
KINDS: list[Kind] = ["synchronous", "one ahead", "asynchronous", "unbounded"]

FLOW = "tokens"
"""On a shared broker the flow needs a unique name, which is the key of its commit records."""


class PerEpoch(Operator, IterationListener):
    """Emits the number of records of each epoch at its end: ``["epoch", epoch, records]``."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        epoch = self._context.epoch
        self._counts[epoch] = self._counts.get(epoch, 0) + 1

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit(["epoch", epoch_watermark, self._counts.pop(epoch_watermark, 0)])

    def snapshot(self) -> Any:
        return dict(self._counts)

    def restore(self, state: Any) -> None:
        self._counts = dict(state)


class Door(Operator):
    """Passes records on while it is open."""

    def __init__(self, door: asyncio.Event | None) -> None:
        self._door = door

    async def process_batch(self, batch: Any, out: Any) -> None:
        if self._door is not None:
            await self._door.wait()
        out.emit_batch(batch)


def laps(token: int, most: int) -> int:
    """Return the number of rounds of a token."""
    return 1 + token * 7 % most


def token_flow(
    through: Topic | None,
    out: Topic,
    *,
    tokens: int,
    most: int,
    kind: Kind,
    name: str = FLOW,
    parallelism: int = 2,
    door: asyncio.Event | None = None,
    limits: FeedbackLimits | None = None,
) -> Flow:
    """Return a flow whose tokens make `laps` rounds; each visit is counted by token and by epoch, and goes to ``out``.

    The feedback goes through a topic, or stays in memory if the topic is None. While ``door`` is closed, the loop
    waits.
    """
    flow = Flow(name, parallelism=parallelism)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        counted = (
            variables[0]
            .key_by(lambda at: at[0])
            .stateful_map(lambda visits, at: (visits + 1, (at[0], at[1], visits)), 0, name="visits")
        )
        seen = counted.map(lambda at: ["visit", *at])
        epochs = counted.process(PerEpoch, name="per epoch", parallelism=1)
        left = counted.filter(lambda at: at[1] > 1).map(lambda at: (at[0], at[1] - 1))
        back = left.process(lambda: Door(door), name="door").rebalance()
        feedback = back if through is None else feedback_through(back, through)
        return IterationBodyResult([feedback], [seen, epochs])

    items = [(token, laps(token, most)) for token in range(tokens)]
    initial = flow.from_items(items, name="initial")
    ahead = {"synchronous": 0, "one ahead": 1}.get(kind)
    config = IterationConfig(max_epochs_ahead=ahead, feedback_limits=limits or FeedbackLimits())
    iterate = iterate_unbounded_streams if kind == "unbounded" else iterate_bounded_streams_until_termination
    seen, epochs = iterate([initial], [], body, config)
    seen.sink(out, name="seen")
    epochs.sink(out, name="epochs")
    return flow


def check_undisturbed(written: list[Any], *, tokens: int, most: int) -> None:
    """Check that ``written`` equals the output of an undisturbed flow: no record is lost or doubled."""
    expected: Counter[tuple[Any, ...]] = Counter()
    for token in range(tokens):
        rounds = laps(token, most)
        expected.update(("visit", token, rounds - visit, visit) for visit in range(rounds))
    for epoch in range(max(laps(token, most) for token in range(tokens))):
        expected["epoch", epoch, sum(laps(token, most) > epoch for token in range(tokens))] += 1
    given = Counter(map(tuple, written))
    assert given == expected, f"lost: {list(expected - given)[:5]}, too many: {list(given - expected)[:5]}"


async def values_in(topic: Topic) -> list[Any]:
    """Return the values that a reader of committed records receives now."""
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    values: list[Any] = []
    try:
        while (batch := await reader.read()) is not None:
            values += [orjson.loads(value) for value in batch.values if value is not None]
    finally:
        await reader.close()
    return values


async def end_of(topic: Topic) -> int:
    """Return the sum of the ends of its partitions, which grows with each record."""
    return sum(end for _, end in (await topic.describe()).offsets.values())


async def logged_in_last(store: CheckpointStore, flow: str = FLOW) -> list[Any]:
    """Return the feedback in transit in the last checkpoint: ranges of topics, and entries of queues."""
    pointer = await store.pointer(flow)
    if pointer is None or pointer.committed is None:
        return []
    plain_data = PlainData()
    stored = await store.open(flow, pointer.committed)
    try:
        entries: list[Any] = []
        for name in stored.part_names():
            if PartName.of(name).kind == FEEDBACK:
                logged = plain_data.decode_state(
                    await stored.content(name),
                    lambda number, name=name: list(map(plain_data.decode, stored.frames(name, number))),
                )
                for _, frames, ranges in logged:
                    entries += [*entries_of(frames or ()), *map(TopicRange.from_plain, ranges)]
        return entries
    finally:
        stored.close()
