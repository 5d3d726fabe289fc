"""What operators of a flow share beside its channels, with a state of its own: a parameter server.

The engine knows services by these protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["Service", "ServiceStatistics", "ServiceWorker"]


class ServiceWorker(Protocol):
    """One subtask's access to a service: what ``context.parameter_server`` is."""

    def counted_clocks(self) -> Mapping[str, int]:
        """Where it stands in each thing that makes workers wait for each other, by name: counts that only grow."""

    def call_when_further(self, further: Callable[[], None]) -> None:
        """From now on call this whenever one of these counts has grown, before anything waits for the others."""

    def pass_barrier(self, checkpoint: int) -> None:
        """What it sends from now on comes behind the barrier of this checkpoint."""

    async def leave(self, reason: str) -> None:
        """Its input has ended, or its job: the others do not wait for it any longer. May be called more than once."""


class ServiceStatistics(Protocol):
    """Where a service stands: a frozen object."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a drawing says of it, a line each."""


@runtime_checkable
class Service(Protocol):
    """Serves one job at a time."""

    name: str
    """Its state is found again by it, as that of a step is by the name of the step."""

    @property
    def drawn_as(self) -> str:
        """What a drawing says of it, below its name."""

    async def begin_job(
        self, flow: str, workers: int, state: Any, *, has_checkpoints: bool
    ) -> list[ServiceWorker]:
        """A job begins, with so many workers; goes on from ``state``, what ``take_state`` gave, unless that is None."""

    def checkpoint_begins(self, checkpoint: int) -> None:
        """Its barrier will come to every worker."""

    async def take_state(self, checkpoint: int) -> Any:
        """The state with all that lay before this barrier, and nothing behind it: plain data, and what is ``Deferred``.

        Returns once every worker has passed the barrier, or has left.
        """

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """Its state is not needed."""

    async def end_job(self, *, went_well: bool) -> None:
        """The job is over, and was not cut off in the middle of something. May be called more than once."""

    def statistics(self) -> ServiceStatistics:
        """Where it stands."""
