"""Features by their kind: the fields of events and of rows to predict, as learners and predictors read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from streamiter.learn import AdaptiveLinearModel, Embeddings
from streamiter.learn.rows import rows_of_wrong_kind
from streamiter.models import LinearPredictor, Parameters
from streamiter.models.explanations import Explanation
from streamiter.service.settings.tables import READY_MADE, LearnSettings
from streamiter.values.hashes import hash_of
from streamiter.values.known_fields import KnownFields
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.records import Batch
from streamiter.values.sparse_rows import SparseRows

_OWNER = "[learn] features"


class FeatureRows:
    """Reads the features of records, each field as its kind, for the training and for predictions.

    The kinds are those of :mod:`streamiter.values.field_kinds`; the default learner decides the kinds that the settings
    do not name. Without a table of features all fields are read, except those of the label, the key and the weight. The
    rows are ``NamedRows``; for other learners than the default one they are ``SparseRows`` of the given ``width``, with
    numbers multiplied by their scale.

    Raises ``BadRows`` for values of another kind.

    >>> from streamiter.service.settings.tables import LabelSettings
    >>> learn = LearnSettings("classification", LabelSettings("late"), {"hour": "category", "title": "words"})
    >>> FeatureRows(learn)([{"hour": 5, "title": "Heavy rain", "late": True}]).text_fields
    ('hour', 'title', 'title')
    """

    def __init__(self, learn: LearnSettings) -> None:
        label, settings = learn.label, learn.learner_settings
        self.kinds = learn.field_kinds
        """The kinds that the settings name."""
        self.time_zone = learn.time_zone
        self.fields = None if learn.features is None else frozenset(self.kinds)
        """The fields to learn from; None: all."""
        self._scales: Mapping[str, float] = settings.get("scales", {})
        self.is_sparse = learn.learner not in READY_MADE
        others = (label.field, learn.weight, label.key, label.time, label.event and label.event_field)
        self.without = frozenset(filter(None, others)).union(
            name for name, kind in learn.kinds.items() if kind == "ignore"
        )
        """The fields that are no features if all others are."""
        self.embeddings = embeddings_of(learn)
        """The settings of embeddings; None for other learners than the network."""
        bits = settings.get("bits", AdaptiveLinearModel().bits)
        self.width: int = 1 << bits
        """The number of places of hashed features."""
        self._new_model: Callable[[], AdaptiveLinearModel] = lambda: AdaptiveLinearModel(
            bits=bits, kinds=self.kinds, time_zone=self.time_zone, embeddings=self.embeddings
        )
        fields = None if learn.features is None else list(self.kinds)
        without = self.without if fields is None else ()
        self.reader = self._new_model().reader(_OWNER, fields, list(without))
        self._known = KnownFields(_OWNER, bits, self.kinds, self.time_zone)

    def __call__(self, records: Batch) -> Any:
        rows = self.reader.rows(records)
        if not self.is_sparse:
            return rows
        return self._sparse(self._known.learn(rows, partial(rows_of_wrong_kind, record_of=records.__getitem__)))

    def check(self, records: list[Any]) -> None:
        """Raise ``BadRows`` for records that the learner would refuse for their features."""
        rows = self(records)
        if not self.is_sparse:
            # Labels that come later bring the times of their questions.
            self._new_model().rows(rows, records.__getitem__, np.zeros(len(records)))

    def predictor(self, parameters: Parameters, subject: str) -> LinearPredictor:
        """Return the predictor of a version, for rows with the fields of the events."""
        if self.is_sparse:
            return FieldPredictor(parameters, self, subject)
        if isinstance(parameters, dict) and "kinds" not in parameters and "center" in parameters:
            # A version from before versions had kinds was learned with those of the settings.
            parameters = {"kinds": dict(self.kinds), **parameters}
        return LinearPredictor(parameters, subject)

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


def embeddings_of(learn: LearnSettings) -> Embeddings | None:
    """Return the settings of embeddings; None for other learners than the network.

    >>> from streamiter.service.settings.tables import LabelSettings
    >>> label = LabelSettings("clicked")
    >>> embeddings_of(LearnSettings("classification", label, learner="network", learner_settings={"kind": "fm"})).kind
    'fm'
    """
    if learn.learner != "network":
        return None
    names = {each.name for each in fields(Embeddings)}
    return Embeddings(**{name: value for name, value in learn.learner_settings.items() if name in names})


class FieldPredictor(LinearPredictor):
    """Predicts rows that have the fields of the events, with a model of sparse rows, which has no names of fields."""

    def __init__(self, parameters: Parameters, features: FeatureRows, subject: str = "model") -> None:
        super().__init__(parameters, subject)
        self._features = features

    @property
    def fields(self) -> frozenset[str]:
        """The fields of rows that have an effect."""
        return self._features.fields or frozenset()

    def __call__(self, x: object) -> Any:
        """Return the prediction for a row, or for each of several rows."""
        if isinstance(x, Mapping):
            return self([x])[0]
        return super().__call__(self._features(x) if isinstance(x, list) else x)

    def explain(self, x: object) -> Explanation:
        """Return the score of one row as the sum of the parts of its fields."""
        if not isinstance(x, Mapping):
            return super().explain(x)
        parts: dict[str, Any] = {}
        for name in self.fields & x.keys():
            [alone] = self._features([{name: x[name]}])
            parts[name] = sum(super().explain(alone).contributions.values())
        return Explanation(super().explain(([], [])).intercept, parts)
