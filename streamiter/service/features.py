"""Features by their kind: the fields of events and of rows to predict, as learners and predictors read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.errors import ModelError, shortened
from streamiter.learn import AdaptiveLinearModel, BadRows
from streamiter.learn.features import as_text
from streamiter.models import LinearPredictor, Parameters
from streamiter.models.standardized_model import Explanation
from streamiter.named_rows import ABSENT, FieldReader, NamedRows, hash_of, is_missing
from streamiter.numbers import is_number
from streamiter.records import Batch
from streamiter.service.settings import FeatureKind, LearnSettings
from streamiter.sparse_rows import SparseRows

Row = Mapping[str, Any]
"""Fields with the user's values."""


class FeatureRows:
    """Reads the features of records, each field as its kind, for the training and for predictions.

    ``number``: a number or a truth value. ``category``: a text, a number or a truth value, of which each different one
    is a feature. ``text``: each different word is a feature. None and absent values are missing. Without kinds all
    fields are read, except those of the label, the key and the weight. The rows are ``NamedRows``; for other learners
    than the default one they are ``SparseRows`` of the given ``width``, with numbers multiplied by their scale.

    Raises ``BadRows`` for values of another kind.

    >>> from streamiter.service.settings import LabelSettings
    >>> learn = LearnSettings("classification", LabelSettings("late"), {"hour": "category", "title": "text"})
    >>> rows = FeatureRows(learn)
    >>> rows.as_kinds({"hour": 5, "title": "Heavy rain", "late": True})
    {'hour': '5', 'title': ['heavy', 'rain']}
    >>> rows([{"hour": 5, "title": "Heavy rain"}]).text_fields
    ('hour', 'title', 'title')
    """

    def __init__(self, learn: LearnSettings) -> None:
        label, settings = learn.label, learn.learner_settings
        kinds = learn.features
        self.fields = None if kinds is None else frozenset(name for name, kind in kinds.items() if kind != "ignore")
        """The fields to learn from; None: all."""
        self.readers = [(name, _READERS[kind]) for name, kind in (kinds or {}).items() if kind != "ignore"]
        self._scales: Mapping[str, float] = settings.get("scales", {})
        bits = settings.get("bits", AdaptiveLinearModel().bits)
        self.width: int = 1 << bits
        """The number of places of hashed features."""
        self.is_sparse = learn.learner != "default"
        others = (label.field, learn.weight, label.key, label.time, label.event and label.event_field)
        self.without = frozenset(filter(None, others))
        """The fields that are no features if all others are."""
        self.reader = FieldReader(without=self.without, bits=bits, refuse=BadRows, owner="[learn]")

    def __call__(self, records: Batch) -> Any:
        rows = self.reader.rows(records if self.fields is None else self._typed(records))
        return self._sparse(rows) if self.is_sparse else rows

    def as_kinds(self, record: Row) -> Row:
        """Return the fields to learn from: numbers, texts, and a list of words for each text."""
        if self.fields is None:
            return record
        if not isinstance(record, Mapping):
            raise ModelError(f"[learn] features: expected a record with named fields, given {shortened(record)}")
        row: dict[str, Any] = {}
        for name, reader in self.readers:
            if name not in record:
                continue
            value = record[name]
            if value is None or type(value) in reader.as_it_is:
                row[name] = value
            elif reader.takes(value):
                row[name] = reader.read(value)
            else:
                given = shortened(value)
                raise ModelError(f"[learn] features: expected a {reader.noun} in the field {name!r}, given {given}")
        return row

    def _typed(self, records: Batch) -> list[Row]:
        try:
            return [self.as_kinds(record) for record in records]
        except ModelError:
            pass
        reasons: dict[int, str] = {}
        for number, record in enumerate(records):
            try:
                self.as_kinds(record)
            except ModelError as error:
                reasons[number] = str(error)
        raise BadRows(reasons, next(iter(reasons.values())), reasons)

    def _sparse(self, rows: NamedRows) -> SparseRows:
        """Return numbers at the places of their fields, and texts as ones."""
        numbers = rows.numbers * np.array([self._scales.get(name, 1.0) for name in rows.fields])
        places = [hash_of(name.encode("utf-8", "surrogatepass")) & (self.width - 1) for name in rows.fields]
        of_fields = np.array(places, dtype=np.intp)
        indices = np.hstack([np.where(is_missing(numbers), ABSENT, of_fields), rows.places])
        values = np.hstack([numbers, np.ones(rows.places.shape)])
        is_there = indices != ABSENT
        indptr = np.concatenate([[0], np.cumsum(np.count_nonzero(is_there, axis=1))])
        return SparseRows(indptr, indices[is_there], values[is_there], self.width)


class FieldPredictor(LinearPredictor):
    """Predicts rows that have the fields of the events: each field is read as its kind in training."""

    def __init__(self, parameters: Parameters, features: FeatureRows, subject: str = "model") -> None:
        super().__init__(parameters, subject)
        self._features = features

    @property
    def fields(self) -> frozenset[str]:
        """The fields of rows that have an effect."""
        return super().fields if self._features.fields is None else self._features.fields

    def __call__(self, x: object) -> Any:
        """Return the prediction for a row, or for each of several rows."""
        if isinstance(x, Mapping):
            return self([x])[0] if self._features.is_sparse else super().__call__(self._features.as_kinds(x))
        if isinstance(x, list):
            x = self._features(x) if self._features.is_sparse else [self._features.as_kinds(row) for row in x]
        return super().__call__(x)

    def explain(self, x: object) -> Explanation:
        """Return the score of one row as the sum of the parts of its fields."""
        if not isinstance(x, Mapping):
            return super().explain(x)
        row = self._features.as_kinds(x)
        if not self._features.is_sparse:
            return super().explain(row)
        parts: dict[str, Any] = {}
        for name in row:
            [alone] = self._features([{name: x[name]}])
            part = super().explain(alone)
            parts[name] = sum(part.contributions.values())
        return Explanation(super().explain(([], [])).intercept, parts)


def _is_category(value: object) -> bool:
    return isinstance(value, str) or is_number(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _words(text: str) -> list[str]:
    """Return the different words of a text, in alphabetic order."""
    return sorted(set(_WORD.findall(text.lower())))[:_WORDS_MAX]


_WORD: Final = re.compile(r"\w+")
# A text of more different words is a document; only its first words in alphabetic order count.
_WORDS_MAX: Final = 200


class _KindReader(NamedTuple):
    """Reads the values of one kind."""

    noun: str
    as_it_is: frozenset[type]
    """The types of values that are kept."""
    takes: Callable[[Any], bool]
    read: Callable[[Any], Any]


_READERS: Final[Mapping[FeatureKind, _KindReader]] = {
    "number": _KindReader("number", frozenset({int, float, bool}), is_number, lambda value: value),
    "category": _KindReader("text or number", frozenset({str}), _is_category, as_text),
    "text": _KindReader("text", frozenset(), _is_text, _words),
}
