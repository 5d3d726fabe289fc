"""Data streams of a bounded iteration: as they are, or replayed in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream

__all__ = ["DataStream", "Replayed", "replayed"]


@dataclass(frozen=True, slots=True)
class DataStream:
    """A data stream as an iteration was given it."""

    stream: Stream
    replayed: bool


class Replayed:
    """What :func:`replayed` gives: one of the ``data_streams`` of a bounded iteration, and nothing else."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    if not TYPE_CHECKING:  # Type checkers know that there is nothing else.

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise GraphError(
                f"replayed: expected replayed({self.stream.name!r}) to be one of the data_streams of a bounded "
                f"iteration, given .{name} of it; take that of the stream first, then replayed(…)"
            )

    def __repr__(self) -> str:
        return f"replayed({self.stream.name!r})"


def replayed(stream: Stream) -> Replayed:
    """Have a data stream of a bounded iteration sent again in every epoch; source: FLIP-176's ``replay``.

    Its records are kept at the entrance of the iteration, in memory and beyond
    ``IterationConfig(replay_memory_bytes=…)`` on disk, and come in every epoch in the same order at the same
    subtask.

    Raises GraphError for a stream that never ends or that ``epochs_every`` has stamped.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("three times")
    >>> def body(variables, data):
    ...     rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([rounds], data)
    >>> [seen] = iterate_bounded_streams_until_termination(
    ...     [flow.from_items([0])], [replayed(flow.from_items([10, 20]))], body
    ... )
    >>> collected = seen.collect()
    >>> flow.run().state, collected.items
    ('finished', [10, 20, 10, 20, 10, 20])
    """
    if not isinstance(stream, Stream):
        raise GraphError(f"replayed: expected a stream, given {stream!r}; write replayed(stream)")
    if not stream.is_bounded:
        raise GraphError(
            f"replayed: expected a bounded stream, given {stream.name!r}, which never ends; read the topic with "
            'stop="latest", or use it as it is in an unbounded iteration'
        )
    if any(step.stamped for step in stream.steps):
        raise GraphError(
            f"replayed: expected a stream without epochs, given {stream.name!r} of epochs_every; what is replayed "
            "gets the epochs of the iteration"
        )
    return Replayed(stream)
