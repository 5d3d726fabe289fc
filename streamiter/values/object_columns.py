"""JSON objects of which some fields are columns, too: the rows of such ``Columns`` are the objects themselves.

Their column :data:`JSON_FIELD` has the text of each object. Records need not have all fields: :data:`HAS_FIELD` says
which of the columns a record has, by bits in the order of the columns. In the others a record has zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from streamiter.values.numbers import Array

# No field of a user begins like this.
HIDDEN: Final = "\0"
JSON_FIELD: Final = "\0json"
HAS_FIELD: Final = "\0has"


def objects_of(arrays: Mapping[str, Array]) -> Iterator[dict[str, Any]]:
    r"""Yield the objects, with the fields that steps have added to them.

    >>> list(objects_of({"\0json": np.array([b'{"km": 3}']), "\0has": np.array([1]), "\0time": np.array([7])}))
    [{'km': 3, '\x00time': np.int64(7)}]
    """
    added = added_fields(arrays)
    for text, *values in zip(arrays[JSON_FIELD].tolist(), *(arrays[name] for name in added), strict=True):
        yield {**orjson.loads(text), **dict(zip(added, values, strict=True))}


def added_fields(arrays: Mapping[str, Array]) -> list[str]:
    """Return the fields that steps have added: the text of an object does not have them."""
    return [name for name in arrays if name.startswith(HIDDEN) and name not in (JSON_FIELD, HAS_FIELD)]


def records_with(arrays: Mapping[str, Array], field: str) -> npt.NDArray[np.bool_]:
    """Return which of the objects have a field that is a column."""
    bit = [name for name in arrays if not name.startswith(HIDDEN)].index(field)
    has: npt.NDArray[np.bool_] = (arrays[HAS_FIELD] >> bit) & 1 > 0
    return has


def object_values(arrays: Mapping[str, Array], field: str, missing: object) -> list[Any]:
    """Return the values of a column, ``missing`` for the objects without this field."""
    if (has := records_with(arrays, field)).all():
        whole: list[Any] = arrays[field].tolist()
        return whole
    values = arrays[field].astype(object)
    values[~has] = missing
    found: list[Any] = values.tolist()
    return found


def is_exact(arrays: Mapping[str, Array], field: str) -> bool:
    """Return whether a column has exactly the values of a field, of all records: a whole number may be a float here."""
    if field not in arrays:
        return False
    return JSON_FIELD not in arrays or (arrays[field].dtype.kind != "f" and bool(records_with(arrays, field).all()))
