"""Who may do what when: ASP, BSP and SSP over the workers' clocks. Pure data structures, no I/O, no tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamiter.errors import InternalError
from streamiter.parameter_server.consistency.models import (
    ASP,
    BSP,
    SSP,
    AsynchronousModel,
    BulkSynchronousModel,
    Consistency,
    ConsistencyModel,
    Released,
    StaleSynchronousModel,
)
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker

__all__ = ["ASP", "BSP", "SSP", "Consistency", "ConsistencyModel", "ProgressTracker", "Released", "model_of"]


def model_of(
    consistency: Consistency, workers: Iterable[int] = (), name: str = ""
) -> ConsistencyModel[Any, Any]:
    """The model of a consistency, with these workers at clock 0; ``name`` is what errors begin with ("matrix 'w'").

    >>> model = model_of(SSP(staleness=1), workers=[0, 1])
    >>> model.clock(0), model.clock(0), model.get(0, "a get that waits")
    ([], [], False)
    >>> model.clock(1)
    [Released(clock=1, adds=[], gets=['a get that waits'])]
    """
    tracker = ProgressTracker(workers, name=name)
    match consistency:
        case ASP():
            return AsynchronousModel(tracker)
        case BSP():
            return BulkSynchronousModel(tracker)
        case SSP(staleness):
            return StaleSynchronousModel(tracker, staleness)
    raise InternalError(f"expected ASP(), BSP() or SSP(staleness=…), given {consistency!r}")
