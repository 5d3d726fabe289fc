"""``OnlineClassifier`` and ``OnlineRegressor``: the default learner as estimators of scikit-learn.

They take matrices, sparse matrices, and tables of pandas, polars and Arrow, whose columns may be numbers and texts with
missing values. This module needs scikit-learn (``pip install "streamiter[scikit-learn]"``), and is imported when one of
the two names is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn.losses import LossName
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.models.explanations import Explanation
from streamiter.values.field_kinds import Kind
from streamiter.values.numbers import Floats
from streamiter.values.records import Columns, columns_of_table

try:
    from scipy.sparse import csr_matrix, issparse
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_consistent_length
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        _get_feature_names,
        assert_all_finite,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ConfigurationError(
        "OnlineClassifier and OnlineRegressor: expected scikit-learn 1.6 or later, given none; install it with: pip "
        "install 'streamiter[scikit-learn]', or use AdaptiveLinearModel, which needs no scikit-learn"
    ) from error

# The names of arguments are those of scikit-learn, also `X`.

_BITS: Final = 18
_SETTINGS: Final = ("crosses", "rates", "bits", "kinds", "time_zone", "shapes", "embeddings")


class _OnlineEstimator(BaseEstimator):  # type: ignore[misc]
    """The common part: the checks of features, and one pass in the order of the rows."""

    model_: AdaptiveLinearModel

    def __init__(
        self,
        *,
        crosses: Sequence[tuple[str, str]] = (),
        rates: Sequence[float] | None = None,
        bits: int = _BITS,
        kinds: Mapping[str, Kind] | None = None,
        time_zone: str | None = None,
        shapes: bool = True,
        embeddings: Embeddings | None = None,
    ) -> None:
        self.crosses = crosses
        self.rates = rates
        self.bits = bits
        self.kinds = kinds
        self.time_zone = time_zone
        self.shapes = shapes
        self.embeddings = embeddings

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    def _examples(self, X: Any, y: Any, *, is_first: bool, are_numbers: bool) -> tuple[Any, npt.NDArray[Any]]:
        """Return checked features and labels; the first ones decide which columns there are."""
        features = self._features(X, is_first=is_first)
        validate_data(self, X, y, reset=False, skip_check_array=True)  # Refuses None.
        labels = column_or_1d(y, warn=True)
        check_consistent_length(features, labels)
        if are_numbers:
            labels = np.asarray(labels, dtype=np.float64)
        assert_all_finite(labels, input_name="y")
        return features, labels

    def _features(self, X: Any, *, is_first: bool = False) -> Any:
        """Return the columns of a table by the names of the first table, or a matrix."""
        has_names = _get_feature_names(X) is not None
        names = getattr(self, "feature_names_in_", None)
        if not has_names:
            matrix = validate_data(
                self, X, reset=is_first, accept_sparse="csr", dtype=np.float64, ensure_all_finite="allow-nan"
            )
            if is_first:
                self._is_sparse = issparse(matrix)
            elif self._is_sparse:
                return csr_matrix(matrix)
            elif issparse(matrix):
                matrix = matrix.toarray()
            return matrix if is_first or names is None else Columns(dict(zip(names, matrix.T, strict=True)))
        validate_data(self, X, reset=is_first, skip_check_array=True)
        table = columns_of_table(type(self).__name__, X, ModelError)
        if table is None:
            raise ModelError(
                f"{type(self).__name__}: expected a matrix or a table of pandas, polars or Arrow, given {type(X)}"
            )
        if is_first:
            self._is_sparse = False
        if is_first or names is not None:
            return table
        return Columns({str(place): table[name] for place, name in enumerate(table.names)})

    def _learn(self, features: Any, labels: npt.NDArray[Any], sample_weight: npt.ArrayLike | None) -> Self:
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, labels, dtype=np.float64)
        self.model_.learn(features, labels, weights)
        return self

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def explain(self, X: Any) -> Explanation:
        """Return the score of each row as the sum of the parts of its columns."""
        check_is_fitted(self)
        return self.model_.explain(self._features(X))


class OnlineClassifier(ClassifierMixin, _OnlineEstimator):  # type: ignore[misc]
    """The default learner for classes, as an estimator of scikit-learn: one pass over the rows, in their order.

    ``fit`` starts again, and ``partial_fit`` learns from more rows. Tables may have columns of numbers and of texts,
    with missing values; nothing is scaled or encoded before. The arguments are those of
    :class:`~streamiter.learn.AdaptiveLinearModel`, which is the attribute ``model_``.

    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=(1_000, 2))
    >>> y = np.where(x[:, 0] > 0, "up", "down")
    >>> model = OnlineClassifier().fit(x, y)
    >>> model.classes_.tolist(), model.predict([[2.0, 0.0]]).tolist(), model.score(x, y) > 0.9
    (['down', 'up'], ['up'], True)
    """

    classes_: npt.NDArray[Any]

    def fit(self, X: Any, y: Any, sample_weight: npt.ArrayLike | None = None) -> Self:
        """Learn from the rows, in their order; what was learned before is forgotten."""
        features, labels = self._examples(X, y, is_first=True, are_numbers=False)
        check_classification_targets(labels)
        self._start(np.unique(labels))
        return self._learn_classes(features, labels, sample_weight)

    def partial_fit(
        self, X: Any, y: Any, classes: npt.ArrayLike | None = None, sample_weight: npt.ArrayLike | None = None
    ) -> Self:
        """Learn from more rows. The first call needs ``classes``, the labels of all classes."""
        is_first = not hasattr(self, "classes_")
        features, labels = self._examples(X, y, is_first=is_first, are_numbers=False)
        check_classification_targets(labels)
        given = None if classes is None else np.unique(classes)
        if is_first and given is None:
            raise ValueError("classes must be passed on the first call to partial_fit")
        if not is_first and given is not None and not np.array_equal(given, self.classes_):
            raise ValueError(f"expected classes={self.classes_} as in the first call to partial_fit, given {given}")
        if is_first and given is not None:
            self._start(given)
        return self._learn_classes(features, labels, sample_weight)

    def _start(self, classes: npt.NDArray[Any]) -> None:
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__}: expected two classes or more, given one class: {classes}")
        self.classes_ = classes
        known = None if len(classes) == 2 else list(range(len(classes)))
        self.model_ = AdaptiveLinearModel(classes=known, **self._settings())

    def _learn_classes(self, features: Any, labels: npt.NDArray[Any], sample_weight: npt.ArrayLike | None) -> Self:
        numbers = np.searchsorted(self.classes_, labels)
        known = self.classes_[np.minimum(numbers, len(self.classes_) - 1)] == labels
        if not np.all(known):
            raise ValueError(f"expected labels of the classes {self.classes_}, given {np.unique(labels[~known])}")
        return self._learn(features, numbers == 1 if len(self.classes_) == 2 else numbers, sample_weight)

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class for each row, in the order of ``classes_``."""
        check_is_fitted(self)
        return self.model_.predict_proba(self._features(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the most probable class of each row."""
        found: npt.NDArray[Any] = self.predict_proba(X).argmax(axis=1)
        predicted: npt.NDArray[Any] = self.classes_[found]
        return predicted


class OnlineRegressor(RegressorMixin, _OnlineEstimator):  # type: ignore[misc]
    """The default learner for numbers, as an estimator of scikit-learn: one pass over the rows, in their order.

    ``fit`` starts again, and ``partial_fit`` learns from more rows. Tables and arguments are as in
    :class:`OnlineClassifier`; ``loss`` and ``quantile`` say what is predicted, as in ``AdaptiveLinearModel``.

    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=(1_000, 2))
    >>> OnlineRegressor().fit(x, 3 * x[:, 0] + 100).predict([[2.0, 0.0]]).round().tolist()
    [106.0]
    """

    def __init__(
        self,
        *,
        loss: LossName | None = None,
        quantile: float | None = None,
        crosses: Sequence[tuple[str, str]] = (),
        rates: Sequence[float] | None = None,
        bits: int = _BITS,
        kinds: Mapping[str, Kind] | None = None,
        time_zone: str | None = None,
        shapes: bool = True,
        embeddings: Embeddings | None = None,
    ) -> None:
        options: dict[str, Any] = {"time_zone": time_zone, "shapes": shapes, "embeddings": embeddings}
        super().__init__(crosses=crosses, rates=rates, bits=bits, kinds=kinds, **options)
        self.loss = loss
        self.quantile = quantile

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"loss": self.loss, "quantile": self.quantile}

    def fit(self, X: Any, y: Any, sample_weight: npt.ArrayLike | None = None) -> Self:
        """Learn from the rows, in their order; what was learned before is forgotten."""
        features, labels = self._examples(X, y, is_first=True, are_numbers=True)
        self.model_ = AdaptiveLinearModel(task="regression", **self._settings())
        return self._learn(features, labels, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: npt.ArrayLike | None = None) -> Self:
        """Learn from more rows."""
        if not hasattr(self, "model_"):
            return self.fit(X, y, sample_weight)
        features, labels = self._examples(X, y, is_first=False, are_numbers=True)
        return self._learn(features, labels, sample_weight)

    def predict(self, X: Any) -> Floats:
        """Return the number for each row."""
        check_is_fitted(self)
        return self.model_.predict(self._features(X))
