"""JSON objects with the columns of some fields, whose types are found in the records: no schema is needed.

For steps that read a few fields of many records. The rows of the columns are still the objects, see
:mod:`streamiter.values.object_columns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from streamiter.topics.formats import Json, has_big_integer
from streamiter.topics.joined_values import JoinedValues, lengths_of
from streamiter.topics.json_columns import ColumnScanner, joined_bytes
from streamiter.topics.topic import TopicBatch
from streamiter.values.helpers.compiled import is_compiling, is_loaded
from streamiter.values.numbers import Indices
from streamiter.values.object_columns import HAS_FIELD, JSON_FIELD
from streamiter.values.records import Batch, Columns

# Measured: columns of fewer records take longer than dicts.
_RECORDS_MIN: Final = 64
# A batch that is scanned for nothing takes a third longer. So few trials cost less than two percent.
_BATCHES_BETWEEN_TRIALS: Final = 16
# The bits of a whole number say which fields a record has.
_FIELDS_MAX: Final = 62
# One long text makes all rows of its array as long as its own, four bytes for each character.
_BYTES_MAX: Final = 512
_TIMES_JSON_MAX: Final = 16


@final
class JsonObjects:
    """Decodes JSON as :class:`~streamiter.topics.formats.Json` does, if possible with the columns of these fields.

    The types of the fields are found in the records. A batch becomes ``Columns`` if each record is an object whose
    fields have the most common types of earlier records, or are missing; the rows of the columns are the objects.
    Another batch is a list. Needs Numba, which another step has loaded.

    >>> decoder = JsonObjects(["town"])
    >>> decoder.decode(TopicBatch(values=[b'{"town": "Rom", "km": [12]}', b"7"]))
    [{'town': 'Rom', 'km': [12]}, 7]
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = list(dict.fromkeys(fields))
        self._json = Json()
        self._types: dict[str, type | None] = dict.fromkeys(self._fields)
        self._absent: list[str] = []
        """The fields that no record has had so far, or with values that are no column."""
        self._scanner: ColumnScanner | None = None
        self._has_loaded = False
        self._batches_before_trial = 0
        # A key is compared with the bytes of its name, so no byte may need an escape.
        is_plain = all(name.isprintable() and not set(name) & {'"', "\\"} for name in self._fields)
        self._is_scanned = is_compiling() and is_plain and len(self._fields) <= _FIELDS_MAX

    def __reduce__(self) -> tuple[type[JsonObjects], tuple[list[str]]]:
        # A flow may be sent to other processes; compiled code is found there.
        return JsonObjects, (self._fields,)

    def ahead(self, batch: TopicBatch) -> Callable[[], object] | None:
        """Return what loads compiled code, or compiles it in some seconds, so that a thread does it; None if it has."""
        return self._load if self._may_scan(batch) and not self._has_loaded else None

    def _load(self) -> None:
        self._columns(ColumnScanner([("text", np.dtype(str), None)]), [b'{"text": "a"}'])
        self._has_loaded = True

    def _may_scan(self, batch: TopicBatch) -> bool:
        return self._is_scanned and len(batch.values) >= _RECORDS_MIN and is_loaded()

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the objects; raise ``DecodeError`` for values that are not JSON."""
        if not self._may_scan(batch):
            return self._json.decode(batch)
        if self._batches_before_trial:
            self._batches_before_trial -= 1
            return self._json.decode(batch)
        if self._scanner is not None:
            if (columns := self._columns(self._scanner, batch.values)) is not None:
                return columns
            self._batches_before_trial = _BATCHES_BETWEEN_TRIALS
        records = self._json.decode(batch)
        self._learn_types(records)
        return records

    def _columns(self, scanner: ColumnScanner, values: Sequence[bytes | None]) -> Columns | None:
        """Return the columns; None unless each value is an object of the types that are known."""
        lengths = lengths_of(values)
        if lengths.max() > _BYTES_MAX:  # Before anything has so many bytes.
            return None
        if (joined := _joined(values, lengths)) is None:
            return None
        has, texts = np.zeros(len(values), np.int64), joined.buffer.tobytes()
        if has_big_integer(texts) or (scanned := scanner.scan(joined, has)) is None or len(scanned[1]):
            return None
        absent = dict.fromkeys(self._absent, np.zeros(len(values), np.bool_))
        columns = Columns({**scanned[0], **absent, HAS_FIELD: has, JSON_FIELD: scanner.texts_of(joined)})
        return columns if columns.nbytes <= _TIMES_JSON_MAX * len(texts) else None

    def _learn_types(self, records: Batch) -> None:
        """Expect the most common type of each field from now on; numbers are whole only while all were."""
        before = self._types.copy()
        for name, known in before.items():
            found = Counter(type(record[name]) for record in records if type(record) is dict and name in record)
            if found:
                most = found.most_common(1)[0][0]
                self._types[name] = float if most is int and (found[float] or known is float) else most
        if self._scanner is None or self._types != before:
            kinds = {name: kind for name, kind in self._types.items() if kind in (str, bool, int, float)}
            self._absent = [name for name in self._types if name not in kinds]
            schema = [(name, np.dtype(kind), None) for name, kind in kinds.items()]
            self._scanner = ColumnScanner(schema, self._absent) if schema else None

    def __repr__(self) -> str:
        return f"JsonObjects({self._fields})"


def _joined(values: Sequence[bytes | None], lengths: Indices) -> JoinedValues | None:
    """Return the values in one buffer; None if one is null."""
    if isinstance(values, JoinedValues):
        return None if len(values.nulls) else values
    data = joined_bytes(values)
    return None if data is None else JoinedValues(data, np.cumsum(lengths + 1) - 1, np.zeros(0, np.intp))
