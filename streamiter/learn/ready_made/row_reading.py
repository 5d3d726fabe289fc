"""The workers of training row by row: they number mini-batches, and read features, labels and weights for the owner.

Records of all kinds become plain data that travels to the owner: named rows or sparse rows, with labels and weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol, TypedDict, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, did_you_mean
from streamiter.learn.labels import Label, Labels
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.label_fields import FieldsBefore, LabelFields
from streamiter.learn.rows import (
    BadRows,
    Examples,
    as_examples,
    blaming_rows,
    of_numbered_rows,
    row_weights,
    rows_to_record,
)
from streamiter.operators.declared_state import GREATEST, NESTED, SharedOperator, declared, for_all
from streamiter.operators.functions import no_field, values_at_once
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.field_kinds import Readings
from streamiter.values.named_rows import NamedRows, is_missing, named_matrix
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch, Columns
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.tables import as_floats

_log = logging.getLogger("streamiter.learn")

_TRAINING: Final = "train_online"

# Fewer records say little about a field that few of them name.
_RECORDS_EXPECTED_TO_NAME_A_FIELD: Final = 100

Position = tuple[int, int]
"""The place of a mini-batch: the subtask that made it, and the number of its first record there."""


class NumberedBatch(TypedDict):
    """A mini-batch with its place in the stream."""

    position: Position
    records: Batch


@final
class RowsToLearn(TypedDict):
    """The rows of a mini-batch, as a worker read them: plain data, from a worker to the owner."""

    position: Position
    numbers: Indices
    """The number of each record in its subtask of the stream."""
    records: Batch
    """The records that the rows were read from, for those that the owner refuses."""
    features: dict[str, Any]
    """The fields of ``NamedRows`` or ``SparseRows``."""
    labels: Labels
    weights: Floats | None
    label_fields: list[str]
    """The fields that the function of the label has read so far."""


def record_of_features(rows: NamedRows | SparseRows) -> dict[str, Any]:
    """Return the fields of rows as plain data."""
    if isinstance(rows, SparseRows):
        return rows_to_record(rows)
    readings = {field: (read.codes, read.values) for field, read in rows.readings.items()}
    return {field: getattr(rows, field) for field in NamedRows.__slots__} | {"readings": readings}


def features_of_record(record: Mapping[str, Any]) -> NamedRows | SparseRows:
    """Return the rows that :func:`record_of_features` turned into plain data."""
    if "width" in record:
        return SparseRows(**record)
    return NamedRows(**{**record, "readings": {field: Readings(*read) for field, read in record["readings"].items()}})


def missing_values_of(rows: NamedRows | SparseRows) -> int:
    """Return how many values of the rows are missing."""
    if isinstance(rows, NamedRows):
        return int(rows.missing.sum())
    return int(np.count_nonzero(is_missing(rows.values)))


class RowsRead(Protocol):
    """Returns features, labels and weights of a mini-batch; raises ``BadRows`` for records that are no rows."""

    def __call__(self, mini_batch: Batch, /) -> tuple[NamedRows | SparseRows, Labels, Floats | None]:
        """Read the mini-batch."""
        ...


ReadFeatures = Callable[[Batch], NamedRows | SparseRows]


def features_reader(
    features: Sequence[str] | Callable[[Any], Any] | None,
    without: Sequence[str],
    model: AdaptiveLinearModel,
    made_of: LabelFields | None = None,
    before: FieldsBefore | None = None,
) -> ReadFeatures:
    """Return the function that reads features: these fields, all fields, or the features of the user's function.

    ``without`` has the fields of label and weight; the fields that the label is ``made_of`` are left out, too, and
    those that it was made of ``before`` are told.
    """
    if features is None or not callable(features):
        reader = model.reader(f"{_TRAINING}(features=)", features, without)

        def rows(mini_batch: Batch) -> NamedRows:
            if made_of is not None:
                reader.leave_out(made_of.left_out)
            found = reader.rows(mini_batch)
            if before is not None:
                before.look_at(chain(found.fields, found.text_fields))
            return found

        return rows
    read = features

    def of_function(mini_batch: Batch) -> NamedRows | SparseRows:
        return _as_rows(f"{_TRAINING}(features=)", read(mini_batch), mini_batch)

    return of_function


def times_left_out(times: Sequence[str], model: AdaptiveLinearModel) -> list[str]:
    """Return the fields of event time that are no features, since their numbers only grow; kinds ask for the others."""
    left_out = [field for field in times if field not in model.fields.asked]
    for field in left_out:
        _log.info(
            "train_online: the field %r is the event time, a number that only grows, so it is no feature; "
            "kinds={%r: 'time'} learns from its hour, weekday, month and trend",
            field,
            field,
        )
    return left_out


class UnnamedFields:
    """Warns once, in the log ``streamiter.learn``, of fields that no record has named so far: they may be misspelt.

    A record need not name all fields, so a misspelt one is no error, and the model would learn without it.
    """

    def __init__(self, step: str, options: Mapping[str, object]) -> None:
        """Expect the fields of these options, such as ``features``; those of a function are not known."""
        self._step = step
        self._unnamed = {
            field: option
            for option, fields in options.items()
            if isinstance(fields, (list, tuple, dict))
            for field in fields
        }
        self._records = 0

    def look_at(self, records: Batch) -> None:
        """Look for the fields in these records."""
        if not self._unnamed or not isinstance(records, (list, Columns)):
            return
        named: list[Any]
        if is_table := isinstance(records, Columns):
            named = [records.names]
        else:
            named = [record for record in records if isinstance(record, Mapping)]
        self._unnamed = {
            field: option
            for field, option in self._unnamed.items()
            # Columns without a feature are refused by their readers.
            if not any(field in record for record in named) and not (is_table and option == "features")
        }
        self._records += len(records) if is_table else len(named)
        if self._records >= _RECORDS_EXPECTED_TO_NAME_A_FIELD:
            unnamed, self._unnamed = self._unnamed, {}
            for field, option in unnamed.items():
                self._warn(field, option, list(dict.fromkeys(chain.from_iterable(named))))

    def _warn(self, field: str, option: str, names: list[Any]) -> None:
        from difflib import get_close_matches  # Imported here: only this warning needs it.

        close = get_close_matches(field, [name for name in names if isinstance(name, str)])
        _log.warning(
            "step %r: expected the field %r of %s=, and none of the first %d records has it, so the model learns "
            "without it; %s",
            self._step,
            field,
            option,
            self._records,
            f"similar fields: {', '.join(map(repr, close))}" if close else "check its name",
        )


def _as_rows(owner: str, features: Any, mini_batch: Batch) -> NamedRows | SparseRows:
    """Return the features that a user's function returned for the mini-batch: sparse rows, or the rows of a matrix."""
    rows: NamedRows | SparseRows
    if isinstance(features, (NamedRows, SparseRows)):
        rows = features
    else:
        rows = named_matrix(as_floats(owner, "features", features))
    if len(rows) != len(mini_batch):
        raise ConfigurationError(f"{owner}: expected a row for each of {len(mini_batch)} records, given {len(rows)}")
    return rows


