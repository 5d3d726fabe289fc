"""Data that is replayed in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn, final

from streamiter.deferred import entries_of
from streamiter.errors import CheckpointError, GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.border import Entrance, end_of_all
from streamiter.iteration.loop import Advance, LoopCoordinator, Terminate
from streamiter.operators.operator import BoundaryOutput, Context, JobScope
from streamiter.records import Batch, Control, EpochWatermark

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache
    from streamiter.runtime.plan import Surroundings

__all__ = [
    "DataStream",
    "Replayed",
    "Replayer",
    "replayed",
]


@dataclass(frozen=True, slots=True)
class DataStream:
    """A data stream as an iteration was given it."""

    stream: Stream
    replayed: bool


class Replayed:
    """What :func:`replayed` gives: one of the ``data_streams`` of a bounded iteration, and nothing else.

    Data streams of a bounded iteration: as they are, or replayed in every epoch.
    """

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


@final
class _ReplayNext(Control):
    """Posted to itself: the next batch, after others have had their turn and what was emitted has found room."""

    __slots__ = ()


class Replayer(Entrance):
    """Keeps what passes it in epoch 0, and sends it again when an epoch from 1 on is complete.

    What was asked for while a replay is under way is a range of epochs, and the end comes behind them.

    The replayer: the entrance of a data stream that is sent again in every epoch.
    """

    def __init__(
        self, coordinator_of: Callable[[JobScope], LoopCoordinator], memory_limit_bytes: int
    ) -> None:
        super().__init__(coordinator_of, stamped=False, max_epochs_ahead=None)
        self._memory_limit_bytes = memory_limit_bytes
        self._replayed = 0
        """The last epoch that was sent to its end; at first epoch 0, once the data has ended."""
        self._asked_for = 0
        self._position = 0
        """Batches of epoch ``_replayed`` + 1 that have been sent."""
        self._terminate: Terminate | None = None
        self._untaken: Advance | None = None
        """What it was told last and has not handled, while it waits for room."""

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
            control = self._untaken = Advance(control.epoch)  # Others have been given the same object.
        super().tell(control)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self._cache.append(records)
        await super().on_batch(input_name, records, epoch, out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, Advance):
            self._untaken = None
            self.last_complete = control.epoch
            is_idle = self._asked_for == self._replayed
            self._asked_for = max(self._asked_for, control.epoch)
            if is_idle:
                await self._go_on(out)
        elif isinstance(control, _ReplayNext):
            await self._go_on(out)
        elif isinstance(control, Terminate) and self._asked_for > self._replayed:
            self._terminate = control
        else:
            await super().on_control(control, out)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Epoch 0 is over, and others will come."""
        await out.control(EpochWatermark(0))

    async def _go_on(self, out: BoundaryOutput) -> None:
        if self._asked_for > self._replayed:
            epoch = self._replayed + 1
            if self._position < len(self._cache):
                out.emit_batch(self._cache.batch(self._position), epoch)
                self._position += 1
            if self._position == len(self._cache):
                await out.control(EpochWatermark(epoch))
                self._replayed = epoch
                self._position = 0
        if self._asked_for > self._replayed:
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
            "asked for": self._asked_for,
            "position": self._position,
            "terminate": None if self._terminate is None else self._terminate.epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._cache.restore(state["cache"])
        self._replayed = state["replayed"]
        self._asked_for = state["asked for"]
        self._position = state["position"]
        if state["terminate"] is not None:
            self._terminate = Terminate(state["terminate"])
        if self._asked_for > self._replayed:
            self.context.post(_ReplayNext())
        super().restore(state)

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Batches are dealt out in turn: first those that the replay under way has sent, then the others."""
        with_data = [state for state in states if any(True for _ in state["cache"])] or states
        replayed = min(state["replayed"] for state in with_data)
        terminates = {state["terminate"] for state in states}
        is_over = end_of_all(states) is not None
        # What was sent of one epoch can be told from the rest, but not what was sent of two.
        further = [state for state in with_data if (state["replayed"], state["position"]) > (replayed + 1, 0)]
        if not is_over and (len(terminates) > 1 or further):
            raise CheckpointError("some of them are further in what they send again than others")
        sent = [state["position"] if state["replayed"] == replayed else None for state in states]
        caches = [state["cache"] for state in states]
        asked_for = max(state["asked for"] for state in states)
        shared = super().redistribute(states, parallelism)
        return [
            {
                **state,
                "cache": (share := _ReplayShare(caches, sent, subtask, parallelism)),
                "replayed": replayed,
                "asked for": asked_for,
                "position": share.count_sent() if asked_for > replayed else 0,
                "terminate": states[0]["terminate"],
            }
            for subtask, state in enumerate(shared)
        ]


@final
class _ReplayShare:
    """The batches of one new subtask, as frames of a cache's snapshot."""

    def __init__(
        self, caches: Sequence[Iterable[Any]], sent: Sequence[int | None], subtask: int, subtasks: int
    ) -> None:
        """``sent`` is how many batches of each cache were sent; None for all."""
        self._caches = caches
        self._sent = sent
        self._subtask = subtask
        self._subtasks = subtasks

    def __iter__(self) -> Iterator[list[Any]]:
        for entry in chain(self._dealt(are_sent=True), self._dealt(are_sent=False)):
            yield [entry]

    def count_sent(self) -> int:
        """How many of its batches come first because they were sent."""
        return sum(1 for _ in self._dealt(are_sent=True))

    def _dealt(self, *, are_sent: bool) -> Iterator[Any]:
        return islice(self._batches(are_sent=are_sent), self._subtask, None, self._subtasks)

    def _batches(self, *, are_sent: bool) -> Iterator[Any]:
        for frames, sent in zip(self._caches, self._sent, strict=True):
            if are_sent:
                yield from islice(entries_of(frames), sent)
            elif sent is not None:
                yield from islice(entries_of(frames), sent, None)
