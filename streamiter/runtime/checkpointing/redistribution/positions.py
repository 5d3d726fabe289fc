"""Where sources go on, for another number of subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.errors import StreamiterError
from streamiter.runtime.checkpointing.redistribution.old_job import OldJob
from streamiter.runtime.feeder import Feeder
from streamiter.runtime.graph import Step

__all__ = ["positions_for"]


def positions_for(
    old: OldJob, step: Step, feeder: Feeder, positions: Sequence[dict[Any, Any]]
) -> Sequence[dict[Any, Any]]:
    """The positions of each new subtask from those of the old ones."""
    count, before = step.parallelism, len(positions)
    if count == before:
        return positions
    try:
        shared: Any = feeder.redistribute(positions, count)
    except StreamiterError as error:
        raise old.refused(
            step.name, f"its {before} subtasks cannot become {count}: {error}; keep parallelism={before}"
        ) from error
    if shared is None:
        if not any(positions):
            return [{}] * count
        raise old.refused(
            step.name,
            f"expected the parallelism {before} that it had, given {count}; its positions cannot be shared out anew: "
            f"keep parallelism={before}, or define redistribute(positions, parallelism) in its Source",
        )
    if not isinstance(shared, Sequence) or len(shared) != count:
        given = f"{len(shared)} of them" if isinstance(shared, Sequence) else type(shared).__name__
        raise old.refused(
            step.name,
            f"redistribute of its Source: expected a list of {count} positions, one for each subtask, given {given}",
        )
    return shared
