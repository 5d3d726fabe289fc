"""``OnlineClassifier`` and ``OnlineRegressor`` pass scikit-learn's checks, and learn as the default learner does.

scikit-learn is imported in the tests: its import takes longer than to collect all tests of learners.
"""

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from scipy.sparse import csr_matrix
from support.waiting import PATIENCE_S

from streamiter import learn
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel

NOT_APPLICABLE = {
    "check_sample_weight_equivalence_on_dense_data": "a row of weight 2 is one step that is twice as long",
    "check_sample_weight_equivalence_on_sparse_data": "a row of weight 2 is one step that is twice as long",
}


@pytest.mark.parametrize("made", ["OnlineClassifier", "OnlineRegressor"])
def test_it_passes_the_checks_of_scikit_learn(made: str) -> None:
    """The page names the checks that do not apply, and why; a check that fails beside them is a fault."""
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(getattr(learn, made)(), on_fail=None, on_skip=None)
    assert {each["check_name"] for each in results if each["status"] == "failed"} == set(NOT_APPLICABLE)
    # It needs a variable of the environment before scipy is imported.
    assert {each["check_name"] for each in results if each["status"] == "skipped"} <= {"check_array_api_input"}
    page = Path(__file__).parents[2].joinpath("docs/other-learners.md").read_text(encoding="utf-8")
    assert [name for name in NOT_APPLICABLE if name not in page] == []


DRAW = np.random.default_rng(5)
FRAME = pandas.DataFrame(
    {
        "km": DRAW.normal(600, 200, 900),
        "sky": DRAW.choice(["sun", "rain", "snow"], 900),
        "wind": np.where(DRAW.random(900) < 0.1, np.nan, DRAW.normal(size=900)),
    }
)
LATE = np.where((FRAME["km"] > 600) ^ (FRAME["sky"] == "rain"), "late", "on time")
ARRIVAL = np.where(FRAME["sky"] == "snow", "never", LATE)
MINUTES = FRAME["km"] / 10 + 30 * (FRAME["sky"] == "rain")
TABLES = {"pandas": lambda frame: frame, "polars": polars.from_pandas, "arrow": pyarrow.Table.from_pandas}
tables = pytest.mark.parametrize("table_of", TABLES.values(), ids=TABLES)


