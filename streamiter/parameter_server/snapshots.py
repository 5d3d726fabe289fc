"""The states of shards, put together and taken out of their wrappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred

__all__ = ["clock_in", "in_memory", "is_state", "merged", "thawed"]


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a server, from what its shards gave in ``freeze`` at one moment; what ``Shard.restore`` takes."""
    matrices: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, matrix in state["matrices"].items():
            if (there := matrices.get(name)) is None:
                matrices[name] = {
                    **matrix,
                    "blocks": list(matrix["blocks"]),
                    "pending": list(matrix["pending"]),
                }
            else:
                there["blocks"].extend(matrix["blocks"])
                there["pending"].extend(matrix["pending"])
    first = states[0]
    return {"matrices": matrices, "workers": first["workers"], "arrivals": first["arrivals"]}


def is_state(given: Any) -> bool:
    """Whether this looks like what ``merged`` gives."""
    if not isinstance(given, Mapping) or not {"matrices", "workers", "arrivals"} <= given.keys():
        return False
    matrices = given["matrices"]
    return isinstance(matrices, Mapping) and all(
        isinstance(matrix, Mapping) and "clocks" in matrix for matrix in matrices.values()
    )


def thawed(state: Any, plain_data: PlainData) -> Any:
    """A state without anything ``Deferred`` in it: the frames instead, decoded."""
    if isinstance(state, Deferred):
        frames = [plain_data.decode(frame) for frame in state.frames()]
        state.release()
        return frames
    if isinstance(state, Mapping):
        return {key: thawed(value, plain_data) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(thawed(value, plain_data) for value in state)
    return state


def in_memory(state: Any) -> Any:
    """A state as it is given to be restored, with all that it would read piece by piece from a store."""
    if isinstance(state, Mapping):
        return {key: in_memory(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(in_memory(value) for value in state)
    if isinstance(state, Iterable) and not isinstance(state, (str, bytes, np.ndarray)):
        return list(state)
    return state


def clock_in(clocks: Mapping[str, Any], worker: int) -> int:
    """Where a worker stands in the state of a tracker; one that was not there stands at the minimum."""
    progress: Mapping[int, int] = clocks["progress"]
    minimum: int = clocks["min_clock"]
    return progress.get(worker, minimum)