def labelled_rows(
    read: ReadFeatures, label: str | Callable[[Any], Label], weight: str | Callable[[Any], float] | None
) -> RowsRead:
    """Return the function that reads rows of records that have their label."""

    def read_rows(mini_batch: Batch) -> tuple[NamedRows | SparseRows, Labels, Floats | None]:
        labels = values_of(mini_batch, label, "label")
        if weight is None:
            return read(mini_batch), labels, None
        weights = row_weights(_TRAINING, values_of(mini_batch, weight, "weight"), len(mini_batch))
        return read(mini_batch), labels, weights

    return read_rows


def extracted_rows(extract: Callable[[Any], Examples]) -> RowsRead:
    """Return the function that reads rows with the user's ``extract``."""
    owner = f"{_TRAINING}(extract=)"

    def read_rows(mini_batch: Batch) -> tuple[NamedRows | SparseRows, Labels, Floats | None]:
        examples = as_examples(owner, extract(mini_batch))
        features = examples.features
        rows = _as_rows(owner, features, mini_batch)
        weights = None if examples.weights is None else row_weights(owner, examples.weights, len(rows))
        return rows, np.asarray(examples.targets), weights

    return read_rows


def values_of(mini_batch: Batch, field: str | Callable[[Any], Any], what: str) -> list[Any] | npt.NDArray[Any]:
    """Return the value of a field, or of a function, for each record; the column of ``Columns`` as it is."""
    if callable(field):
        function = field

        def values(records: Batch) -> list[Any]:
            found = values_at_once(function, records)
            return [function(record) for record in records] if found is None else found

        return blaming_rows(values, mini_batch, values, f"{_TRAINING}({what}=)")
    if isinstance(mini_batch, Columns):
        if field not in mini_batch:
            raise ConfigurationError(
                f"{_TRAINING}({what}=): expected a field {field!r}, given {', '.join(mini_batch.names)}"
                f"{did_you_mean(field, mini_batch.names)}"
            )
        return mini_batch[field]
    try:
        return [record[field] for record in mini_batch]
    except (KeyError, TypeError, IndexError):
        argument, records = f"{_TRAINING}({what}=)", enumerate(mini_batch)
        bad = {row: str(no_field(argument, field, record)) for row, record in records if not _has(record, field)}
        raise BadRows(bad, next(iter(bad.values())), bad) from None