def rows(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    return frame.replace({np.nan: None}).to_dict("records")


@tables
def test_tables_are_learned_as_the_default_learner_learns_them(table_of: Any) -> None:
    """Texts and missing values need no encoder; the names of the columns are the fields."""
    table = table_of(FRAME)
    for y, classes in [(LATE, ["late", "on time"]), (ARRIVAL, ["late", "never", "on time"])]:
        model = learn.OnlineClassifier(crosses=[("km", "sky")]).fit(table, y)
        assert model.classes_.tolist() == classes
        assert model.feature_names_in_.tolist() == ["km", "sky", "wind"]
        assert model.n_features_in_ == 3
        alone = AdaptiveLinearModel(crosses=[("km", "sky")], classes=None if len(classes) == 2 else [0, 1, 2])
        numbers = np.searchsorted(classes, y)
        alone.learn(rows(FRAME), numbers == 1 if len(classes) == 2 else numbers)
        found = model.predict_proba(table)
        assert found.tolist() == alone.predict_proba(rows(FRAME)).tolist()
        assert model.predict(table).tolist() == model.classes_[found.argmax(axis=1)].tolist()
        assert model.score(table, y) > 0.9
        assert model.explain(table).contributions.keys() >= {"km", "sky", "wind", "km × sky"}
    regressor = learn.OnlineRegressor().fit(table, MINUTES)
    assert regressor.score(table, MINUTES) > 0.95


@pytest.mark.parametrize("features", ["table", "matrix", "sparse matrix"])
def test_parts_are_learned_as_the_whole(features: str) -> None:
    """A pass in parts must be the same pass, weights included."""
    matrix = FRAME[["km", "wind"]].fillna(0.0).to_numpy()
    x = {"table": FRAME, "matrix": matrix, "sparse matrix": csr_matrix(matrix)}[features]
    weights = DRAW.random(900) * 2
    cuts = [slice(0, 1), slice(1, 400), slice(400, 900)]
    whole = learn.OnlineClassifier().fit(x, ARRIVAL, weights)
    parts, numbers = learn.OnlineClassifier(), learn.OnlineRegressor()
    for cut in cuts:
        parts.partial_fit(x[cut], ARRIVAL[cut], np.unique(ARRIVAL), weights[cut])
        numbers.partial_fit(x[cut], MINUTES[cut], weights[cut])
    assert parts.predict_proba(x).tolist() == whole.predict_proba(x).tolist()
    assert numbers.predict(x).tolist() == learn.OnlineRegressor().fit(x, MINUTES, weights).predict(x).tolist()
    if features == "sparse matrix":
        assert parts.predict_proba(matrix).tolist() == whole.predict_proba(x).tolist()


def test_it_works_with_the_tools_of_scikit_learn() -> None:
    """A pipeline, a search and a copy use the settings by name, and a pickle has what was learned."""
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    matrix = FRAME[["km", "wind"]].fillna(0.0).to_numpy()
    labels = matrix[:, 0] * 1.0 > 600
    assert cross_val_score(make_pipeline(PolynomialFeatures(), learn.OnlineClassifier()), matrix, labels).min() > 0.85
    search = GridSearchCV(learn.OnlineRegressor(), {"rates": [None, (0.5,)]}, cv=3).fit(matrix, matrix[:, 0] * 2.0)
    assert search.best_score_ > 0.9
    model = clone(learn.OnlineClassifier(rates=[0.5], crosses=[("km", "sky")], bits=12, kinds={"sky": "words"}))
    expected = {"rates": [0.5], "crosses": [("km", "sky")], "bits": 12, "kinds": {"sky": "words"}}
    expected |= {"time_zone": None, "shapes": True, "embeddings": None}
    assert model.get_params() == expected
    twin = pickle.loads(pickle.dumps(model.fit(FRAME, LATE)))
    assert twin.predict_proba(FRAME).tolist() == model.predict_proba(FRAME).tolist()


def test_columns_are_found_by_name_or_by_position() -> None:
    """Columns in another order were learned as other columns."""
    numbers = FRAME[["km"]].assign(wind=FRAME["wind"].fillna(0.0))
    named, plain = (
        learn.OnlineRegressor().fit(numbers, MINUTES),
        learn.OnlineRegressor().fit(numbers.to_numpy(), MINUTES),
    )
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        assert named.predict(numbers.to_numpy()).tolist() == named.predict(numbers).tolist()
    with pytest.warns(UserWarning, match="was fitted without feature names"):
        assert plain.predict(numbers).tolist() == plain.predict(numbers.to_numpy()).tolist()
    with pytest.raises(ValueError, match="feature names should match"):
        named.predict(numbers[["wind", "km"]])
    with pytest.raises(ValueError, match="2 features"):
        plain.predict(numbers.to_numpy()[:, :1])


def test_labels_that_do_not_fit_are_refused() -> None:
    """A class that the first call did not name would have no probability."""
    model = learn.OnlineClassifier()
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(FRAME, LATE)
    model.partial_fit(FRAME, LATE, ["late", "on time"])
    with pytest.raises(ValueError, match="expected labels of the classes"):
        model.partial_fit(FRAME, ARRIVAL)
    with pytest.raises(ValueError, match="as in the first call"):
        model.partial_fit(FRAME, LATE, ["late", "never"])
    with pytest.raises(ValueError, match="expected two classes or more"):
        learn.OnlineClassifier().fit(FRAME, ["late"] * 900)
    with pytest.raises(ModelError, match="expected numbers in the field 'km'"):
        model.partial_fit(FRAME.assign(km="far"), LATE)


def test_without_scikit_learn_the_error_names_the_command() -> None:
    """An import error names a package that the user has not heard of."""
    program = """
import sys
sys.modules["sklearn"] = None
from streamiter.learn import *
from streamiter.learn import OnlineClassifier
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "ConfigurationError: OnlineClassifier and OnlineRegressor: expected scikit-learn" in done.stderr
    assert "pip install 'streamiter[scikit-learn]'" in done.stderr
