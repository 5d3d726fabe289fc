"""Services: objects with state that the operators of a flow share, such as a parameter server.

The engine knows services by these protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class ServiceWorker(Protocol):
    """The access of one subtask to a service: the type of ``context.parameter_server``."""

    def counted_clocks(self) -> Mapping[str, int]:
        """Return the worker's clocks by name. A clock only grows, and workers wait for each other's clocks."""

    def call_when_further(self, further: Callable[[], None]) -> None:
        """Call ``further`` whenever one of these clocks has grown, before the worker waits for others."""

    def pass_barrier(self, checkpoint: int) -> None:
        """Send later requests after the barrier of this checkpoint."""

    async def leave(self, reason: str) -> None:
        """Leave the service, since the input or the job has ended: the others do not wait for this worker any longer.

        May be called more than once.
        """


class ServiceStatistics(Protocol):
    """Statistics of a service: a frozen object."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines that a drawing shows about the service."""


@runtime_checkable
class Service(Protocol):
    """An object with state that the operators of a flow share, such as a parameter server. It serves one job at a time.

    The engine knows services by these protocols only.
    """

    name: str
    """The name of its state in a checkpoint, as the name of a step."""

    @property
    def drawn_as(self) -> str:
        """The text that a drawing shows below the name."""

    def divide(self, own: int, processes: int, send: Callable[..., Callable[[], None]]) -> None:
        """Several processes run the next job, each with a part of the service; this is process ``own``.

        ``send(process, …)`` sends plain data to the service in another process, whose ``received`` takes it. It returns
        a function, which must be called before an array of the data changes: the array may not have left yet.
        """

    def received(self, process: int, *contents: Any) -> None:
        """Take a message of the same service in another process."""

    async def begin_job(
        self, flow: str, workers: int, states: Sequence[Any], *, here: Sequence[int], has_checkpoints: bool
    ) -> list[ServiceWorker]:
        """Begin a job with this many workers in all processes; return those with the numbers ``here``.

        It resumes from ``states``, which ``take_state`` returned in all processes of an earlier run, if there are any.
        """

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A checkpoint begins: its barrier will pass every worker."""

    async def take_state(self, checkpoint: int) -> Any:
        """Return the state with the requests before this barrier and none after it: plain data and ``Deferred`` parts.

        It is the state of the part in this process; None if there is none here. Returns when every worker has passed
        the barrier or has left.
        """

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """The checkpoint was abandoned; its state is not needed."""

    async def end_job(self, *, went_well: bool) -> None:
        """End the job. It was not cut off in the middle of a call. May be called more than once."""

    def statistics(self) -> ServiceStatistics:
        """Return the statistics of the service."""
