"""The arithmetic of the adaptive linear model equals the published test vectors, with Numba and without."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from learn.row_streams import (
    DENSE,
    LABELS,
    SPARSE,
    check_extreme_rows,
    extreme_rows,
    features,
    linear_learner,
    new_model,
)
from support.amended_reference import amended
from support.examples import random_examples
from support.waiting import PATIENCE_S

from streamiter.learn import SparseRows
from streamiter.models import LinearPredictor
from streamiter.values.helpers.compiled import compiled, is_compiling, saying_that_it_compiles

TESTS = Path(__file__).resolve().parents[1]
REFERENCE = TESTS.parents[1] / "shared" / "reference" / "default-learner"

# The rows 0, 1, 2, 9, 14 and 19 of the published streams.
PUBLISHED_ROWS = [0, 1, 2, 9, 14, 19]
PUBLISHED = {
    "binary dense": [0.5, 0.748695435866918, 0.156116767144265, 0.23862748526229, 0.864976213953006, 0.964241342738023],
    "regression dense": [0.0, 117.829419696158, 117.829419696158, 94.0214368863083, 107.208919803805, 113.606550267011],
    "binary sparse": [
        0.5,
        0.384703925276736,
        0.508399273577101,
        0.248396291447731,
        0.166031769921626,
        0.0925800052852894,
    ],
    "regression sparse": [0.0, 0.0, 1.63009250692216, 3.92430204215857, 3.91622961630666, 3.40452199572866],
}


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_predictions_equal_the_published_test_vectors(name: str) -> None:
    """A changed constant or a swapped step makes a learner that still learns, but not as well as the measured one."""
    predictions = new_model(name).learn_each(features(name), LABELS[name])
    assert predictions[PUBLISHED_ROWS] == close(PUBLISHED[name])


def test_published_parameters_equal_the_published_test_vectors() -> None:
    """The served model was another one than the model that was validated."""
    model = new_model("regression dense")
    model.learn(DENSE, LABELS["regression dense"])
    found = model.parameters()
    assert found["weights"] == close([1.75030623153811, -3.7085922644978, 1.18758147378107])
    assert (found["intercept"], found["lowest"], found["highest"]) == close(
        (99.4380416575503, 78.8001958689859, 118.912147113897)
    )
    classes = new_model("softmax dense")
    last = classes.learn_each(DENSE, LABELS["softmax dense"])[-1]
    assert last == close([0.133557679533169, 0.512094149649243, 0.354348170817588])


@pytest.mark.parametrize("name", LABELS)
def test_each_step_equals_the_reference_vectors(name: str) -> None:
    """An error that the mixture hides for twenty rows shows in a single expert, or in a published array."""
    path = REFERENCE / "vectors.json"
    if not path.exists():
        pytest.skip(f"the test vectors are not in {path}")
    expected = json.loads(path.read_text())[name]
    model = new_model(name)
    predictions = model.learn_each(features(name), LABELS[name])
    assert predictions.ravel() == close(np.ravel(expected["scores"]))
    state: Any = model.state()["weights"]
    assert state["mixture"] == close(expected["mixture"])
    found = model.parameters()
    weights, center, limit, intercept, low, high = expected["publish"]
    assert found["weights"].ravel() == close(np.ravel(weights))
    assert found["center"] == close(center)
    assert found["limit"] == close(limit)
    assert np.ravel(found["intercept"]) == close(intercept)
    if name.startswith("regression"):
        assert (found["lowest"], found["highest"]) == close((low, high))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Import the reference learner, where it is, uncompiled: that takes less time than to compile it."""
    path = REFERENCE / "learner.py"
    if not path.exists():
        pytest.skip(f"the reference learner is not in {path}")
    source = amended(path.read_text()).replace(
        "from numba import njit", "njit = lambda **options: lambda function: function"
    )
    module = ModuleType("reference_learner")
    exec(compile(source, str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize("kind", ["binary", "softmax", "regression"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("seed", range(2))
def test_random_streams_equal_the_reference(reference: ModuleType, kind: str, form: str, seed: int) -> None:
    """The test vectors have no weights, no missing and no huge values, and only twenty rows."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(300, 6)) * 10.0 ** random.integers(-6, 7, 6) + random.integers(-3, 3, 6)
    x[random.random(x.shape) < 0.05] = np.nan
    x[random.random(x.shape) < 0.01] *= 1e6
    x[random.random(x.shape) < 0.01] = 1e101
    score = np.nan_to_num(x[:, 0] / np.nanstd(x[:200, 0]), posinf=0.0) % 3.0 + random.normal(size=len(x))
    labels = {"binary": score > 1, "softmax": np.clip(score, 0, 2) // 1, "regression": 50 * score + 1e4}[kind]
    weights = random.choice([0.5, 2.0, 100.0, 100.0], len(x))  # Above the memory of 10,000.
    kinds = {"binary": reference.BINARY, "softmax": reference.SOFTMAX, "regression": reference.REGRESSION}
    learner = reference.Learner(kinds[kind], 6, 6 if form == "dense" else 0, classes=3)
    model = new_model(kind)
    if form == "dense":
        expected = learner.dense(x, labels, weights)
        found = model.learn_each(x, labels, weights)
    else:
        is_there = random.random(x.shape) < 0.6
        rows = SparseRows.from_rows(
            [(np.flatnonzero(there), row[there]) for there, row in zip(is_there, x, strict=True)], 6
        )
        expected = learner.rows(rows.indptr, rows.indices, rows.values, labels, weights)
        found = model.learn_each(rows, labels, weights)
    assert found.ravel() == pytest.approx(expected.ravel(), rel=1e-10, abs=1e-11)


def test_a_single_rate_is_plain_adagrad_on_standardized_columns() -> None:
    """The formula of AdaGrad, applied by hand; a share of experts that are not there would make each step smaller."""
    x, labels = features("binary dense"), LABELS["binary dense"]
    model = new_model("binary dense", rates=[0.5])
    found = model.learn_each(x, labels)
    weights, squares, norms, expected = np.zeros(4), np.zeros(4), [], []
    for row in range(len(x)):
        for stop in (row, row + 1):  # The statistics before the row, and with it.
            mean, scale = x[:stop].mean(axis=0) if stop else 0.0, x[:stop].std(axis=0) if stop else np.zeros(3)
            z = np.append(np.divide(x[row] - mean, scale, out=np.zeros(3), where=scale > 1e-12), 1.0).clip(-10, 10)
            probability = 1 / (1 + np.exp(-weights @ z))
            expected += [probability] if stop == row else []
        norms.append(z @ z)
        gradient = (probability - labels[row]) * z
        squares += gradient**2
        weights -= 0.5 / np.sqrt(np.mean(norms)) * gradient / np.sqrt(squares + 1e-300)
    assert found == close(np.array(expected))
    assert LinearPredictor(model.parameters())(x) == pytest.approx(model.predict(x), rel=1e-12)
    started = new_model("binary dense", rates=[0.5])
    started.start_from(model.parameters())
    assert started.predict(x) == pytest.approx(model.predict(x), rel=1e-9)


@random_examples(extreme_rows, examples=2_000)
def test_no_finite_input_makes_a_weight_infinite(example: Any) -> None:
    """One NaN in a weight makes every later prediction NaN; the square of a small number became 0, and a divisor."""
    check_extreme_rows(example, bits=2)


def test_the_compiled_functions_have_one_signature_for_each_number_of_rates() -> None:
    """Read-only arrays, arrays of another dtype and columns of a matrix each compiled the functions again, for 10 s."""
    if not is_compiling():
        pytest.skip("Numba is not here")
    from streamiter.learn.ready_made import row_steps

    table = np.asfortranarray(DENSE.astype(np.float32))
    table.flags.writeable = False
    targets = np.array(LABELS["binary dense"])
    model = linear_learner()
    model.learn_each(table, targets, np.ones((20, 2))[:, 0])
    model.learn_each(DENSE[::2], targets[::2].astype(np.int8), np.arange(10, dtype=np.float32))
    sparse = SparseRows(*(np.array(part) for part in (SPARSE.indptr, SPARSE.indices, SPARSE.values)), 12)
    for part in (sparse.indptr, sparse.indices, sparse.values):
        part.flags.writeable = False
    linear_learner().learn_each(sparse, LABELS["binary sparse"])
    new_model("softmax").learn_each(sparse, LABELS["softmax dense"])
    steps: Any = row_steps.step_rows
    new_model("regression", rates=[0.1, 1.0]).learn_each(DENSE, LABELS["regression dense"])
    assert len(steps.signatures) == len({signature[-2:] for signature in steps.signatures})


def test_functions_are_compiled_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a read-only disk the first label ended the job: no locator available."""
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    double: Any = compiled(_double)
    assert double(4.0) == 8.0
    assert len(double.signatures) == 1


def _double(number: float) -> float:
    return 2.0 * number


def test_compiling_is_said_before_it_begins_and_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    """A first model that took ten seconds looked like a job that hangs.

    Then it was said four times: by each reader of a topic while one of them compiled, and again at row 256.
    """
    if not is_compiling():
        pytest.skip("Numba is not here")
    scope: dict[str, Any] = {}
    # The compiled code of a function without a file is not stored, so it is compiled in each run of the tests.
    exec(compile("def third(x): return x / 3\ndef ninth(x): return third(x) / 3", "<test>", "exec"), scope)
    scope["third"], alone = compiled(scope["third"]), compiled(scope["third"])
    ninth = compiled(scope["ninth"])
    caplog.set_level("INFO", "streamiter.compiled")
    with saying_that_it_compiles("what another thread compiles"), ThreadPoolExecutor(1) as other:
        assert other.submit(compiled(scope["ninth"]), 18.0).result(PATIENCE_S) == 2.0
    for function in (ninth, ninth, alone):
        with saying_that_it_compiles("the ninth"):
            function(18.0)
    assert caplog.messages == ["compiling the ninth; this takes about 6 s, once if a directory can be written"]
