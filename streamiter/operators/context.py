"""What an operator knows of where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streamiter.clock import Clock
from streamiter.deferred import Encode
from streamiter.errors import ConfigurationError
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.service import ServiceWorker
from streamiter.operators.statistics import OperatorStatistics
from streamiter.records import BatchOrigin, Control

__all__ = ["Context", "JobScope", "Progress"]

T = TypeVar("T")


class Progress:
    """Where a task stands: shared by its operators, written by the task alone."""

    __slots__ = ("epoch", "handled", "is_ending", "origin", "watermark")

    def __init__(self) -> None:
        self.handled = 0
        """Grows with all that is handled: batches and control records, and single records where each is
        awaited or asked about. What does not grow here stands still."""
        self.epoch = 0
        self.watermark = -1
        self.is_ending = False
        self.origin: BatchOrigin | None = None
        """Where the batch that is being handled was read; None where that is not known, and outside batches."""


class JobScope:
    """Objects that the tasks of one job (in one process) share, made by whoever asks first."""

    def __init__(self) -> None:
        self._shared: dict[object, Any] = {}

    def get(self, key: object, create: Callable[[], T]) -> T:
        """The object under ``key``."""
        if key not in self._shared:
            self._shared[key] = create()
        shared: T = self._shared[key]
        return shared

    def put(self, key: object, shared: object) -> None:
        """Have everybody who asks for ``key`` from now on get this object."""
        self._shared[key] = shared


class Context:
    """Given to ``Operator.open``; valid until ``close``. Used by the operator's own task only."""

    def __init__(
        self,
        *,
        name: str,
        subtask_index: int,
        parallelism: int,
        clock: Clock,
        progress: Progress,
        statistics: Callable[[], OperatorStatistics],
        scope: JobScope,
        post: Callable[[Control], None],
        set_timer: Callable[[float, Any, Any], None],
        in_iteration: bool,
        keyed: KeyedState | None,
        encode: Encode,
    ) -> None:
        self.name = name
        self.subtask_index = subtask_index
        self.parallelism = parallelism
        self.clock = clock
        self.scope = scope
        self.post = post
        self.encode = encode
        """The flow's encoding of plain data, for state that is ``Deferred``."""
        self._progress = progress
        self._statistics = statistics
        self._set_timer = set_timer
        self._in_iteration = in_iteration
        self._keyed = keyed
        self._service_worker: ServiceWorker | None = None
        self.key: Any = None

    @property
    def epoch(self) -> int | None:
        """Epoch of the record (batch) or callback being handled.

        None outside an iteration, unless the stream was stamped with ``epochs_every``.
        """
        return self._progress.epoch if self._in_iteration else None

    @property
    def is_ending(self) -> bool:
        """Whether the iteration is known to have ended: on termination, in ``finish`` and while a rest is handled.

        Records of the last epoch mostly come before that is known.
        """
        return self._progress.is_ending

    @property
    def statistics(self) -> OperatorStatistics:
        """What this instance has handled so far."""
        return self._statistics()

    @property
    def state(self) -> Any:
        """State of the current ``key``: an empty dict at first; change it, or assign any plain data.

        Only after ``key_by``. What was handed out is to be changed only until the call at hand returns: a
        checkpoint is written while records flow on, and keeps a state as it was when it is next asked for.
        """
        return self._keyed_state().get(self.key)

    @state.setter
    def state(self, value: Any) -> None:
        self._keyed_state().set(self.key, value)

    @state.deleter
    def state(self) -> None:
        self._keyed_state().delete(self.key)

    @property
    def parameter_server(self) -> Any:
        """The client of this subtask, where the step was given ``parameter_server=``.

        A :class:`~streamiter.parameter_server.Client`, a registered worker from before ``open`` until the input ends.
        """
        if self._service_worker is None:
            raise ConfigurationError(
                f"context.parameter_server: expected a step with a parameter server, given step {self.name!r} without; "
                "write .process(…, parameter_server=server)"
            )
        return self._service_worker

    def serve_with(self, worker: ServiceWorker) -> None:
        """Be told of the step's service, before ``open``."""
        self._service_worker = worker

    def set_timer(self, delay_s: float, payload: Any = None) -> None:
        """Call ``on_timer(payload, out)`` in ``delay_s`` seconds, with the same ``context.key``.

        ``payload`` is plain data: timers are part of a snapshot. One that is still to come when the input has
        ended does not come any more: emit in ``finish`` what must not be lost, or in an iteration, which goes on
        when the data of a step has ended, in ``input_ended``.
        """
        self._set_timer(delay_s, self.key, payload)

    def _keyed_state(self) -> KeyedState:
        if self._keyed is None:
            raise ConfigurationError(
                "context.state: expected a step behind .key_by(f), given one without keys or with several inputs; "
                "write stream.key_by(f).process(…), or keep a dict of your own and give it in snapshot"
            )
        return self._keyed
