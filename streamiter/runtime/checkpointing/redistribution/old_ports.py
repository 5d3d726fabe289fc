"""The ports of a task as its snapshot has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from streamiter.checkpoints.deferred_entries import entries_of
from streamiter.runtime.checkpointing.redistribution.old_job import OldTask
from streamiter.runtime.checkpointing.redistribution.waiting import (
    Waiting,
    batches_held,
    batches_queued,
)
from streamiter.runtime.port import PortOrigin
from streamiter.runtime.topic_feedback.ranges import TopicRange
from streamiter.runtime.watermarks import WatermarkTracker

__all__ = ["OldPort", "gate_watermark", "old_ports", "origins"]


@dataclass(frozen=True, slots=True)
class OldPort:
    """What had come by one channel, and what of it waited."""

    reader: int
    """The subtask it was one of."""
    origin: PortOrigin
    watermark: int
    """As far as its records had been handled."""
    data_ended: bool
    """That it has ended was heard."""
    ended: bool
    data_epoch: int
    held: list[tuple[str, Any, Any]]
    """Kind, payload and epoch of what was taken from the channel."""
    aside: Iterable[Any]
    """The frames of what waited for its epoch's turn."""
    logged: Iterable[Any]
    """The frames of what came back in the loop until the barrier did."""

    def batches(self) -> Iterator[Waiting]:
        """All batches that waited, in order."""
        level = self.watermark
        yield from batches_held(self.held, level, self.reader)
        for kind, _, epoch in self.held:
            level = epoch if kind == "watermark" else level
        yield from batches_queued(self.aside, level, self.reader)
        yield from batches_queued(self.logged, level, self.reader)

    @property
    def in_topic(self) -> str | None:
        """The name of the topic in which what came back lies; None where it is here."""
        for entry in entries_of(self.logged):
            if (lying := TopicRange.of(entry)) is not None:
                return lying.topic
        return None

    @property
    def end_epoch(self) -> int | None:
        """The epoch of its end, where that waited."""
        return next((epoch for kind, _, epoch in self.held if kind == "end of input"), None)


def old_ports(task: OldTask) -> list[OldPort]:
    """Those of one task; none of a source."""
    gate = task.state["gate"]
    aside = {port: frames for port, frames, _ in gate["aside"]}
    logged = dict(task.logged)
    held: dict[int, list[tuple[str, Any, Any]]] = {}
    for port, *item in gate["held"]:
        held.setdefault(port, []).append(tuple(item))
    return [
        OldPort(
            task.subtask,
            PortOrigin(*origin),
            gate["watermarks"]["watermarks"][index],
            bool(gate["data_ended"][index]),
            bool(gate["ended"][index]) and bool(gate["data_ended"][index]),
            gate["data_epochs"][index],
            held.get(index, []),
            aside.get(index, ()),
            logged.get(index, ()),
        )
        for index, origin in enumerate(gate["ports"])
        if origin is not None
    ]


def origins(task: OldTask) -> list[PortOrigin | None]:
    """Where each of its ports had its records from."""
    return [None if origin is None else PortOrigin(*origin) for origin in task.state["gate"]["ports"]]


def gate_watermark(task: OldTask) -> int:
    """The watermark that all its ports had brought."""
    state = task.state["gate"]["watermarks"]
    tracker = WatermarkTracker(len(state["watermarks"]))
    tracker.restore(state)
    return tracker.watermark
