"""From records to features: ``FeatureHasher`` and ``StandardScaler``.

A hasher turns records with named fields into sparse rows, without a vocabulary. A scaler learns the mean and the
deviation of each feature, and :func:`scaled` expresses rows in units of them.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.gradients.gradient import MOMENTS
from streamiter.learn.gradients.training import LearnMiniBatches
from streamiter.learn.rows import BadRows, as_points
from streamiter.models.saved_objects import Savable
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import DeclaredState, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.output import RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.field_kinds import as_text
from streamiter.values.numbers import (
    Floats,
    Indices,
    Moments,
    has_plain_digits,
    plain_float,
    standardized,
    whole_number,
)
from streamiter.values.records import Columns, columns_of_table
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.tables import as_floats
from streamiter.values.times import Seconds


def records_with_fields(given: Any) -> Columns | Sequence[Mapping[str, Any]]:
    """Return the given records; a table becomes ``Columns``. Raises ModelError for an object without records."""
    if isinstance(given, (Columns, list)):
        return given
    if isinstance(given, Mapping):
        raise ModelError(
            "FeatureHasher: expected records, given a mapping; write […] for one record, or Columns(…) for named arrays"
        )
    if isinstance(given, (str, bytes)):
        raise ModelError(f"FeatureHasher: expected records with fields, given the text {given!r:.100}")
    table = columns_of_table("FeatureHasher", given, ModelError)
    return given if table is None else table


_TEXTS: Final = frozenset((str, bytes, np.str_, np.bytes_))


def column_of(records: Columns | Sequence[Mapping[str, Any]], field: str) -> Sequence[Any]:
    """Return the values of a field as plain Python objects."""
    if isinstance(records, Columns):
        if field not in records:
            raise ModelError(f"FeatureHasher: expected a field {field!r}, given {', '.join(records.names)}")
        column: list[Any] = records[field].tolist()
        return column
    try:
        return [record[field] for record in records]
    except (TypeError, IndexError):
        bad = [row for row, record in enumerate(records) if not isinstance(record, (Mapping, np.void))]
        if not bad:
            raise
        raise BadRows(
            bad, f"FeatureHasher: expected records with fields, given {type(records[bad[0]]).__name__} in row {bad[0]}"
        ) from None
    except KeyError:
        bad = [row for row, record in enumerate(records) if field not in record]
        given = ", ".join(records[bad[0]])
        raise BadRows(
            bad, f"FeatureHasher: expected a field {field!r} (None where it has no value), given {given}"
        ) from None


def as_numbers(values: Sequence[Any]) -> Floats:
    """Return the values as floats: NaN for a missing value, infinity for a value that is no number."""
    try:
        return np.frombuffer(
            array("d", values)
        )  # takes no texts: numpy reads more texts as numbers than number_or_infinity does
    except (TypeError, OverflowError):
        pass
    try:
        if _TEXTS.isdisjoint(map(type, values)):
            numbers = np.array(values, dtype=np.float64)
            if numbers.ndim == 1:  # lists in place of numbers make a matrix
                return numbers
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([number_or_infinity(value) for value in values])


def number_or_infinity(value: Any) -> float:
    """Return the value as a float, infinity for a value that is no number.

    A text is a number only if plain digits spell it; Python would accept digits of other scripts and underscores.
    """
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str) and not has_plain_digits(value):
        return math.inf
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.inf


def _is_categorical(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bytes, np.integer, np.floating, np.bool_))


def bad_values(field: str, values: Sequence[Any]) -> BadRows:
    bad = [row for row, value in enumerate(values) if not _is_categorical(value)]
    return BadRows(
        bad,
        f"FeatureHasher: expected text, numbers or None in the categorical field {field!r}, "
        f"given {type(values[bad[0]]).__name__}",
    )


# The place of a feature that is missing in a row, until the rows are joined.
_ABSENT: Final = -1

# 2**32 weights of 8 bytes are 32 GiB for each slot of an optimizer.
_BITS_MAX: Final = 32


class FeatureHasher(Savable):
    """Turns records with named fields into sparse rows: the hash of a feature is its place among 2**bits places.

    A *categorical* field gives one feature of value 1 for each of its texts; 5, 5.0 and "5" are the same text, True
    and False are 1 and 0. A *numeric* field gives one feature whose value is the number. A *cross* gives one feature
    for each combination of the values of its fields. Each of the three arguments may be a mapping to scales, which
    multiply the values: with SGD the weights of a field then move scale² times as fast. None and NaN mean that a field
    has no value: its feature and its crosses are left out.

    Two features may have the same place, and then share a weight: among f features at 2**b places about f²/2**(b+1)
    pairs do. Another ``seed`` makes other pairs. The hash is the same on every machine and in every version of Python.

    Up to ``cached`` values of each field are kept with their places, for speed only.

    >>> hasher = FeatureHasher(["color", "size"], numeric={"price": 0.01}, crosses=[("color", "size")], bits=10)
    >>> red = {"color": "red", "size": 3, "price": 250.0}
    >>> rows = hasher.rows([red, {"color": None, "size": 3, "price": 1.0}])
    >>> rows
    SparseRows(2 rows of width 1024, 6 values)
    >>> rows.values[rows.indices == hasher.index("price")].tolist()
    [2.5, 0.01]
    >>> hasher.index("size", 3) in rows[1:].indices
    True
    """

    def __init__(
        self,
        categorical: Sequence[str] | Mapping[str, float] = (),
        *,
        numeric: Sequence[str] | Mapping[str, float] = (),
        crosses: Sequence[Sequence[str]] | Mapping[tuple[str, ...], float] = (),
        bits: int = 18,
        seed: int = 0,
        cached: int = 65536,
    ) -> None:
        bits = whole_number("FeatureHasher(bits=)", bits, 1, _BITS_MAX)
        cached = whole_number("FeatureHasher(cached=)", cached, 0)
        if isinstance(categorical, str) or isinstance(numeric, str):
            raise ConfigurationError(f"FeatureHasher: expected lists of fields, given {categorical!r} and {numeric!r}")
        self.width = 1 << bits
        self.categorical = tuple(categorical)
        self.crosses = tuple(tuple(cross) for cross in crosses)
        self.numeric = _scales(numeric)
        _check_fields(self.categorical, tuple(numeric), crosses)
        seed = whole_number("FeatureHasher(seed=)", seed, -(2**63), 2**63 - 1)
        self._key = seed.to_bytes(8, "little", signed=True)
        self._places = {field: _Places(self._place_of(field), cached) for field in self.categorical}
        self._cross_places = {cross: _Places(self._cross_place_of(cross), cached) for cross in self.crosses}
        self._numeric_places = [self._hashed(field) for field in self.numeric]
        crossed: Mapping[Any, float] = _scales(crosses)  # type: ignore[arg-type]
        scales = [*_scales(categorical).values(), *crossed.values(), *self.numeric.values()]
        if not all(math.isfinite(plain_float(scale)) for scale in scales):
            raise ConfigurationError(f"FeatureHasher: expected finite scales, given {scales}")
        self._scales = np.array(scales, dtype=np.float64)
        self._numbers_max = np.array([_largest(scale, len(scales)) for scale in self.numeric.values()])

    def index(self, field: str | tuple[str, ...], value: Any = None) -> int:
        """Return the place of a feature: of a numeric field, a field and its value, or a cross and its values."""
        known = [*self.categorical, *self.numeric, *self.crosses]
        if field not in known:
            listed = ", ".join(map(repr, known))
            raise ConfigurationError(f"FeatureHasher: expected one of {listed}, given {field!r}")
        if isinstance(field, tuple):
            return self._cross_place_of(field)(value)
        return self._hashed(field) if field in self.numeric else self._place_of(field)(value)

    def rows(self, records: Columns | Sequence[Mapping[str, Any]]) -> SparseRows:
        """Return the features of each record: of dicts, ``Columns``, or a table of pandas, polars or Arrow.

        Raises :class:`~streamiter.learn.rows.BadRows` for records that lack a field (give None for no value), and for
        values that do not fit the kind of their field.
        """
        records = records_with_fields(records)
        if not len(records):
            return SparseRows([0], np.zeros(0, dtype=np.intp), [], self.width)
        columns = {field: column_of(records, field) for field in self._fields()}
        places = [self._column_places(field, columns[field]) for field in self.categorical]
        places += [self._cross_column_places(cross, columns) for cross in self.crosses]
        return self._assembled(len(records), places, [columns[field] for field in self.numeric])

    def _fields(self) -> dict[str, None]:
        crossed = [field for cross in self.crosses for field in cross]
        return dict.fromkeys([*self.categorical, *self.numeric, *crossed])

    def _column_places(self, field: str, values: Sequence[Any]) -> list[int]:
        try:
            return list(map(self._places[field].__getitem__, values))
        except TypeError:
            raise bad_values(field, values) from None

    def _cross_column_places(self, cross: tuple[str, ...], columns: Mapping[str, Sequence[Any]]) -> list[int]:
        combinations = zip(*(columns[field] for field in cross), strict=True)
        try:
            return list(map(self._cross_places[cross].__getitem__, combinations))
        except TypeError:
            raise next(
                bad_values(field, columns[field]) for field in cross if not all(map(_is_categorical, columns[field]))
            ) from None

    def _assembled(self, count: int, places: list[list[int]], numbers: list[Sequence[Any]]) -> SparseRows:
        named = len(places)
        indices = np.empty((count, named + len(numbers)), dtype=np.intp)
        values = np.ones(indices.shape)
        for position, column in enumerate(places):
            indices[:, position] = column
        for position, numeric in enumerate(numbers):
            values[:, named + position] = as_numbers(numeric)
        too_large = np.abs(values[:, named:]) > self._numbers_max
        if np.count_nonzero(too_large):
            raise self._too_large(too_large, numbers)
        values *= self._scales
        indices[:, named:] = self._numeric_places
        indices[:, named:][np.isnan(values[:, named:])] = _ABSENT
        return _sorted_rows(indices, values, self.width)

    def _too_large(self, too_large: npt.NDArray[np.bool_], numbers: list[Sequence[Any]]) -> BadRows:
        """Return the error for the first field that has numbers too large, or values that are no numbers."""
        position = int(np.argmax(too_large.any(axis=0)))
        bad = np.flatnonzero(too_large[:, position])
        given = numbers[position][bad[0]]
        limit = f" of at most {self._numbers_max[position]:.2g} in size" if number_or_infinity(given) < math.inf else ""
        return BadRows(
            bad,
            f"FeatureHasher: expected finite numbers{limit} or None in the numeric field "
            f"{list(self.numeric)[position]!r}, given {given!r}",
        )

    # ---- hashing

    def _hashed(self, *parts: str) -> int:
        digest = blake2b(digest_size=8, key=self._key)
        for part in parts:
            text = part.encode("utf-8", "surrogatepass")
            # The length in front makes the parts unambiguous: "a", "bc" differs from "ab", "c".
            digest.update(b"%d:%b" % (len(text), text))
        return int.from_bytes(digest.digest(), "little") % self.width

    def _place_of(self, field: str) -> Callable[[Any], int]:
        def place(value: Any) -> int:
            text = as_text(value)
            return _ABSENT if text is None else self._hashed(field, text)

        return place

    def _cross_place_of(self, cross: tuple[str, ...]) -> Callable[[Any], int]:
        def place(values: Any) -> int:
            texts = [as_text(value) for value in values]
            if None in texts:
                return _ABSENT
            return self._hashed(*cross, *[text for text in texts if text is not None])

        return place


def _largest(scale: float, features: int) -> float:
    """Return the largest number of a field for which a row stays finite, even if all its features have one place.

    It is at most half of the largest float, so that rounding cannot exceed that float.
    """
    return sys.float_info.max / 2 / features / max(abs(float(scale)), 1.0)


class _Places(dict[Hashable, int]):
    """A cache of the places of a field's most recent values."""

    def __init__(self, place: Callable[[Any], int], limit: int) -> None:
        super().__init__()
        self._place = place
        self._limit = limit

    def __missing__(self, value: Hashable) -> int:
        place = self._place(value)
        if place != _ABSENT:  # A NaN equals no other NaN: the cache would fill with NaNs.
            if len(self) >= self._limit:
                self.clear()
            self[value] = place
        return place


