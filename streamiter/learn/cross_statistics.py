"""The statistics of the numbers in crosses, and the rows with their crosses."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.expert_weights import ROWS_OF_A_START
from streamiter.values.crossed_rows import Cross, crossed, crossed_fields, matrix_of_fields
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Floats, standardized


class CrossStatistics:
    """The means and deviations of the numbers in crosses, and the rows with their crosses.

    A row is standardized with the statistics of the rows before it, so a published copy makes the same crosses.
    """

    def __init__(self, crosses: Sequence[Cross], bits: int) -> None:
        self.crosses = tuple(crosses)
        self._bits = bits
        self._fields = crossed_fields(crosses)
        self._columns = self._learned = np.zeros((len(self._fields), 3))
        """For each field weight, mean and squares: the kept statistics, and the statistics after :meth:`learn`."""

    def learn(self, rows: NamedRows) -> NamedRows:
        """Return the rows with their crosses; they are added to the statistics by :meth:`keep`."""
        if not self.crosses:
            return rows
        from streamiter.learn import row_steps

        self._learned = self._columns.copy()
        numbers = row_steps.standardize_rows(matrix_of_fields(rows, self._fields), self._learned)
        return crossed(rows, self.crosses, numbers, bits=self._bits)

    def keep(self) -> None:
        """Add the rows of the last :meth:`learn` to the statistics."""
        self._columns = self._learned

    def of(self, rows: NamedRows, known: Container[str]) -> NamedRows:
        """Return the rows with their crosses of known fields; the statistics do not change."""
        if not self.crosses:
            return rows
        mean, deviation = self._moments()
        numbers = standardized(matrix_of_fields(rows, self._fields), mean, deviation)
        return crossed(rows, self.crosses, numbers, bits=self._bits, known=known)

    def _moments(self) -> tuple[Floats, Floats]:
        from streamiter.learn import row_steps

        deviations = [row_steps.deviation(*column) for column in self._columns]
        return self._columns[:, 1].copy(), np.array(deviations)

    def published(self) -> dict[str, Any]:
        """Return the entries of a published model; none without crosses."""
        if not self.crosses:
            return {}
        mean, deviation = self._moments()
        crosses = [list(cross) for cross in self.crosses]
        return {"crosses": crosses, "cross_mean": mean, "cross_deviation": deviation}

    def start_from(self, published: Mapping[str, Any]) -> None:
        """Take on the statistics of a published model. Raises ModelError for other crosses."""
        self.check(published.get("crosses", ()))
        if self.crosses:
            mean, deviation = published["cross_mean"], np.asarray(published["cross_deviation"])
            weight = np.full(len(self._fields), ROWS_OF_A_START)
            self._columns = self._learned = np.column_stack([weight, mean, weight * deviation**2])

    def refuse_sparse_rows(self) -> None:
        """Raise ModelError if there are crosses: sparse rows have no names of fields."""
        if self.crosses:
            raise ModelError(
                "AdaptiveLinearModel(crosses=): expected records with fields, or a matrix, given sparse rows; make "
                "their crosses with FeatureHasher(crosses=)"
            )

    def check(self, given: Sequence[Sequence[str]]) -> None:
        """Raise ModelError unless these are the crosses."""
        if [tuple(cross) for cross in given] != list(self.crosses):
            raise ModelError(
                f"AdaptiveLinearModel: expected a model with crosses={list(self.crosses)}, given one with {given}; "
                "make the model with the same crosses"
            )

    def state(self) -> dict[str, Any]:
        """Return a copy of the statistics as plain data."""
        return {"crosses": [list(cross) for cross in self.crosses], "columns": self._columns.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state` of the same crosses."""
        self._columns = self._learned = np.array(state["columns"])
