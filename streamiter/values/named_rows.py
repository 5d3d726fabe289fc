"""Rows of named fields, as learners read them: numbers in columns, texts hashed.

A record needs no schema. The fields of a batch are found in its records: a field is *numeric* where its values are
numbers or truth values, and *categorical* where they are texts. A text gives one feature of value 1, whose place is the
hash of the field's name and the text; a list of texts gives a feature for each different one. None, NaN, and numbers
that are infinite or above 1e100 in size are *missing*: the learner takes the mean of the column, and one more hashed
feature says that the value of this field was missing. A field that a record does not name is missing, too, without that
feature, since records with few of many fields are common.

A text may be a number or a time, and what its field is depends on the rows before it. So a reader only adds what each
text can be (``Readings``), and ``streamiter.values.known_fields`` decides in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from itertools import chain, compress
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, shortened
from streamiter.values.field_kinds import (
    DATE,
    HUGE,
    NO_KINDS,
    NO_VALUE,
    OTHER_TEXT,
    PARTS,
    Kind,
    Readings,
    ReadText,
    are_texts,
    category_of,
    is_time,
    part_of,
    preparation_of,
    read_datetimes,
    read_moment,
    read_text,
    times_of_values,
)
from streamiter.values.hashes import hashes_of_texts, place_of_missing, place_of_text
from streamiter.values.helpers.compiled import is_compiling, is_loaded
from streamiter.values.numbers import Array, Floats, Indices
from streamiter.values.object_columns import JSON_FIELD, object_values, records_with
from streamiter.values.records import Batch, Columns, columns_of_table

ABSENT: Final = -1
"""The place of a feature that a row does not have."""

# Places of recent texts, for each field: a text that comes again is not hashed again.
_CACHED_TEXTS: Final = 65_536
# At most this many fields have such texts. A record of a stranger may have any number of names.
_CACHED_FIELDS: Final = 1024

# So many places of categories are known to have their text there, half a megabyte; others are named again.
_NAMED_BITS: Final = 16

# Measured: for fewer texts, the call of compiled code takes longer than a list of texts.
_HASHED_TOGETHER: Final = 32

# One long text makes an array of texts large; such texts are hashed one by one.
_ARRAY_BYTES_MAX: Final = 4_096

_NUMBERS: Final = frozenset({int, float, bool, np.bool_, np.float64, np.int64, np.float32, np.int32})


class _RefusesRows(Protocol):
    """Makes the error that refuses single rows: their numbers, and the reason."""

    def __call__(self, rows: Iterable[int], reason: str, /) -> Exception: ...


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A batch of rows: numbers by field, and the places of hashed features."""

    fields: tuple[str, ...]
    """The names of the numeric columns."""
    numbers: Floats
    """A matrix: for each row the numbers of ``fields``, NaN where missing."""
    text_fields: tuple[str, ...]
    """The field of each column of texts; a field with lists of texts has several columns."""
    places: Indices
    """A matrix: for each row the places of its texts, :data:`ABSENT` where a field has none. Columns behind those of
    ``text_fields`` are the features of missing values."""
    missing: Indices
    """For each row the number of its missing values; fields that a record does not name do not count."""
    place_values: Floats | None = None
    """The values of ``places``; None: all are 1."""
    readings: Mapping[str, Readings] = field(default_factory=dict)
    """By field: what each value can be, other than a plain number. A field is here if one of its texts can be a number
    or a time, or if it has times, which have no place."""
    times_ms: Floats | None = None
    """The times of the rows in milliseconds, NaN where a row has none; None if the reader was not asked for them."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def has_missing(self) -> bool:
        """Whether there are columns of places for missing values."""
        return bool(self.places.shape[1] > len(self.text_fields))

    def __getitem__(self, which: Sequence[int] | Indices) -> NamedRows:
        """Return some of the rows."""
        chosen = np.asarray(which, dtype=np.intp)
        return NamedRows(
            self.fields,
            self.numbers[chosen],
            self.text_fields,
            self.places[chosen],
            self.missing[chosen],
            None if self.place_values is None else self.place_values[chosen],
            {name: readings.of_rows(chosen) for name, readings in self.readings.items()},
            None if self.times_ms is None else self.times_ms[chosen],
        )


def named_matrix(matrix: Floats) -> NamedRows:
    """Return the rows of a matrix; the fields are the numbers of its columns.

    >>> named_matrix(np.array([[1.0, 2.0]])).fields
    ('0', '1')
    """
    if matrix.ndim != 2:
        raise ModelError(f"expected features as a matrix (rows, columns), given shape {matrix.shape}")
    fields = tuple(map(str, range(matrix.shape[1])))
    places = np.empty((len(matrix), 0), dtype=np.intp)
    return NamedRows(fields, matrix, (), places, np.count_nonzero(is_missing(matrix), axis=1))


def is_missing(numbers: Floats) -> npt.NDArray[np.bool_]:
    """Return which numbers are missing: NaN, infinite or huge."""
    missing: npt.NDArray[np.bool_] = ~(np.abs(numbers) <= HUGE)
    return missing


def is_none(value: object) -> bool:
    """Whether the value is missing: None, or a number that counts as missing."""
    return value is None or (isinstance(value, (int, float)) and not abs(value) <= HUGE)


def clipped(values: Floats, differences: Floats, limits: Floats) -> Floats:
    """Return the differences within their limits, 0 where a value is missing."""
    x: Floats = np.minimum(np.maximum(differences, -limits), limits)
    x[is_missing(values)] = 0.0
    return x


class FieldReader:
    """Turns records into :class:`NamedRows`.

    ``fields`` are the fields to read, None for all except those in ``without``. Hashed features have ``2**bits``
    places. Fields whose ``kinds`` are those of texts are read as such here. ``time_zone`` is that of the
    hours of times; None: their own. ``time`` is the field of the times of rows, whether it is read otherwise or not.

    >>> reader = FieldReader(without=["late"], bits=10)
    >>> rows = reader.rows([{"km": 3, "town": "Rom", "late": True}, {"km": None, "town": "Kyiv", "late": False}])
    >>> rows.fields, rows.numbers.tolist(), rows.text_fields, rows.places.shape
    (('km',), [[3.0], [nan]], ('town',), (2, 2))
    """

    def __init__(
        self,
        fields: Sequence[str] | None = None,
        *,
        without: Collection[str] = (),
        bits: int,
        kinds: Mapping[str, Kind] = NO_KINDS,
        time_zone: tzinfo | None = None,
        time: str | None = None,
        refuse: _RefusesRows | None = None,
        owner: str = "FieldReader",
    ) -> None:
        self._wanted = None if fields is None else tuple(fields)
        self._without = frozenset(without)
        self._bits = bits
        self._mask = (1 << bits) - 1
        self._owner = owner
        self._refuse = refuse or (lambda _rows, reason: ModelError(reason))
        self._zone = time_zone
        self._time = time
        self._prepare = {name: found for name, kind in kinds.items() if (found := preparation_of(kind)) is not None}
        self._places: dict[str, dict[str, int]] = {}
        self._named: Indices | None = None
        """By their last bits the last places of categories that have a text in the cache; None before any was read."""
        self._read_texts: dict[str, dict[str, ReadText]] = {}
        """By field the texts in the cache of places that can be numbers or times."""
        self._times: dict[str, None] = {}
        """The fields that had times."""

    def leave_out(self, fields: Iterable[str]) -> None:
        """Do not read these fields any more."""
        self._without = self._without.union(fields)

    def rows(self, records: Batch) -> NamedRows:
        """Return the rows of these records: dicts, ``Columns``, or a table of pandas, polars or Arrow.

        Raises the error of ``refuse`` for records without fields, and for values that are neither numbers nor texts.
        """
        if isinstance(records, list):
            columns, count = self._columns_of_dicts(records), len(records)
        else:
            table = records if isinstance(records, Columns) else columns_of_table(self._owner, records, ModelError)
            if table is None:
                raise ModelError(
                    f"{self._owner}: expected records with named fields (dicts, Columns or a table), given "
                    f"{shortened(records)}; give features= as a function that returns a matrix or SparseRows"
                )
            is_of_objects = JSON_FIELD in table
            columns = self._columns_of_objects(table) if is_of_objects else self._columns_of(table)
            count, records = len(table), table
        rows = self._read(columns, count)
        return rows if self._time is None else replace(rows, times_ms=self.times_of_rows(self._time, records))

    def times_of_rows(self, field: str, records: list[Any] | Columns) -> Floats:
        """Return the times in a field of records in milliseconds, NaN for none."""
        if isinstance(records, list) or JSON_FIELD in records:
            column: Array | list[Any] = [record.get(field) for record in records]
        elif field in records:
            column = records[field]
        else:
            raise ConfigurationError(
                f"{self._owner}: expected the field {field!r}, the time of a row, given Columns without; they have "
                f"{', '.join(map(repr, records.names))}"
            )
        if not len(column):
            return np.zeros(0)
        reader = FieldReader(bits=1, refuse=self._refuse, owner=self._owner)
        numbers, _, _, readings = reader._read_column(field, column)
        return times_of_values(readings, numbers, np.ones(len(column), np.bool_), None)

    # ---- columns of a batch

    def _is_wanted(self, name: str) -> bool:
        return name not in self._without

    def _columns_of(self, table: Columns) -> dict[str, Array | list[Any]]:
        names = table.names if self._wanted is None else self._wanted
        if missing := [name for name in names if name not in table]:
            raise ConfigurationError(
                f"{self._owner}: expected the fields {', '.join(map(repr, names))}, given Columns without "
                f"{', '.join(map(repr, missing))}; they have {', '.join(map(repr, table.names))}"
            )
        return {name: table[name] for name in names if self._is_wanted(name)}

    def _columns_of_objects(self, table: Columns) -> dict[str, Array | list[Any]]:
        """Return what :meth:`_columns_of_dicts` returns for the objects."""
        arrays, names = table.arrays, self._wanted
        if names is None or not all(name in arrays for name in names):
            return self._columns_of_dicts(list(table))
        # Their kind makes a text of a number, and a whole number may be a float in a column.
        if any(arrays[name].dtype.kind == "f" for name in self._prepare.keys() & set(names)):
            return self._columns_of_dicts(list(table))
        columns: dict[str, Array | list[Any]] = {}
        for name in names if len(table) else ():
            # A text is its category: that of an array has no NULs at its end.
            is_text = arrays[name].dtype.kind == "U"
            is_array = self._prepare.get(name) is category_of if is_text else name not in self._prepare
            is_array = is_array and bool(records_with(arrays, name).all())
            columns[name] = arrays[name] if is_array else object_values(arrays, name, _UNNAMED)
        return columns

    def _columns_of_dicts(self, records: list[Any]) -> dict[str, Array | list[Any]]:
        bad: list[int] = []
        are_dicts = set(map(type, records)) == {dict}
        if not are_dicts:  # Python is slow to ask each record whether it is a Mapping.
            bad = [row for row, record in enumerate(records) if not isinstance(record, Mapping)]
        if bad:
            raise self._refuse(
                bad, f"{self._owner}: expected records with named fields, given {shortened(records[bad[0]])}"
            )
        if not records:
            return {}
        names = self._wanted
        if names is None:
            first = tuple(records[0])
            if set(map(tuple, records)) == {first}:
                return {name: list(map(itemgetter(name), records)) for name in filter(self._is_wanted, first)}
            names = tuple(filter(self._is_wanted, dict.fromkeys(chain.from_iterable(records))))
        elif are_dicts and records[0].keys() >= set(names):
            with suppress(KeyError):  # A record need not name all fields.
                return {name: list(map(itemgetter(name), records)) for name in names}
        return {name: [record.get(name, _UNNAMED) for record in records] for name in names}

    # ---- values of a column

    def _read(self, columns: Mapping[str, Array | list[Any]], count: int) -> NamedRows:
        fields: list[str] = []
        numbers: list[Floats] = []
        text_fields: list[str] = []
        places: list[Array] = []
        flags: list[Array] = []
        missing_count = np.zeros(count, dtype=np.intp)
        readings: dict[str, Readings] = {}
        for name, column in columns.items():
            if not isinstance(name, str):
                raise ModelError(f"{self._owner}: expected texts as names of fields, given {name!r}")
            of_numbers, of_texts, missing, read = self._read_column(name, column)
            if read is not None:
                readings[name] = read
                if name not in self._times and len(self._times) < _CACHED_FIELDS and (read.codes >= DATE).any():
                    self._times[name] = None
            if of_numbers is not None and of_numbers.ndim == 1:
                fields.append(name)
                numbers.append(of_numbers)
            elif of_numbers is not None:
                fields += [f"{name}[{position}]" for position in range(of_numbers.shape[1])]
                numbers += list(of_numbers.T)
                missing_count += np.count_nonzero(is_missing(of_numbers), axis=1)
            if of_texts is not None:
                columns_of_texts = list(of_texts.reshape(count, -1).T) if of_texts.size else []
                text_fields += [name] * len(columns_of_texts)
                places += columns_of_texts
            if missing is not None and missing.any():
                flags.append(np.where(missing, place_of_missing(name, self._bits), ABSENT))
                missing_count += missing
        matrix = np.empty((count, len(fields)))
        for position, values in enumerate(numbers):
            matrix[:, position] = values
        hashed = [*places, *flags]
        places_of_rows = np.empty((count, len(hashed)), dtype=np.intp)
        for position, of_field in enumerate(hashed):
            places_of_rows[:, position] = of_field
        return NamedRows(tuple(fields), matrix, tuple(text_fields), places_of_rows, missing_count, readings=readings)

    def _read_column(self, name: str, column: Array | list[Any]) -> _ReadColumn:
        prepare = self._prepare.get(name)
        if isinstance(column, np.ndarray):
            if prepare is category_of and self._may_be_hashed(column):
                return self._read_array(name, column)
            if prepare is not None and column.dtype.kind != "M":
                return self._read_values(name, _prepared(prepare, column.tolist()))
            if column.dtype.kind in "biuf" and column.ndim <= 2:
                floats = column.astype(np.float64, copy=False)
                may_miss = column.dtype.kind == "f" and column.ndim == 1
                return _ReadColumn(floats, None, is_missing(floats) if may_miss else None)
            if column.dtype.kind == "M" and column.ndim == 1 and prepare is None:
                read = read_datetimes(column, self._zone)
                return _ReadColumn(None, None, read.codes == NO_VALUE, read)
            if column.dtype.kind != "U" and not column.dtype.hasobject:
                raise ModelError(
                    f"{self._owner}: expected numbers, texts or times in the field {name!r}, given {column.dtype}; "
                    "convert it before, or leave it out with features="
                )
            if self._may_be_hashed(column):
                return self._read_array(name, column)
            return self._read_values(name, column.tolist())
        return self._read_values(name, column if prepare is None else _prepared(prepare, column))

    def _read_values(self, name: str, column: list[Any]) -> _ReadColumn:
        kinds = set(map(type, column))
        if kinds <= _NUMBERS and kinds and name not in self._prepare:
            floats = self._floats(name, column)
            return _ReadColumn(floats, None, is_missing(floats))
        if kinds == {str}:
            places = self._text_places(name, column)
            found = self._read_texts.get(name)
            return _ReadColumn(None, places, None, None if found is None else _readings(column, found))
        return self._read_mixed(name, column)

    def _read_mixed(self, name: str, column: Sequence[Any]) -> _ReadColumn:
        count = len(column)
        is_text = np.fromiter((isinstance(value, str) or are_texts(value) for value in column), np.bool_, count)
        is_none = np.fromiter((value is None for value in column), np.bool_, count)
        is_number = np.fromiter(
            (isinstance(value, (int, float, np.number, np.bool_)) for value in column), np.bool_, count
        )
        is_moment = np.fromiter(map(is_time, column), np.bool_, count)
        is_named = np.fromiter((value is not _UNNAMED for value in column), np.bool_, count)
        is_wrong = is_named & ~(is_text | is_none | is_number | is_moment)
        if name in self._prepare:
            is_wrong |= is_number | is_moment
        if (bad := np.flatnonzero(is_wrong)).size:
            shown = shortened(column[int(bad[0])])
            reason = f"expected a text in the field {name!r}, given {shown}"
            if name not in self._prepare:
                reason = f"expected a number, a text or None in the field {name!r}, given {shown}; convert it before, "
                reason += "or leave it out with features="
            raise self._refuse(bad.tolist(), f"{self._owner}: {reason}")
        floats = places = None
        missing = is_none
        moments: dict[int, ReadText] = {
            row: read_moment(column[row], self._zone) for row in np.flatnonzero(is_moment).tolist()
        }
        if moments:
            missing = is_none | [moments.get(row, OTHER_TEXT)[0] == NO_VALUE for row in range(count)]
        if is_number.any():
            given = [value if number else np.nan for value, number in zip(column, is_number, strict=True)]
            floats = self._floats(name, given)
            missing = missing | (is_number & is_missing(floats))
        if is_text.any():
            with_texts = compress(column, is_text)
            texts: list[list[str]] = [
                list(dict.fromkeys(value)) if isinstance(value, list) else [str(value)] for value in with_texts
            ]
            lengths = list(map(len, texts))
            rows = np.repeat(np.flatnonzero(is_text), lengths)
            positions = np.fromiter(chain.from_iterable(map(range, lengths)), np.intp, len(rows))
            places = np.full((count, max(lengths)), ABSENT, dtype=np.intp)
            places[rows, positions] = self._text_places(name, list(chain.from_iterable(texts)))
        found = self._read_texts.get(name, {})
        if not moments and not found:
            return _ReadColumn(floats, places, missing)
        read = _readings([value if isinstance(value, str) else None for value in column], found)
        read.codes[~is_text] = NO_VALUE
        for row, moment in moments.items():
            read.codes[row], read.values[row] = moment
        return _ReadColumn(floats, places, missing, read)

    def _floats(self, name: str, column: Sequence[Any]) -> Floats:
        try:
            return np.array(column, dtype=np.float64)
        except OverflowError:  # Whole numbers that fit no float are missing, as all numbers of such a size.
            fitting = [np.inf if isinstance(value, int) and abs(value) > HUGE else value for value in column]
            return np.array(fitting, dtype=np.float64)

    def _read_array(self, name: str, texts: Array) -> _ReadColumn:
        """Return an array of texts as read, without a Python object for each that can only be a text."""
        hashes, may_be_read = hashes_of_texts(name, texts)
        places = (hashes & np.uint64(self._mask)).astype(np.intp)
        if name in self._prepare:
            self._name_places(name, texts, places)
            return _ReadColumn(None, places, None)
        if not may_be_read.any():
            return _ReadColumn(None, places, None)
        _, first, of_each = np.unique(hashes[may_be_read], return_index=True, return_inverse=True)
        candidates = texts[may_be_read][first].tolist()
        found = [read_text(text, self._zone) for text in candidates]
        if all(each is OTHER_TEXT for each in found):
            return _ReadColumn(None, places, None)
        read = _readings([None] * len(texts), {})
        read.codes[may_be_read] = np.array([code for code, _ in found])[of_each]
        read.values[may_be_read] = np.array([value for _, value in found])[of_each]
        return _ReadColumn(None, places, None, read)

    def texts_at(self, places: Collection[int]) -> dict[int, str]:
        """Return texts that were read lately, by their places, with their fields: ``carrier = UA``.

        Another thread may call it while rows are read.

        >>> reader = FieldReader(bits=8)
        >>> rows = reader.rows([{"carrier": "UA"}])
        >>> reader.texts_at(rows.places[0].tolist())
        {219: 'carrier = UA'}
        """
        wanted = frozenset(places)
        known = [(name, each.copy()) for name, each in list(self._places.items())]
        for name in list(self._times):
            for part, values in PARTS.items():
                part_name = part_of(name, part)
                known.append(
                    (part_name, {text: place_of_text(part_name, text, self._bits) for text in map(str, values)})
                )
        return {place: f"{name} = {text}" for name, each in known for text, place in each.items() if place in wanted}

    @staticmethod
    def _may_be_hashed(column: Array) -> bool:
        """Whether an array has texts that compiled code hashes at once."""
        is_long = column.ndim == 1 and len(column) >= _HASHED_TOGETHER
        return is_long and column.dtype.kind == "U" and column.nbytes > 0 and is_compiling()

    def _places_of(self, name: str) -> dict[str, int]:
        """Return the cache of a field, with room for the texts of a batch."""
        known = self._places.get(name)
        if known is None and len(self._places) >= _CACHED_FIELDS:
            self._places.clear()
            self._read_texts.clear()
        elif known is not None and len(known) > _CACHED_TEXTS:
            self._read_texts.pop(name, None)
            known = None
        if known is None:
            known = self._places[name] = {}
            self._named = None
        return known

    def _name_places(self, name: str, texts: Array, places: Indices) -> None:
        """Have the texts of these places in the cache."""
        known, at = self._places_of(name), places & ((1 << _NAMED_BITS) - 1)
        if self._named is None:
            self._named = np.full(1 << _NAMED_BITS, -1, np.intp)
        if not (is_named := self._named[at] == places).all():
            known.update(zip(texts[~is_named].tolist(), places[~is_named].tolist(), strict=True))
            self._named[at] = places

    def _text_places(self, name: str, texts: Sequence[str]) -> Array:
        known = self._places_of(name)
        with suppress(KeyError):  # A text is new.
            return np.fromiter(map(known.__getitem__, texts), np.intp, len(texts))
        if new := list(set(texts).difference(known)):
            known.update(zip(new, self._hashed_places(name, new), strict=True))
            if name not in self._prepare:
                for text in new:
                    if (read := read_text(text, self._zone)) is not OTHER_TEXT:
                        self._read_texts.setdefault(name, {})[text] = read
        return np.fromiter(map(known.__getitem__, texts), np.intp, len(texts))

    def _hashed_places(self, name: str, texts: list[str]) -> list[int]:
        # An array has no NULs at the end of its texts.
        if len(texts) >= _HASHED_TOGETHER and is_loaded() and not any(text[-1:] == "\0" for text in texts):
            array = np.array(texts)
            if array.nbytes <= _ARRAY_BYTES_MAX * len(texts):
                hashes, _ = hashes_of_texts(name, array)
                places: list[int] = (hashes & np.uint64(self._mask)).astype(np.intp).tolist()
                return places
        return [place_of_text(name, text, self._bits) for text in texts]


class _ReadColumn(NamedTuple):
    """A field as read."""

    numbers: Floats | None
    places: Array | None
    """The places of texts."""
    missing: Array | None
    """Which values are missing; None: none."""
    readings: Readings | None = None


def _prepared(prepare: Callable[[Any], Any], column: list[Any]) -> list[Any]:
    """Return the prepared values; of texts each different one is prepared once."""
    if set(map(type, column)) != {str}:
        return list(map(prepare, column))
    found = {text: prepare(text) for text in set(column)}
    if all(prepared == text for text, prepared in found.items()):
        return column
    return list(map(found.__getitem__, column))


def _readings(texts: Sequence[str | None], found: Mapping[str, ReadText]) -> Readings:
    """Return the readings of texts, most of them from the readings found before; None is another value."""
    read = [found.get(text, OTHER_TEXT) for text in texts]  # type: ignore[arg-type]
    codes = np.fromiter((code for code, _ in read), np.uint8, len(read))
    return Readings(codes, np.fromiter((value for _, value in read), np.float64, len(read)))


_UNNAMED: Final = object()
"""Stands where a record does not name a field."""
