"""``ModelCrosses``: the crosses of a published model, in rows that it predicts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamiter.models.documents import are_names, array_of_numbers, parameter_of
from streamiter.values.crossed_rows import (
    CROSS_LIMIT,
    Cross,
    crossed,
    crossed_fields,
    matrix_of_fields,
    places_of_cross,
)
from streamiter.values.field_kinds import HUGE, is_no_time
from streamiter.values.hashes import place_of_text
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import standardized

CACHED_TEXTS: Final = 65_536
"""The number of recent texts of which a model keeps what it knows: a text that comes again is not hashed again."""


class ModelCrosses:
    """The crosses of published parameters, with the means and deviations of their numbers."""

    def __init__(self, given: Mapping[str, Any], subject: str) -> None:
        pairs = parameter_of({"crosses": [], **given}, "crosses", subject, "pairs of names", _are_pairs)
        self.names: dict[Cross, str] = {(first, second): f"{first} × {second}" for first, second in pairs}
        """The name of each cross, which is also that of its column of numbers."""
        self.products = frozenset(self.names.values())
        """These names."""
        self._fields = crossed_fields(list(self.names))
        self._moments = [
            array_of_numbers({"cross_mean": [], "cross_deviation": [], **given}, name, subject, (len(self._fields),))
            for name in ("cross_mean", "cross_deviation")
        ]
        moments = zip(*(each.tolist() for each in self._moments), strict=True)
        self._moments_of = dict(zip(self._fields, moments, strict=True))
        self._of_texts: dict[tuple[Any, ...], tuple[float, Any, int]] = {}
        """Limit, weight and position of recent crosses with one or two texts."""

    def has_lists(self, row: Mapping[str, Any]) -> bool:
        """Whether a crossed field has a list of texts, or a field is named like a cross: `crossed` handles both."""
        return bool(self.names) and (
            not self.products.isdisjoint(row)
            or any(isinstance(row.get(field), list) for cross in self.names for field in cross)
        )

    def of_rows(self, rows: NamedRows, crosses: Sequence[Cross], bits: int, known: Container[str]) -> NamedRows:
        """Return the rows with these crosses, see `crossed`."""
        numbers = standardized(matrix_of_fields(rows, self._fields), *self._moments)
        used = numbers[:, [self._fields.index(field) for field in crossed_fields(crosses)]]
        return crossed(rows, crosses, used, bits=bits, known=known)

    def of_row(
        self, cross: Cross, row: Mapping[str, Any], texts: Container[str], columns: Container[str]
    ) -> tuple[float, list[tuple[str, str]]] | None:
        """Return the number and the texts of a cross in one row; None if one of both fields is missing.

        ``texts`` and ``columns`` are the fields that the model knows.
        """
        number, found = 1.0, []
        for field in cross:
            value: Any = row.get(field)
            if isinstance(value, str) and field in texts:
                found.append((field, value))
            elif value is None or field not in columns or is_no_time(value) or not abs(value) <= HUGE:
                return None
            else:
                mean, deviation = self._moments_of[field]
                distance = (float(value) - mean) / deviation if deviation else 0.0
                number *= min(max(distance, -CROSS_LIMIT), CROSS_LIMIT)
        return number, found

    def of_texts(
        self, cross: Cross, texts: list[tuple[str, str]], bits: int, at_place: Callable[[int], tuple[float, Any, int]]
    ) -> tuple[float, Any, int]:
        """Return what ``at_place`` returns for the place of a cross with these texts; it is called once for each."""
        key = (cross, *texts)
        if (found := self._of_texts.get(key)) is None:
            if len(self._of_texts) >= CACHED_TEXTS:
                self._of_texts.clear()
            places = [np.array([place_of_text(field, text, bits)]) for field, text in texts]
            found = self._of_texts[key] = at_place(int(places_of_cross(cross, places, bits)[0]))
        return found


def further(rows: NamedRows, base: NamedRows) -> NamedRows:
    """Return rows with only the columns that follow the columns of ``base``."""
    fields, places = len(base.fields), base.places.shape[1]
    values = None if rows.place_values is None else rows.place_values[:, places:]
    return NamedRows(rows.fields[fields:], rows.numbers[:, fields:], (), rows.places[:, places:], rows.missing, values)


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(are_names(pair) and len(pair) == 2 for pair in value)
