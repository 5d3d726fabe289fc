"""Counts of what an operator has handled."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OperatorStatistics"]


@dataclass(frozen=True, slots=True)
class OperatorStatistics:
    """What one operator instance has handled since it was opened."""

    records_in: int
    """Records given to it."""
    batches_in: int
    """Transport batches they came in."""
    records_out: int
    """Records it emitted, side outputs included."""
    rejected: int
    """Records refused: skipped, or sent to the dead-letter topic."""
