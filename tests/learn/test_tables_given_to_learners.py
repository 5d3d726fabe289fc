"""Learners accept the rows of pandas, polars and Arrow tables, or refuse them with a clear error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest

from streamiter.errors import ModelError
from streamiter.learn import (
    DecisionTree,
    Examples,
    FeatureHasher,
    KMeans,
    LinearRegression,
    LogisticRegression,
    OnlineKMeans,
    ProgressiveValidation,
    SparseRows,
    StandardScaler,
    scaled,
)
from streamiter.networks.data import as_labelled_rows

Make = Callable[[Any], Any]

X = {"a": [0.0, 1.0, 2.0, 3.0], "b": [1, 0, 1, 0]}
MATRIX = np.column_stack(list(X.values()))
Y = [0, 1, 0, 1]

libraries = pytest.mark.parametrize(
    ("table", "column"),
    [
        (pandas.DataFrame, pandas.Series),
        (polars.DataFrame, polars.Series),
        (pyarrow.table, pyarrow.array),
        (pyarrow.table, lambda values: pyarrow.chunked_array([values[:1], values[1:]])),
    ],
    ids=["pandas", "polars", "Arrow", "Arrow in chunks"],
)


def linear(x: Any, y: Any) -> Any:
    model = LinearRegression(2)
    model.fit(x, y, y, rounds=3, progress=False)
    return model.predict(x)


def logistic(x: Any, y: Any) -> Any:
    model = LogisticRegression(2)
    model.learn(x, y, y)
    return [*model.predict(x), *model.learn_each(x, y)]


def tree(x: Any, y: Any) -> Any:
    fitted = DecisionTree("regression").fit(x, y, progress=False)
    return fitted.predict(x)


def k_means(x: Any, y: Any) -> Any:
    fitted = KMeans(clusters=2, initial=x[:2] if isinstance(x, np.ndarray) else X_START).fit(x, progress=False)
    return [*fitted.predict(x), *fitted.centroids.ravel()]


X_START = MATRIX[:2]


def online_k_means(x: Any, y: Any) -> Any:
    model = OnlineKMeans(clusters=2, initial=X_START)
    model.learn(x)
    return model.parameters()["centroids"].ravel()


def standard_scaler(x: Any, y: Any) -> Any:
    scaler = StandardScaler()
    scaler.learn(x)
    return scaled(scaler.parameters(), x).ravel()


def validation(x: Any, y: Any) -> Any:
    validated = ProgressiveValidation(kind="regression")
    validated.update(y, y, y)
    return list(validated.metrics().values())


def examples(x: Any, y: Any) -> Any:
    checked = LinearRegression(2).checked_examples(Examples(x, y, y))
    return [*checked.rows.ravel(), *checked.targets]  # type: ignore[union-attr]


def rows_of_networks(x: Any, y: Any) -> Any:
    data = as_labelled_rows("fit", x, y)
    return [*data.rows.ravel(), *data.labels]  # type: ignore[union-attr]


def sparse_rows(x: Any, y: Any) -> Any:
    return SparseRows.from_dense(x).to_dense().ravel()


USES: list[Callable[[Any, Any], Any]] = [
    linear,
    logistic,
    tree,
    k_means,
    online_k_means,
    standard_scaler,
    validation,
    examples,
    rows_of_networks,
    sparse_rows,
]

uses = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


@libraries
@uses
def test_a_table_is_read_as_its_matrix(use: Make, table: Make, column: Make) -> None:
    """A user who has a table has no reason to convert it to arrays."""
    assert list(use(table(X), column(Y))) == list(use(MATRIX, np.array(Y)))  # type: ignore[call-arg]


@pytest.mark.parametrize("use", [use for use in USES if use is not validation], ids=lambda use: use.__name__)
def test_a_column_without_numbers_is_named(use: Make) -> None:
    """Texts of digits were read as numbers, and timestamps became numbers of 1e18."""
    times = pandas.DataFrame({"a": [0.0, 1.0], "at": pandas.to_datetime(["2024-01-01", "2024-01-02"])})
    for table, name, kind in (
        (times, "at", "datetime64"),
        (polars.DataFrame({"a": [0.0, 1.0], "b": ["0", "1"]}), "b", "<U1"),
    ):
        with pytest.raises(ModelError, match=f"column '{name}': expected numbers, given {kind}.*leave the column out"):
            use(table, np.array([0, 1]))  # type: ignore[call-arg]


@uses
def test_a_lazy_query_is_refused_with_a_remedy(use: Make) -> None:
    """A lazy query has no rows yet."""
    query = polars.DataFrame(X).lazy()
    with pytest.raises(ModelError, match=r"a query of them, a polars.LazyFrame; write ….collect\(\)"):
        use(query, query)  # type: ignore[call-arg]


@libraries
def test_a_tree_learns_classes_that_are_texts(table: Make, column: Make) -> None:
    """A column of texts was refused, because it was an array of objects."""
    fitted = DecisionTree().fit(table(X), column(["no", "yes", "no", "yes"]), progress=False)
    assert fitted.predict(table(X)).tolist() == ["no", "yes", "no", "yes"]


@libraries
def test_a_hasher_takes_a_table_as_records(table: Make, column: Make) -> None:
    """The hasher iterated over the names of columns, and failed with "string indices must be integers, not 'str'"."""
    hasher = FeatureHasher(["color"], numeric=["size"], crosses=[("color", "count")], bits=8)
    fields = {"color": ["red", None, "blue"], "size": [1.0, 2.0, None], "count": [1, 2, 3]}
    records = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    assert hasher.rows(table(fields)) == hasher.rows(records)
    with pytest.raises(ModelError, match="FeatureHasher: expected a field 'color', given size, count"):
        hasher.rows(table({"size": [1.0], "count": [1]}))
