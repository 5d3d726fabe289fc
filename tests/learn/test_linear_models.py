"""Online linear models are compared with the same steps in plain Python."""

import copy
import math

import numpy as np
import pytest
from learn.linear_cases import LABELS, ROWS, START, bits

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn import (
    FTRL,
    SGD,
    Adam,
    BadRows,
    Gradient,
    InverseSquareRoot,
    LogisticRegression,
    Momentum,
    SparseRows,
)
from streamiter.values.plain_data import PlainData

OPTIMIZERS = [
    SGD(0.1),
    SGD(InverseSquareRoot(0.3), l1=0.01, l2=0.1),
    FTRL(),
    FTRL(0.3, 0.1, l1=0.05, l2=0.2),
    Momentum(0.05, l1=0.01, l2=0.1),
    Adam(0.1),
]


def sigmoid(margin):
    return 1.0 / (1.0 + math.exp(-margin))


def batches(seed, count, *, rows=20, width=6):
    random = np.random.default_rng(seed)
    truth = random.normal(size=width)
    for _ in range(count):
        features = random.normal(size=(rows, width))
        targets = (features @ truth > 0).astype(float)
        yield features, targets, random.integers(0, 4, rows).astype(float)


def test_the_first_version_of_the_known_case():
    """The numbers are the reference's: z and n start at 0, and the initial weights count in the gradient and in δ·w."""
    model = LogisticRegression(2, optimizer=FTRL(0.1, 0.1, l1=0.1, l2=0.1), intercept=False, initial_weights=START)
    model.learn(ROWS, LABELS)
    assert model.version == 1
    assert model.weights == pytest.approx((0.2994527071464283, -0.1412541067743284), rel=1e-14)


