"""What is known of the features before the first split, and where to cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats

__all__ = ["Summary", "cuts_between"]

_Counts = npt.NDArray[np.int64]

# A quantile of so many values is off by less than half a percent of the rows; 256 bins hold as much each. A
# summary of 1,000 such features takes 256 MB, and no more for more rows.
_VALUES_KEPT: Final = 16_384


@dataclass(frozen=True, slots=True)
class Summary:
    """The distinct values of each feature, ascending, with their counts; and what the labels are like.

    Of more than 16,384 distinct values those are kept whose hashes are smallest, with all their counts: a
    sample that does not depend on how the rows were divided among workers.
    """

    rows: int
    largest_weight: float
    lowest_label: float
    highest_label: float
    values: list[Floats]
    counts: list[_Counts]

    @classmethod
    def of(cls, features: Floats, labels: Floats, weights: Floats) -> Summary:
        """Of one worker's rows: at least one."""
        kept = [_kept(*_distinct(column)) for column in features.T]
        return cls(
            rows=len(labels),
            largest_weight=float(weights.max()),
            lowest_label=float(labels.min()),
            highest_label=float(labels.max()),
            values=[values for values, _ in kept],
            counts=[counts for _, counts in kept],
        )

    def merged(self, other: Summary) -> Summary:
        """Of the rows of both."""
        merged = [
            _kept(*_added(*mine, *theirs))
            for mine, theirs in zip(
                zip(self.values, self.counts, strict=True),
                zip(other.values, other.counts, strict=True),
                strict=True,
            )
        ]
        return Summary(
            rows=self.rows + other.rows,
            largest_weight=max(self.largest_weight, other.largest_weight),
            lowest_label=min(self.lowest_label, other.lowest_label),
            highest_label=max(self.highest_label, other.highest_label),
            values=[values for values, _ in merged],
            counts=[counts for _, counts in merged],
        )

    def as_plain_data(self) -> dict[str, Any]:
        """Its fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def cuts_between(values: Floats, counts: _Counts, maximum_bins: int) -> Floats:
    """Thresholds that cut the values into bins: between all neighbours, or at quantiles where that is too many.

    >>> cuts_between(np.array([1.0, 2.0, 4.0]), np.array([5, 1, 1]), 256).tolist()
    [1.5, 3.0]
    >>> cuts_between(np.arange(100.0), np.ones(100, dtype=np.int64), 4).tolist()
    [24.5, 49.5, 74.5]
    """
    if len(values) <= maximum_bins:
        below = np.arange(len(values) - 1)
    else:
        so_far = np.cumsum(counts)
        # Whole numbers, so that rounding does not move a cut.
        wanted = np.arange(1, maximum_bins) * so_far[-1] // maximum_bins
        below = np.unique(np.searchsorted(so_far, wanted))
        below = below[below < len(values) - 1]
    low, high = values[below], values[below + 1]
    middle: Floats = low / 2 + high / 2  # The sum of two large values may be none.
    # Between neighbouring floats there is no middle, and the upper one itself would be on the wrong side.
    return np.where((low <= middle) & (middle < high), middle, low)


def _distinct(column: Floats) -> tuple[Floats, _Counts]:
    values, counts = np.unique(column, return_counts=True)
    return values, counts.astype(np.int64)


def _added(
    values: Floats, counts: _Counts, more_values: Floats, more_counts: _Counts
) -> tuple[Floats, _Counts]:
    all_values, at = np.unique(np.concatenate([values, more_values]), return_inverse=True)
    totals = np.zeros(len(all_values), dtype=np.int64)
    np.add.at(totals, at, np.concatenate([counts, more_counts]))
    return all_values, totals


def _kept(values: Floats, counts: _Counts) -> tuple[Floats, _Counts]:
    if len(values) <= _VALUES_KEPT:
        return values, counts
    kept = np.sort(np.argsort(_hashes(values), kind="stable")[:_VALUES_KEPT])
    return values[kept], counts[kept]


def _hashes(values: Floats) -> npt.NDArray[np.uint64]:
    """Of the bits of each value, by splitmix64; different ones for different values (0 and -0 are one)."""
    mixed = (values + 0.0).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
