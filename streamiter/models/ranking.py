"""The best of many candidates for a row: the items that a user most probably wants.

A *row* has the fields that all candidates share, such as those of the user; a *candidate* has the other fields, such as
the item. What depends on the row alone is computed once, so a candidate costs what its own fields cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.errors import ModelError, shortened
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Array, Floats, Indices, whole_number
from streamiter.values.records import Columns

Candidates = Mapping[str, Sequence[Any] | Array] | Columns | Sequence[Mapping[str, Any]]
"""Columns by field, with a value for each candidate; ``Columns``; or a list of dicts."""


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate with its prediction."""

    candidate: dict[str, Any]
    """The fields of the candidate."""
    value: float
    """The prediction for the row together with the candidate."""
    position: int
    """The position of the candidate among those that were given."""


def checked_candidates(subject: str, given: Any) -> Columns | list[Mapping[str, Any]]:
    """Return candidates as ``Columns``, or as the list of dicts that they are. Raises ``ModelError`` for others."""
    if isinstance(given, Columns) or (isinstance(given, list) and all(isinstance(each, Mapping) for each in given)):
        return given
    what = shortened(given)
    if isinstance(given, Mapping) and given:
        columns = {name: column if isinstance(column, np.ndarray) else list(column) for name, column in given.items()}
        if len(set(map(len, columns.values()))) == 1:
            return Columns({name: _array(column) for name, column in columns.items()})
        what = ", ".join(f"{len(column):,} of {name!r}" for name, column in columns.items())
    raise ModelError(
        f"{subject}.top_k: expected candidates as columns of one length by field, as {{'item': ['a', 'b']}}, or a list "
        f"of dicts, given {what}"
    )


def _array(column: Any) -> Array:
    """Return a column as an array: of numbers or texts, if all of its values are, else of objects."""
    if isinstance(column, np.ndarray):
        return column
    if column and (set(map(type, column)) == {str} or all(type(each) in (int, float, bool) for each in column)):
        return np.array(column)
    array = np.empty(len(column), object)
    array[:] = column
    return array


def divided(
    row: Mapping[str, Any], candidates: Columns | list[Mapping[str, Any]]
) -> tuple[dict[str, Any], Columns | list[Mapping[str, Any]]]:
    """Return the fields that only the row has, and the candidates with all others.

    >>> divided({"user": "a", "price": 3}, [{"item": "b"}, {"item": "c", "price": 4}])
    ({'user': 'a'}, [{'price': 3, 'item': 'b'}, {'price': 4, 'item': 'c'}])
    """
    if isinstance(candidates, Columns):
        return {name: value for name, value in row.items() if name not in candidates}, candidates
    names = {name for candidate in candidates for name in candidate}
    both = {name: value for name, value in row.items() if name in names}
    own = {name: value for name, value in row.items() if name not in names}
    return own, [both | dict(candidate) for candidate in candidates] if both else candidates


def beside(row: NamedRows, others: NamedRows) -> NamedRows:
    """Return a row's columns beside those of each of the others, which are of other fields."""
    at, texts = np.zeros(len(others), np.intp), len(row.text_fields)
    numbers, places = row.numbers[at], row.places[at]
    return NamedRows(
        row.fields + others.fields,
        np.column_stack([numbers, others.numbers]),
        row.text_fields + others.text_fields,
        np.column_stack(
            [
                places[:, :texts],
                others.places[:, : len(others.text_fields)],
                places[:, texts:],
                others.places[:, len(others.text_fields) :],
            ]
        ),
        row.missing[at] + others.missing,
    )


def best_of(values: Floats, count: int) -> Indices:
    """Return the positions of the largest values, the largest first; of equal ones the first.

    >>> best_of(np.array([0.5, 2.0, 0.5, 1.0]), 3).tolist()
    [1, 3, 0]
    """
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, np.intp)
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values >= least)
    return above[np.argsort(-values[above], kind="stable")][:count]


def ranked(
    candidates: Columns | list[Mapping[str, Any]], values: Floats, count: int, subject: str, at: Indices | None = None
) -> list[RankedCandidate]:
    """Return the best candidates, the best first; ``at`` are the positions that have values, None: all have."""
    places = best_of(values, whole_number(f"{subject}.top_k(k=)", count, 1, error=ModelError))
    best, values = (places if at is None else at[places]).tolist(), values[places]
    if isinstance(candidates, Columns):
        found = [{name: candidates[name][at] for name in candidates.names} for at in best]
        found = [{name: _plain(value) for name, value in each.items()} for each in found]
    else:
        found = [dict(candidates[at]) for at in best]
    return [RankedCandidate(*each) for each in zip(found, values.tolist(), best, strict=True)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) and value.dtype.kind != "M" else value