def _sorted_rows(indices: Indices, values: Floats, width: int) -> SparseRows:
    order = np.argsort(indices, axis=1, kind="stable")
    indices = np.take_along_axis(indices, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    there = indices >= 0
    indptr = np.zeros(len(indices) + 1, dtype=np.intp)
    np.cumsum(there.sum(axis=1), out=indptr[1:])
    return SparseRows(indptr, indices[there], values[there], width)


def _scales(fields: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    return dict(fields) if isinstance(fields, Mapping) else dict.fromkeys(map(_as_key, fields), 1.0)


def _as_key(field: Any) -> Any:
    return field if isinstance(field, str) else tuple(field)


def _check_fields(categorical: Sequence[str], numeric: Sequence[str], crosses: Collection[Sequence[str]]) -> None:
    if not (categorical or numeric or crosses):
        raise ConfigurationError("FeatureHasher: expected one field or more, given none; name one")
    if len({*categorical, *numeric}) != len(categorical) + len(numeric):
        raise ConfigurationError(
            f"FeatureHasher: expected each field once, given {list(categorical)} and {list(numeric)}"
        )
    if any(isinstance(cross, str) or len(cross) < 2 for cross in crosses):
        raise ConfigurationError(
            f"FeatureHasher(crosses=): expected two fields or more in each cross, given {list(crosses)}"
        )
    if len(set(map(tuple, crosses))) != len(crosses):
        raise ConfigurationError(f"FeatureHasher(crosses=): expected each cross once, given {list(crosses)}")


class StandardScaler(DeclaredState, Savable):
    """Learns the mean and the sample deviation of each feature, row by row or in mini-batches of any size.

    Use a scaler in one task only. A ``BadRows`` names the rows that are refused; then the scaler is unchanged.

    >>> scaler = StandardScaler()
    >>> scaler.learn([[1.0, 5.0], [3.0, 5.0]])
    >>> scaler.parameters()["mean"].tolist(), scaler.parameters()["deviation"].round(3).tolist()
    ([2.0, 5.0], [1.414, 0.0])
    """

    _moments: Moments = declared(form=MOMENTS)

    def __init__(self) -> None:
        self._moments = Moments(0, np.zeros(0), np.zeros(0))

    @property
    def records(self) -> int:
        """The number of rows learned from so far."""
        return self._moments.records

    @property
    def moments(self) -> Moments:
        """The statistics of the rows so far."""
        return self._moments

    def check(self, rows: npt.ArrayLike) -> Floats:
        """Return the rows as a matrix. Raises ModelError for rows that the scaler cannot learn from."""
        return as_points("StandardScaler", rows, len(self._moments.mean) or None, what="rows")

    def learn(self, rows: npt.ArrayLike) -> None:
        """Learn from more rows."""
        self._moments = self._moments.plus(Moments.of(self.check(rows)))

    def parameters(self) -> dict[str, Any]:
        """Return ``mean`` and ``deviation``, an array each; after a single row the deviation is 0."""
        if not self.records:
            raise ModelError(
                "StandardScaler: expected a scaler that has learned, given one without any rows; learn first"
            )
        return {"mean": self._moments.mean.copy(), "deviation": self._moments.deviation()}

    def to_update(self) -> ModelSnapshot:
        """Return the model to publish: the parameters, and the number of rows."""
        return ModelSnapshot(self.parameters(), records=self.records)

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends."""
        return {"model": "StandardScaler"}


def scaled(parameters: Mapping[str, Any], rows: npt.ArrayLike) -> Floats:
    """Return rows (or one row) minus the mean, divided by the deviation; a feature that never varied becomes 0.

    Use it for ``ServedModel(predict=scaled)``, or before a linear model.

    >>> scaled({"mean": np.array([2.0, 5.0]), "deviation": np.array([0.5, 0.0])}, [[3.0, 5.0]]).tolist()
    [[2.0, 0.0]]
    """
    return standardized(as_floats("scaled", "rows", rows), parameters["mean"], parameters["deviation"])


@all_or_nothing
def online_standard_scaler(
    rows: Stream,
    *,
    window: int = 1000,
    timeout_s: Seconds | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Learn mean and sample deviation of each feature from a stream: emits a ``ModelSnapshot`` for each window.

    A row is an array or list of numbers. A window is ``window`` rows; it is shorter at the end of the input, and if
    ``timeout_s`` seconds have passed since its first row. Each model describes all rows so far: its parameters are
    ``mean`` and ``deviation`` (see :func:`scaled`), and ``publish_model`` publishes it. One subtask does all the work.
    Records that are not rows follow ``on_error`` or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("scale")
    >>> models = online_standard_scaler(flow.from_items([[1.0], [3.0], [5.0]]), window=2).collect()
    >>> flow.run().state, [(m.records, float(m.parameters["mean"][0])) for m in models.items]
    ('finished', [(2, 2.0), (3, 3.0)])
    """
    check_stream("online_standard_scaler", rows, "rows")
    label = step_names(rows.flow, name)

    windows = rows.batch(window, timeout_s, parallelism=1, name=label("windows"))
    return windows.process(
        lambda: LearnMiniBatches(StandardScaler()), name=label("scale"), on_error=on_error, dead_letter=dead_letter
    )