def _has(record: Any, field: str) -> bool:
    try:
        record[field]
    except (KeyError, TypeError, IndexError):
        return False
    return True


class NumberMiniBatches(SharedOperator):
    """Numbers the records of a subtask, so that the owner can learn from mini-batches in the order of the stream."""

    _next = declared(0, share=GREATEST)

    def open(self, context: Context) -> None:
        self._subtask = context.subtask_index

    def process(self, mini_batch: Batch, out: Output) -> None:
        """Emit the mini-batch with the number of its first record."""
        out.emit({"position": (self._subtask, self._next), "records": mini_batch})
        self._next += len(mini_batch)


class ReadsLabels(SharedOperator):
    """An operator whose state is the fields that its :class:`LabelFields` have noted, if it has any."""

    made_of: LabelFields | None = declared(form=NESTED, share=for_all(LabelFields.merged))

    def __init__(self, options: Mapping[str, object], made_of: LabelFields | None) -> None:
        self._options = options
        self.made_of = made_of

    def open(self, context: Context) -> None:
        self._unnamed = UnnamedFields(context.name, self._options)
        if self.made_of is not None:
            self.made_of.step = context.name

    def fields_of_label(self) -> list[str]:
        """Return the fields that the function of the label has read so far."""
        return [] if self.made_of is None else list(self.made_of.fields)


class RowReader(ReadsLabels):
    """Reads the rows of mini-batches that have their labels, for the owner."""

    def __init__(self, read: RowsRead, options: Mapping[str, object], made_of: LabelFields | None = None) -> None:
        super().__init__(options, made_of)
        self._read = read

    def process(self, given: NumberedBatch, out: Output) -> None:
        """Emit the rows of a mini-batch; records that are no rows follow the policy of the step."""
        self._unnamed.look_at(given["records"])

        def emit(records: Batch, numbers: Indices) -> None:
            features, labels, weights = blaming_rows(self._read, records, self._read)
            rows: RowsToLearn = {
                "position": given["position"],
                "numbers": numbers,
                "records": records,
                "features": record_of_features(features),
                "labels": labels,
                "weights": weights,
                "label_fields": self.fields_of_label(),
            }
            out.emit(rows)

        of_numbered_rows(emit, given["records"], given["position"][1], out)