@pytest.mark.parametrize("weighted", [False, True])
def test_ftrl_steps_equal_steps_in_plain_python(weighted):
    """The gradient is a weighted mean, the slots cover many steps, and the intercept is not regularized."""
    model = LogisticRegression(6, optimizer=FTRL(0.2, 0.5, l1=0.05, l2=0.3))
    weights, z, n = [0.0] * 7, [0.0] * 7, [0.0] * 7
    for features, targets, row_weights in batches(1, 10):
        if not weighted:
            row_weights = np.ones(len(targets))
        model.learn(features, targets, row_weights if weighted else None)
        gradient = [0.0] * 7
        for row, target, row_weight in zip(features.tolist(), targets, row_weights, strict=True):
            row = [*row, 1.0]
            error = sigmoid(sum(w * x for w, x in zip(weights, row, strict=True))) - target
            gradient = [g + row_weight * error * x for g, x in zip(gradient, row, strict=True)]
        for i, g in enumerate(gradient):
            g /= row_weights.sum()
            l1, l2 = (0.0, 0.0) if i == 6 else (0.05, 0.3)
            delta = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / 0.2
            n[i] += g * g
            z[i] += g - delta * weights[i]
            shrunk = z[i] - math.copysign(l1, z[i]) if abs(z[i]) > l1 else 0.0
            weights[i] = -shrunk / (l2 + (0.5 + math.sqrt(n[i])) / 0.2)
    assert model.weights == pytest.approx(weights[:6], rel=1e-10)
    assert model.intercept_weight == pytest.approx(weights[6], rel=1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_of_weight_2_counts_as_two_rows_and_weight_0_as_no_row(optimizer, sparse):
    """Sample weights were accepted and then ignored on one of the paths."""
    as_features = SparseRows.from_dense if sparse else np.asarray
    weighted, repeated = (LogisticRegression(6, optimizer=optimizer) for _ in range(2))
    for features, targets, weights in batches(3, 10):
        times = weights.astype(int)
        weighted.learn(as_features(features), targets, weights)
        repeated.learn(as_features(features.repeat(times, axis=0)), targets.repeat(times))
    assert weighted.weights == pytest.approx(repeated.weights, rel=1e-11, abs=1e-14)
    assert weighted.version == repeated.version == 10


def test_rows_without_weight_make_no_step():
    """A mean over nothing is NaN, and a version without learning misleads its readers."""
    model = LogisticRegression(2)
    model.learn(ROWS, LABELS, np.zeros(10))
    model.learn(np.zeros((0, 2)), [])
    model.learn([ROWS[0]], [1], [0.0])
    model.learn_each(np.zeros((0, 2)), [])
    assert model.learn_each(ROWS[:2], [1, 1], [0.0, 0.0]).tolist() == [0.5, 0.5]
    assert (model.version, model.records, model.weights.tolist()) == (0, 0, [0.0, 0.0])
    model.learn(ROWS, LABELS, [1, 0, 0, 2, 0, 0, 0, 0, 0, 0.5])
    assert (model.version, model.records) == (1, 3)


def test_state_and_parameters_are_plain_data_of_their_own():
    """Parameters and state are encoded, sent and stored while the model changes."""
    model = LogisticRegression(2, optimizer=FTRL())
    model.learn(ROWS, LABELS)
    parameters, state = model.parameters(), model.state()
    assert set(parameters) == {"weights", "intercept", "link", "state"}
    assert set(model.parameters(state=False)) == {"weights", "intercept", "link"}
    assert parameters["link"] == "logit"
    assert type(parameters["intercept"]) is float
    kept = parameters["weights"].copy(), state["slots"]["z"].copy()
    model.learn(ROWS, LABELS)
    assert np.array_equal(parameters["weights"], kept[0])
    assert np.array_equal(state["slots"]["z"], kept[1])
    predicted = 1.0 / (1.0 + np.exp(-(np.array(ROWS) @ kept[0] + parameters["intercept"])))
    restored = LogisticRegression(2, optimizer=FTRL())
    restored.restore(state)
    assert restored.predict(ROWS) == pytest.approx(predicted, rel=1e-14)


@pytest.mark.parametrize("optimizer", [FTRL(), FTRL(0.3, 0.1, l1=0.01, l2=0.2), SGD(0.1)], ids=str)
def test_dense_and_sparse_learn_the_same(optimizer):
    """A row may lack features; in these optimizers a gradient of 0 changes nothing."""
    random = np.random.default_rng(6)
    start = random.normal(size=40)
    dense, sparse = (LogisticRegression(40, optimizer=optimizer, initial_weights=start) for _ in range(2))
    for size in (1, 5, 50, 1, 200):
        features = random.normal(size=(size, 40)) * (random.random((size, 40)) < 0.2)
        targets = random.integers(0, 2, size)
        weights = random.random(size) + 0.1
        dense.learn(features, targets, weights)
        sparse.learn(SparseRows.from_dense(features), targets, weights)
    assert sparse.weights == pytest.approx(dense.weights, rel=1e-12, abs=1e-14)
    assert sparse.intercept_weight == pytest.approx(dense.intercept_weight, rel=1e-12)
    features = random.normal(size=(9, 40))
    assert sparse.predict(SparseRows.from_dense(features)) == pytest.approx(dense.predict(features), rel=1e-12)


def test_sparse_sgd_shrinks_only_weights_of_the_mini_batch():
    """The documentation states the difference: sparse SGD does not regularize features that a mini-batch lacks."""
    optimizer = SGD(0.1, l2=1.0)
    models = [LogisticRegression(3, optimizer=optimizer, initial_weights=[1.0, 1.0, 1.0]) for _ in range(3)]
    features = np.array([[0.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
    for model, keep_zeros in zip(models[1:], (False, True), strict=True):
        model.learn(SparseRows.from_dense(features, keep_zeros=keep_zeros), [0, 1])
    models[0].learn(features, [0, 1])
    dense, active, all_named = (model.weights.tolist() for model in models)
    assert all_named == pytest.approx(dense, rel=1e-14)
    assert active == pytest.approx([1.0, dense[1], 1.0], rel=1e-14)
    assert dense[0] == 0.9


def test_a_sparse_step_touches_only_active_features():
    """A step over all 2**18 weights is a hundred times too slow; here NaN in any other place would spread."""
    model = LogisticRegression(2**18, optimizer=FTRL())
    state = model.state()
    for array in (state["weights"], *state["slots"].values()):
        array[:] = np.nan
        array[[3, 70_000, 200_000]] = 0.0
    model.restore(state)
    rows = SparseRows.from_rows([([3, 70_000], [1.0, 2.0]), ([200_000, 3], [1.0, 1.0])] * 20, 2**18)
    model.learn(rows, [0, 1] * 20)
    model.learn_each(rows, [0, 1] * 20)
    assert np.isfinite(model.weights[[3, 70_000, 200_000]]).all()
    assert np.isnan(model.weights).sum() == 2**18 - 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("features_in_a_row", [5, 45], ids=["few", "many"])
@pytest.mark.parametrize("sparse", [False, True])
def test_learning_each_row_is_predicting_and_learning_row_by_row(optimizer, features_in_a_row, sparse):
    """The fast path of per-row training must handle rows that are long, short, empty, and of weight 0, 1 and 2."""
    random = np.random.default_rng(7)
    features = random.normal(size=(30, features_in_a_row)) * (random.random((30, features_in_a_row)) < 0.8)
    features[4] = 0.0
    features[9, 3:] = 0.0
    targets = random.integers(0, 2, 30)
    weights = random.integers(0, 3, 30).astype(float)
    rows = SparseRows.from_dense(features) if sparse else features
    each, one_by_one = (LogisticRegression(features_in_a_row, optimizer=optimizer) for _ in range(2))
    together = each.learn_each(rows, targets, weights)
    alone = []
    for row in range(30):
        alone.append(one_by_one.predict(rows[row : row + 1])[0])
        for _ in range(int(weights[row])):
            one_by_one.learn(rows[row : row + 1], targets[row : row + 1])
    # The counts of records differ: a row of weight 2 is one record.
    assert bits(each)[:3] == bits(one_by_one)[:3]
    assert together == pytest.approx(alone, rel=1e-12)
    assert not sparse or together.tobytes() == np.array(alone).tobytes()
    assert each.version == weights.sum()
    assert each.records == np.count_nonzero(weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("features_in_a_row", [5, 45], ids=["few", "many"])
def test_a_fraction_of_a_row_is_a_step_with_that_fraction_of_its_gradient(optimizer, features_in_a_row):
    """Weights that decay with age counted as 1 if each row was a step."""
    random = np.random.default_rng(7)
    features = random.normal(size=(6, features_in_a_row))
    targets, weights = random.integers(0, 2, 6), [0.25, 1.5, 0.0, 1.0, 2.75, 1e-9]
    each, written_out = (LogisticRegression(features_in_a_row, optimizer=optimizer) for _ in range(2))
    each.learn_each(features, targets, weights)
    for row, shares in enumerate([[0.25], [1, 0.5], [], [1], [1, 1, 0.75], [1e-9]]):
        for share in shares:
            whole = written_out.gradient(features[row : row + 1], targets[row : row + 1])
            written_out.apply(
                Gradient(whole.total * share, whole.intercept * share, 1.0, 1, whole.width, whole.indices)
            )
    assert each.weights == pytest.approx(written_out.weights, rel=1e-11, abs=1e-14)
    assert each.intercept_weight == pytest.approx(written_out.intercept_weight, rel=1e-11)


def test_learning_each_row_does_not_depend_on_the_cut():
    """The cut of a transport batch has no meaning, even if rows have very different lengths."""
    random = np.random.default_rng(8)
    lengths = random.integers(0, 60, 40)
    rows = SparseRows.from_rows(
        [(random.choice(80, n, replace=False).tolist(), random.normal(size=n).tolist()) for n in lengths], 80
    )
    targets = random.integers(0, 2, 40)
    whole, cut = (LogisticRegression(80) for _ in range(2))
    predictions = whole.learn_each(rows, targets)
    parts = [cut.learn_each(rows[start : start + 7], targets[start : start + 7]) for start in range(0, 40, 7)]
    assert bits(whole) == bits(cut)
    assert predictions.tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("width", [3, 10, 33])
def test_a_prediction_does_not_depend_on_the_rows_next_to_it(width):
    """A matrix product gives another last bit for another cut of the batch, so a restarted run would differ."""
    features = np.random.default_rng(9).normal(size=(100, width))
    model = LogisticRegression(width, initial_weights=np.linspace(-1, 1, width))
    whole = model.predict(features)
    for size in (1, 2, 3, 7, 99):
        parts = [model.predict(features[start : start + size]) for start in range(0, 100, size)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()
    columns_first = np.asfortranarray(features)
    assert model.predict(columns_first).tobytes() == whole.tobytes()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_workers_add_up_to_one_step(sparse):
    """Synchronous training on two workers must equal training on all their rows."""
    as_features = SparseRows.from_dense if sparse else np.asarray
    together, apart = (LogisticRegression(6, optimizer=FTRL()) for _ in range(2))
    for features, targets, weights in batches(10, 8):
        features = features * (np.abs(features) > 0.8)
        together.learn(as_features(features), targets, weights)
        gradients = [
            apart.gradient(as_features(features[part]), targets[part], weights[part])
            for part in (slice(0, 3), slice(3, 20))
        ]
        sent = [Gradient.from_record(gradient.to_record()) for gradient in gradients]
        apart.apply(sent[0] + sent[1])
    assert apart.weights == pytest.approx(together.weights, rel=1e-11)
    assert (apart.version, apart.records) == (together.version, together.records)


def test_dense_and_sparse_gradients_add():
    """The rows of one worker may be dense, and those of another sparse."""
    features, targets, _ = next(batches(11, 1))
    features = features * (np.abs(features) > 1.0)
    model = LogisticRegression(6)
    dense = model.gradient(features[:8], targets[:8])
    sparse = model.gradient(SparseRows.from_dense(features[8:]), targets[8:])
    whole = model.gradient(features, targets)
    for both in (dense + sparse, sparse + dense):
        assert both.to_dense() == pytest.approx(whole.total, rel=1e-12)
        assert both.intercept == pytest.approx(whole.intercept, rel=1e-12)
        assert (both.weight, both.records) == (20.0, 20)
    with pytest.raises(ModelError, match="expected a gradient of 6 features to add, given one of 5"):
        dense + LogisticRegression(5).gradient(np.zeros((1, 5)), [1])


@pytest.mark.parametrize("sparse", [False, True])
def test_learning_does_not_change_its_inputs(sparse):
    """The consumers of a stream share its batches."""
    features, targets, weights = next(batches(12, 1))
    rows = SparseRows.from_dense(features) if sparse else features
    copies = copy.deepcopy((features, targets, weights))
    start = np.ones(6)
    model = LogisticRegression(6, optimizer=SGD(0.1, l1=0.1, l2=0.1), initial_weights=start)
    for array in (features, targets, weights, start):
        array.flags.writeable = False
    model.learn(rows, targets, weights)
    model.learn_each(rows, targets, weights)
    assert np.array_equal(features, copies[0])
    assert start.tolist() == [1.0] * 6
    assert not sparse or rows == SparseRows.from_dense(copies[0])


def test_labels_of_minus_1_and_1_are_the_same_labels():
    """Half of the public data sets have these labels."""
    zero_one, signed = LogisticRegression(2), LogisticRegression(2, labels="-1/1")
    zero_one.learn(ROWS, LABELS)
    signed.learn(ROWS, [2 * label - 1 for label in LABELS])
    assert bits(zero_one) == bits(signed)
    with pytest.raises(BadRows, match=r"expected targets −1 or 1, given 0.0; .* \(row 1 of the batch\)"):
        signed.learn(ROWS[:3], [1, 0, -1])
    with pytest.raises(BadRows, match=r'given -1.0; .* LogisticRegression\(…, labels="-1/1"\), or give y > 0'):
        zero_one.learn(ROWS[:3], [1, -1, -1])
    with pytest.raises(ConfigurationError, match=r'labels=\): expected "0/1" or "-1/1", given \'yes/no\''):
        LogisticRegression(2, labels="yes/no")


def test_extreme_margins_give_plain_probabilities():
    """The exponential overflows at 710; the model must not warn, raise or return NaN."""
    model = LogisticRegression(1, optimizer=SGD(0.1), initial_weights=[1.0])
    features = [[5000.0], [-5000.0], [0.0]]
    assert model.predict(features).tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-300)
    assert model.learn_each(features, [1, 0, 1]).tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-300)


@pytest.mark.parametrize("optimizer", [SGD(0.1), FTRL(), FTRL(0.3, 0.1, l1=0.05, l2=0.2)], ids=str)
def test_learning_resumes_from_another_model_s_parameters(optimizer):
    """With FTRL the first gradients discarded the published weights, and every restart made the model worse."""
    random = np.random.default_rng(3)
    features = random.normal(size=(2_000, 3))
    targets = (features @ [2.0, -1.0, 0.5] > 0).astype(float)
    first = LogisticRegression(3, optimizer=optimizer)
    for start in range(0, 1_500, 50):
        first.learn(features[start : start + 50], targets[start : start + 50])
    second = LogisticRegression(3, optimizer=optimizer)
    second.start_from(first.parameters())
    assert second.weights.tolist() == first.weights.tolist()
    rest, known = features[1_500:], targets[1_500:]

    def loss(model):
        return float(model.loss.values(model.predict(rest), known).mean())

    before = loss(second)
    second.learn(features[:10], targets[:10])
    assert second.weights == pytest.approx(first.weights, abs=0.25)
    for start in range(0, 1_500, 50):
        second.learn(features[start : start + 50], targets[start : start + 50])
    assert loss(second) <= before


def test_gradients_travel_as_records():
    """Workers and the owner of the parameters may be in different processes."""
    model, plain = LogisticRegression(12), PlainData()
    random = np.random.default_rng(4)
    features = SparseRows.from_dense(random.normal(size=(40, 12)) * (random.random((40, 12)) < 0.4))
    targets, weights = random.integers(0, 2, 40), random.random(40) + 0.5
    for gradient in (model.gradient(features, targets, weights), model.gradient(features.to_dense(), targets, weights)):
        arrived = Gradient.from_record(plain.decode(plain.encode(gradient.to_record())))
        assert arrived.to_dense().tobytes() == gradient.to_dense().tobytes()
        assert (arrived.intercept, arrived.weight) == (gradient.intercept, gradient.weight)
        assert (arrived.records, arrived.width) == (40, 12)
