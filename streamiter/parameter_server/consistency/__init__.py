"""Consistency of a matrix: which add is applied, and which get is answered, at which of the workers' clocks.

``models`` has the three consistencies (ASP, BSP, SSP) and their rules; ``progress_tracker`` has the clocks, and the
adds and gets that wait for them. All are pure data structures: no I/O, no tasks.
"""

from streamiter.parameter_server.consistency.models import (
    ASP,
    BSP,
    SSP,
    Consistency,
    ConsistencyModel,
    Released,
    model_of,
)
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker

__all__ = ["ASP", "BSP", "SSP", "Consistency", "ConsistencyModel", "ProgressTracker", "Released", "model_of"]
