"""``RowColumns``: how the ready-made model finds the columns of its features, with their crosses, and reads rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from streamiter.errors import ModelError, OtherModel
from streamiter.learn.ready_made.cell_columns import Categories
from streamiter.learn.ready_made.embeddings import Embeddings, settings_of_embeddings
from streamiter.learn.ready_made.expert_weights import ROWS_OF_A_START
from streamiter.learn.ready_made.model_rows import BEHIND_KEYS, NO_FIELD, FieldNumbers, ModelRows
from streamiter.learn.rows import BadRows, rows_of_wrong_kind
from streamiter.models.published_embeddings import HASH_BITS
from streamiter.operators.declared_state import NESTED, DeclaredState, Form, declared
from streamiter.values.crossed_rows import Cross, checked_crosses, crossed, crossed_fields, matrix_of_fields
from streamiter.values.field_kinds import PARTS, TREND, Kind, part_of
from streamiter.values.known_fields import KnownFields, of_reader
from streamiter.values.named_rows import ABSENT, FieldReader, NamedRows, named_matrix
from streamiter.values.numbers import Floats, one_of, standardized, whole_number
from streamiter.values.records import Columns, columns_of_table
from streamiter.values.sparse_rows import SparseRows, sparse_if_scipy
from streamiter.values.tables import as_floats

BITS_MAX: Final = 28
_PARTS_OF_TIMES: Final = tuple(part_of("", part) for part in (*PARTS, TREND))

AnyFeatures = Any
"""Records with named fields, ``NamedRows``, ``SparseRows``, or anything that numpy turns into a matrix."""


class NewColumns(NamedTuple):
    """How many columns and fields of texts became known with some rows."""

    columns: int
    fields: int


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
        from streamiter.learn.ready_made import row_steps

        self._learned = self._columns.copy()
        values = matrix_of_fields(rows, self._fields)
        numbers = np.full(values.shape, np.nan)
        row_steps.standardize_rows(values, self._learned, numbers)
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
        from streamiter.learn.ready_made import row_steps

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


class RowColumns(DeclaredState):
    """The columns of a model: its fields, the bins and keys of their texts, and its crosses.

    Rows are records with named fields, or ``SparseRows``, and never both.
    """

    bits: int = declared()
    fields: KnownFields = declared(form=NESTED)
    """The fields that the model knows, and what each is."""
    _categories: Categories = declared(made=Categories, form=NESTED)
    """The bins of texts."""
    _crosses: CrossStatistics = declared(form=NESTED)
    _field_numbers: FieldNumbers = declared(made=FieldNumbers, form=Form(attrgetter("names"), FieldNumbers))
    """The numbers of fields of texts in the keys of embeddings."""
    _sparse_width: int | None = declared(None)
    """The width of the ``SparseRows`` that were given; None for named rows."""

    def __init__(
        self,
        owner: str,
        bits: int,
        crosses: Sequence[tuple[str, str]],
        kinds: Mapping[str, Kind] | None,
        time_zone: str | None,
        embeddings: Embeddings | None,
        other_settings: Literal["refuse", "keep"],
    ) -> None:
        """``owner`` begins messages; the other arguments are those of the model."""
        one_of(f"{owner}(other_settings=)", other_settings, "refuse", "keep")
        self._keeps = other_settings == "keep"
        self._owner = owner
        self.embeddings = embeddings
        """The settings of embeddings, if there are any."""
        self.last_rows: NamedRows | None = None
        """The rows that were to be learned last, each value as its field is read; None for sparse rows."""
        self.bits = whole_number(f"{owner}(bits=)", bits, 1, BITS_MAX)
        self._crosses = CrossStatistics(checked_crosses(owner, crosses), self.bits)
        self.fields = KnownFields(owner, self.hash_bits, kinds or {}, time_zone)
        self._reader = self.reader(owner)

    @property
    def _has_begun(self) -> bool:
        """Whether the model has weights, so that the form of its rows is settled."""
        raise NotImplementedError

    # ---- rows

    def _rows_to_predict(self, features: AnyFeatures) -> ModelRows:
        """Return features by the columns of the model; it does not change."""
        named = self._named(features)
        self._check_width(named)
        if isinstance(named, SparseRows):
            return self._by_column(named)
        times_ms = None if self.embeddings is None else named.times_ms
        plain = self.fields.of(named, partial(rows_of_wrong_kind, record_of=_records_of(features)))
        named = self._crosses.of(plain, self.fields.columns.keys() | self.fields.texts.keys())
        return self._by_column(self._keyed(plain, named), times_ms)

    def _rows_to_learn(
        self, features: AnyFeatures, record_of: Callable[[int], Any] | None, times_ms: Floats | None, *, with_bins: bool
    ) -> tuple[ModelRows, NewColumns]:
        """Return features by the columns of the model, and the columns that are new; ``with_bins``: texts get bins.

        Raises ``BadRows`` for values that do not fit their field.
        """
        named = self._named(features)
        self._check_width(named)
        if isinstance(named, SparseRows):
            self._crosses.refuse_sparse_rows()
            self._sparse_width = named.width if len(named) else self._sparse_width
            self.last_rows = None
            return self._by_column(named), NewColumns(0, 0)
        times_ms = None if self.embeddings is None else self.embeddings.times_of_rows(self._owner, named, times_ms)
        refuse = partial(rows_of_wrong_kind, record_of=record_of or _records_of(features))
        plain = self.last_rows = self.fields.learn(named, refuse)
        named = self._crosses.learn(plain)
        new_columns = self.fields.add(named)
        new_fields = 0 if self.embeddings is None else self._field_numbers.add(plain)
        if with_bins:
            self._learn_bins(plain, named)
        return self._by_column(self._keyed(plain, named), times_ms), NewColumns(new_columns, new_fields)

    def _learn_bins(self, plain: NamedRows, named: NamedRows) -> None:
        """Give the texts of rows bins, of which ``named`` has the crosses, too."""
        crosses = set(named.text_fields).difference(plain.text_fields)
        parts, places = self.fields.places_of_parts, named
        if self.embeddings is not None:
            mask = self._places - 1
            places = replace(named, places=np.where(named.places == ABSENT, ABSENT, named.places & mask))
            parts = {name: each & mask for name, each in parts.items()}
        self._categories.learn(places, self._places, self.fields.texts, crosses, parts)

    def _keyed(self, plain: NamedRows, named: NamedRows) -> NamedRows:
        """Return the rows with crosses, with keys in place of hashes if there are embeddings."""
        return named if self.embeddings is None else self._field_numbers.keyed(named, plain.places.shape[1])

    def _numbers_of_crosses(self) -> frozenset[int]:
        """Return the numeric columns that are crosses."""
        names = [" × ".join(cross) for cross in self._crosses.crosses]
        return frozenset(self.fields.columns[name] for name in names if name in self.fields.columns)

    # ---- columns

    def reader(self, owner: str, fields: Sequence[str] | None = None, without: Sequence[str] = ()) -> FieldReader:
        """Return a reader of records for this model, as its own."""
        asked, zone = of_reader(self.fields.asked), self.fields.zone
        options: dict[str, Any] = {"without": without, "bits": self.hash_bits, "refuse": BadRows, "owner": owner}
        time = None if self.embeddings is None else self.embeddings.time
        return FieldReader(fields, kinds=asked, time_zone=zone, time=time, **options)

    def reads_as(self, state: Mapping[str, Any]) -> bool:
        """Whether rows that were read for the model of a :meth:`state` have texts hashed to as many bits."""
        return bool(self.hash_bits == (state["bits"] if state.get("embeddings") is None else HASH_BITS))

    @property
    def hash_bits(self) -> int:
        """The number of bits of the hashes of texts that are read."""
        return self.bits if self.embeddings is None else HASH_BITS

    @property
    def _places(self) -> int:
        """The number of hashed columns of the linear model."""
        return 2**self.bits if self._sparse_width is None else self._sparse_width

    @property
    def _hashed(self) -> int:
        """The index behind those of hashed columns, or keys, in ``ModelRows``."""
        return self._places if self.embeddings is None else BEHIND_KEYS

    @property
    def named_fields(self) -> dict[str, list[str]]:
        """The fields that the options name: ``at`` for a part of it, such as ``at[hour]``."""
        names = [name for cross in self._crosses.crosses for name in cross]
        crossed = [name.rpartition("[")[0] if name.endswith(_PARTS_OF_TIMES) else name for name in names]
        return {"kinds": list(self.fields.asked), "crosses": crossed}

    def _named(self, features: AnyFeatures) -> NamedRows | SparseRows:
        features = sparse_if_scipy(features)
        if isinstance(features, (NamedRows, SparseRows)):
            return features
        if isinstance(features, Mapping):
            raise ModelError(f"{self._owner}: expected rows, given a dict; write a list, [row], for one row")
        is_list = isinstance(features, list) and (not features or isinstance(features[0], Mapping))
        if is_list or isinstance(features, Columns):
            return self._reader.rows(features)
        is_matrix = isinstance(features, (np.ndarray, list, tuple))
        if not is_matrix and (table := columns_of_table(self._owner, features, ModelError)) is not None:
            return self._reader.rows(table)
        return named_matrix(as_floats(self._owner, "features", features))

    def _check_width(self, named: NamedRows | SparseRows) -> None:
        """Refuse sparse rows after records with fields, records after sparse rows, and another width."""
        given = named.width if isinstance(named, SparseRows) else None
        if given is not None and self.embeddings is not None:
            raise ModelError(
                f"{self._owner}(embeddings=): expected records with named fields, given sparse rows, whose columns "
                "belong to no field; leave embeddings out, or give records"
            )
        has_fields = self.fields.columns or self.fields.texts
        is_new = not self._has_begun and self._sparse_width is None and not has_fields
        if is_new or given == self._sparse_width or not len(named):
            return
        before, after = (
            "records with fields" if width is None else f"sparse rows of width {width}"
            for width in (self._sparse_width, given)
        )
        raise ModelError(f"{self._owner}: expected {before}, as in the first rows, given {after}")

    def _by_column(self, named: NamedRows | SparseRows, times_ms: Floats | None = None) -> ModelRows:
        """Return the rows by columns of the model; fields that it does not know are left out."""
        if isinstance(named, SparseRows):
            return ModelRows(named.indptr, named.indices, named.values)
        known = self.fields.columns, self.fields.texts
        return ModelRows.of_named(named, *known, first=self._hashed + 1, times_ms=times_ms)

    def columns_from(self, earlier: RowColumns) -> Callable[[int], int | None]:
        """Return the function from an index of an earlier model's :meth:`rows` to the index of this model's.

        It returns None for a field that this model does not know, and for texts if these have other bits.
        """
        first, before, own, given = self._hashed + 1, earlier._hashed + 1, self.fields.columns, earlier.fields.columns
        columns = {before + column: first + own[field] for field, column in given.items() if field in own}
        if self.embeddings is not None and earlier.embeddings is not None:
            columns[BEHIND_KEYS] = BEHIND_KEYS  # The time of a row.
        return lambda index: columns.get(index) if index >= before - 1 else self._place_of(index, earlier)

    def _place_of(self, index: int, earlier: RowColumns) -> int | None:
        """Return the hashed column, or the key, of an earlier model's."""
        if earlier.embeddings is None:
            if self._places != earlier._places:
                return None
            return index if self.embeddings is None else NO_FIELD << HASH_BITS | index
        if self.embeddings is None:
            return index & (self._places - 1)
        return self._field_numbers.number_in(earlier._field_numbers, index)

    # ---- versions

    def _published_columns(self) -> dict[str, Any]:
        """Return the entries of a published model that say what its columns are."""
        width = {} if self._sparse_width is None else {"width": self._sparse_width}
        return {**self._crosses.published(), **self.fields.published(), "bits": self.bits, **width}

    def _check_bits(self, given: int) -> None:
        """Raise OtherModel for a version of other bits, unless what fits is kept."""
        if given != self.bits and not self._keeps:
            raise OtherModel(
                f"{self._owner}.start_from: expected parameters with bits={self.bits}, given {given}; make the model "
                f"with {self._owner}(bits={given})"
            )

    def _start_columns_from(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take on the columns of a published model; return its parameters, without embeddings that do not fit."""
        self._crosses.start_from(parameters)
        self.fields.start_from(parameters, keeps=self._keeps)
        self._sparse_width = parameters.get("width")
        given = parameters.get("embeddings")
        if self.embeddings is None or given is None:
            return parameters
        if self.embeddings.fit(f"{self._owner}.start_from", settings_of_embeddings(given), keeps=self._keeps):
            self._field_numbers = FieldNumbers(given["text_fields"])
            return parameters
        return {name: value for name, value in parameters.items() if name != "embeddings"}


def _records_of(features: AnyFeatures) -> Callable[[int], Any] | None:
    """Return the function that returns the record of a row, if features are records."""
    return features.__getitem__ if isinstance(features, (list, Columns)) else None
