"""Data that a bounded iteration receives again in every epoch.

``replayed(stream)`` marks a data stream. The entrance of such a stream is a ``Replayer``: it keeps the records of
epoch 0, in memory and on disk, and sends them again whenever an epoch is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn, final

from streamiter.deferred import entries_of
from streamiter.errors import CheckpointError, GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.border import Entrance, end_of_all
from streamiter.iteration.coordinator import Advance, LoopCoordinator, Terminate
from streamiter.operators.operator import BoundaryOutput, Context, JobScope
from streamiter.records import Batch, Control, EpochWatermark
from streamiter.runtime.feedback import AttachedBoundary, Surroundings

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import ReplayCache


@dataclass(frozen=True, slots=True)
class DataStream:
    """A data stream in the arguments of an iteration."""

    stream: Stream
    replayed: bool
    """Whether it is sent again in every epoch."""


class Replayed:
    """The result of :func:`replayed`: it can only be one of the ``data_streams`` of a bounded iteration."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    if not TYPE_CHECKING:  # Type checkers know that it has no other attributes.

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
    """Send a data stream of a bounded iteration again in every epoch; source: FLIP-176's ``replay``.

    The entrance of the iteration keeps the records, in memory and above ``IterationConfig(replay_memory_bytes=…)`` on
    disk. In every epoch they arrive in the same order at the same subtask.

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


@final
class _ReplayNext(Control):
    """Posted to itself: send the next batch, after other tasks have had a turn and the last batch has found room."""

    __slots__ = ()


class Replayer(Entrance, AttachedBoundary):
    """The entrance of a replayed stream: it keeps the records of epoch 0 and sends them again in every later epoch.

    If further epochs are requested during a replay, they are replayed after it one by one, and the end of the iteration
    follows them.
    """

    def __init__(
        self, coordinator_of: Callable[[JobScope], LoopCoordinator], memory_limit_bytes: int
    ) -> None:
        super().__init__(coordinator_of, stamped=False, max_epochs_ahead=None)
        self._memory_limit_bytes = memory_limit_bytes
        self._replayed = 0
        """The last epoch that was sent completely; initially epoch 0, when the data has ended."""
        self._requested = 0
        self._position = 0
        """The number of batches of epoch ``_replayed`` + 1 that have been sent."""
        self._terminate: Terminate | None = None
        self._untaken: Advance | None = None
        """The last ``Advance`` that it was told and has not handled, while it waits for room."""

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        super().open(context)
        self._cache: ReplayCache = self._surroundings.make_replay_cache(self._memory_limit_bytes)
        self.coordinator.register_replay(self._cache)

    def tell(self, control: Control) -> None:
        if isinstance(control, Advance):
            if self._untaken is not None:
                self._untaken.epoch = control.epoch
                return
            control = self._untaken = Advance(control.epoch)  # A copy: other members have the same object.
        super().tell(control)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self._cache.append(records)
        await super().on_batch(input_name, records, epoch, out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, Advance):
            self._untaken = None
            self.last_complete = control.epoch
            has_finished = self._requested == self._replayed
            self._requested = max(self._requested, control.epoch)
            if has_finished:
                await self._send_next(out)
        elif isinstance(control, _ReplayNext):
            await self._send_next(out)
        elif isinstance(control, Terminate) and self._requested > self._replayed:
            self._terminate = control
        else:
            await super().on_control(control, out)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Tell the body that epoch 0 is over; its data does not end, because other epochs follow."""
        await out.control(EpochWatermark(0))

    async def _send_next(self, out: BoundaryOutput) -> None:
        if self._requested > self._replayed:
            epoch = self._replayed + 1
            if self._position < len(self._cache):
                out.emit_batch(self._cache.batch(self._position), epoch)
                self._position += 1
            if self._position == len(self._cache):
                await out.control(EpochWatermark(epoch))
                self._replayed = epoch
                self._position = 0
        if self._requested > self._replayed:
            self.context.post(_ReplayNext())
        elif self._terminate is not None:
            await super().on_control(self._terminate, out)

    def close(self) -> None:
        self._cache.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "cache": self._cache.snapshot(),
            "replayed": self._replayed,
            "asked for": self._requested,
            "position": self._position,
            "terminate": None if self._terminate is None else self._terminate.epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._cache.restore(state["cache"])
        self._replayed = state["replayed"]
        self._requested = state["asked for"]
        self._position = state["position"]
        if state["terminate"] is not None:
            self._terminate = Terminate(state["terminate"])
        if self._requested > self._replayed:
            self.context.post(_ReplayNext())
        super().restore(state)

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Deal out the batches in turn: first those that the current replay has sent, then the others."""
        with_data = [state for state in states if any(True for _ in state["cache"])] or states
        replayed = min(state["replayed"] for state in with_data)
        terminates = {state["terminate"] for state in states}
        is_over = end_of_all(states) is not None
        # A share can state how many of its batches were sent of one epoch, but not of two.
        further = [state for state in with_data if (state["replayed"], state["position"]) > (replayed + 1, 0)]
        if not is_over and (len(terminates) > 1 or further):
            raise CheckpointError("some of them are further in what they send again than others")
        sent = [state["position"] if state["replayed"] == replayed else None for state in states]
        caches = [state["cache"] for state in states]
        requested = max(state["asked for"] for state in states)
        shared = super().redistribute(states, parallelism)
        return [
            {
                **state,
                "cache": (share := _ReplayShare(caches, sent, subtask, parallelism)),
                "replayed": replayed,
                "asked for": requested,
                "position": share.count_sent() if requested > replayed else 0,
                "terminate": states[0]["terminate"],
            }
            for subtask, state in enumerate(shared)
        ]


@final
class _ReplayShare:
    """The batches of one new subtask, as frames of the snapshot of a cache."""

    def __init__(
        self, caches: Sequence[Iterable[Any]], sent: Sequence[int | None], subtask: int, subtasks: int
    ) -> None:
        """``sent`` is the number of batches of each cache that were sent; None for all."""
        self._caches = caches
        self._sent = sent
        self._subtask = subtask
        self._subtasks = subtasks

    def __iter__(self) -> Iterator[list[Any]]:
        for entry in chain(self._dealt(are_sent=True), self._dealt(are_sent=False)):
            yield [entry]

    def count_sent(self) -> int:
        """Return how many of its batches come first because they were sent."""
        return sum(1 for _ in self._dealt(are_sent=True))

    def _dealt(self, *, are_sent: bool) -> Iterator[Any]:
        return islice(self._batches(are_sent=are_sent), self._subtask, None, self._subtasks)

    def _batches(self, *, are_sent: bool) -> Iterator[Any]:
        for frames, sent in zip(self._caches, self._sent, strict=True):
            if are_sent:
                yield from islice(entries_of(frames), sent)
            elif sent is not None:
                yield from islice(entries_of(frames), sent, None)
