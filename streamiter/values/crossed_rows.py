"""Crosses: features of two fields of a row together, for models that add up the effects of single fields.

Of two numbers the cross is the product of both, each standardized, in a column of its own. Of two texts it is one
hashed feature of value 1 for each pair of texts. Of a text and a number it is one hashed feature for each text, and its
value is the standardized number: each text has a slope of its own. Numbers are standardized first, because the product
of columns far from 0 is nearly the sum of both. If one of the two is missing, so is the cross.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any, Final

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.values.hashes import hash_of, mixed_hashes
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import Floats, Indices

Cross = tuple[str, str]
"""The names of two fields; of a field with itself the cross is the square."""

CROSS_LIMIT: Final = 10.0
"""The largest size of a standardized number in a cross."""
_NAME_FOLLOWS: Final = b"\xfd"


def checked_crosses(owner: str, given: Any) -> tuple[Cross, ...]:
    """Return the crosses. Raises ConfigurationError unless they are different pairs of names."""
    pairs = given if isinstance(given, (list, tuple)) else [given]
    crosses = tuple(tuple(cross) if isinstance(cross, (list, tuple)) else (cross,) for cross in pairs)
    are_pairs = all(len(cross) == 2 and all(isinstance(name, str) for name in cross) for cross in crosses)
    if not are_pairs or len({frozenset(cross) for cross in crosses}) != len(crosses):
        raise ConfigurationError(
            f'{owner}(crosses=): expected different pairs of fields such as [("km", "hour")], given {given!r}'
        )
    return crosses


def crossed_fields(crosses: Sequence[Cross]) -> list[str]:
    """Return the fields of all crosses, each once.

    >>> crossed_fields([("km", "hour"), ("sky", "km")])
    ['km', 'hour', 'sky']
    """
    return list(dict.fromkeys(field for cross in crosses for field in cross))


def matrix_of_fields(rows: NamedRows, fields: Sequence[str]) -> Floats:
    """Return a matrix with the numbers of these fields, NaN where a row has none."""
    numbers = np.full((len(rows), len(fields)), np.nan)
    for column, field in enumerate(fields):
        if field in rows.fields:
            numbers[:, column] = rows.numbers[:, rows.fields.index(field)]
    numbers[is_missing(numbers)] = np.nan
    return numbers


def crossed(
    rows: NamedRows, crosses: Sequence[Cross], numbers: Floats, *, bits: int, known: Container[str] | None = None
) -> NamedRows:
    """Return the rows with their crosses, as further numeric columns and hashed features.

    ``numbers`` are the standardized numbers of :func:`crossed_fields`, clipped here. ``known`` are the fields
    that the model knows; None: all.
    """
    texts: dict[str, list[Indices]] = {}
    for column, field in enumerate(rows.text_fields):
        if known is None or field in known:
            texts.setdefault(field, []).append(rows.places[:, column])
    clipped = np.clip(numbers, -CROSS_LIMIT, CROSS_LIMIT)
    found = {
        field: clipped[:, column]
        for column, field in enumerate(crossed_fields(crosses))
        if field in rows.fields and (known is None or field in known)
    }
    products: dict[str, Floats] = {}
    places: list[Indices] = []
    values: list[Floats] = []
    # A field whose kind is not decided may have a text in one row, and a number in another.
    for cross, are_texts in itertools.product(crosses, itertools.product([True, False], repeat=2)):
        parts = list(zip(cross, are_texts, strict=True))
        of_texts = [texts[field] for field, is_text in parts if is_text and field in texts]
        of_numbers = [found[field] for field, is_text in parts if not is_text and field in found]
        if len(of_texts) + len(of_numbers) < 2:
            continue
        if not of_texts:
            name = " × ".join(cross)
            if name in rows.fields:
                raise ConfigurationError(
                    f"crosses=: expected no field {name!r}, which is the name of a cross, given one; rename the field"
                )
            products[name] = of_numbers[0] * of_numbers[1]
            continue
        value = of_numbers[0] if of_numbers else np.ones(len(rows))
        for columns in itertools.product(*of_texts):  # A field with lists of texts has several columns.
            there = ~np.isnan(value) & np.all([column != ABSENT for column in columns], axis=0)
            places.append(np.where(there, places_of_cross(cross, columns, bits), ABSENT))
            values.append(np.where(there, value, 0.0))
    return NamedRows(
        (*rows.fields, *products),
        np.column_stack([rows.numbers, *products.values()]),
        rows.text_fields,
        np.column_stack([rows.places, *places]),
        rows.missing,
        np.column_stack([np.ones(rows.places.shape), *values]),
    )


def places_of_cross(cross: Cross, of_texts: Sequence[Indices], bits: int) -> Indices:
    """Return the place of each row's pair of texts, or of its text with the other field's number.

    Places of more bits count with as many bits as the place has.
    """
    names = _NAME_FOLLOWS.join(name.encode("utf-8", "surrogatepass") for name in cross)
    hashes = np.full(len(of_texts[0]), hash_of(names), dtype=np.uint64)
    mask = np.uint64((1 << bits) - 1)
    for places in of_texts:
        hashes = mixed_hashes(hashes ^ (places.astype(np.uint64) & mask))
    return (hashes & mask).astype(np.intp)
