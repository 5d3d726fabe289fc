"""Batches that waited before a task, one by one and as often as needed; none is in memory for longer than its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

from streamiter.checkpoints.deferred_entries import entries_of
from streamiter.checkpoints.plain_data import PlainData
from streamiter.records import Batch

__all__ = ["Frames", "Waiting", "batches_held", "batches_queued", "entry_of"]


class Waiting(NamedTuple):
    """A batch that waited, as it is or encoded."""

    level: int
    """The watermark that came before it on its channel: every record of it has a later epoch."""
    epoch: int
    reader: int
    """The subtask before which it waited."""
    size: int
    """Records in it."""
    given: Batch | None
    content: bytes | None

    def records(self, plain_data: PlainData) -> Batch:
        """The batch itself."""
        if self.given is not None:
            return self.given
        assert self.content is not None
        return plain_data.decode_batch(self.content)


def batches_held(items: Iterable[tuple[str, Any, Any]], level: int, reader: int) -> Iterator[Waiting]:
    """Of what a gate held of one port: kind, payload and epoch."""
    for kind, payload, epoch in items:
        if kind == "data":
            yield Waiting(level, epoch, reader, len(payload), payload, None)
        elif kind == "watermark":
            level = epoch


def batches_queued(frames: Iterable[Any], level: int, reader: int) -> Iterator[Waiting]:
    """Of a queue, which may have control records among its batches."""
    for entry in entries_of(frames):
        kind, *rest = entry
        if kind == "data":
            epoch, count, content = rest
            yield Waiting(level, epoch, reader, count, None, content)
        elif kind == "epoch_watermark":
            [level] = rest


def entry_of(waiting: Waiting, plain_data: PlainData) -> tuple[Any, ...]:
    """A batch as the snapshot of a queue has it."""
    content = waiting.content
    if content is None:
        assert waiting.given is not None
        content = plain_data.encode_batch(waiting.given)
    return ("data", waiting.epoch, waiting.size, content)


@final
class Frames:
    """The decoded frames of a queue, made anew whenever one goes through them."""

    def __init__(self, make_entries: Callable[[], Iterator[tuple[Any, ...]]]) -> None:
        self._make_entries = make_entries

    def __iter__(self) -> Iterator[list[tuple[Any, ...]]]:
        for entry in self._make_entries():
            yield [entry]
