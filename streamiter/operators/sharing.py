"""How the engine helps an operator to share out its state among another number of subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from streamiter.records import Batch

__all__ = ["Sharing"]


class Sharing(Protocol):
    """For the engine's own operators: what waits in them goes where the edge it came by would take it now."""

    @property
    def parallelism(self) -> int:
        """The new number of subtasks."""

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Batches that each old subtask had kept of an input, for each new one; their order is kept."""

    def queues(self, input_name: str, waiting: Sequence[Any]) -> list[Any]:
        """The same for what the old subtasks had set aside for later epochs, as its snapshots."""
