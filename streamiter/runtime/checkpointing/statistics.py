"""What checkpoints have cost and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckpointStatistics"]


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """The checkpoints of a job at one moment."""

    run: str
    """The run that takes them."""
    restored: int | None
    """The checkpoint that this run went on from."""
    committed: int | None
    """The last one that is committed."""
    taken: int
    """Committed by this run."""
    given_up: int
    """Not committed: too slow, or no room in the store."""
    last_duration_s: float
    """From the barrier to the commit."""
    last_alignment_s: float
    """Of that, until all steps had given their state."""
    last_size_bytes: int
    """Of the snapshot in the store."""
