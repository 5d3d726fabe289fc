"""The graph of a network, and the place holder with the features of the current mini-batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks.finite_differences import assert_gradients_agree, give_values, gradients_of
from networks.functions_by_name import LOSSES
from networks.layers.cases import FIELDS, Nodes
from networks.rows_at_hand import rows_of

from streamiter.errors import ModelError
from streamiter.learn.rows import BadRows
from streamiter.networks.data import PlaceHolder
from streamiter.networks.network import LayerGraph
from streamiter.networks.serving import Diverged, finite_loss
from streamiter.values.sparse_rows import SparseRows

FEATURES = 9


def _deep_fm(dtype: str = "float64", loss: str = "logloss", transfer: str = "relu") -> LayerGraph:
    nodes = Nodes(PlaceHolder(FEATURES, dtype))
    wide, vectors = nodes.add("simpleinputlayer", 1), nodes.vectors()
    second = nodes.add("biinnersumcross", 1, vectors)
    hidden = nodes.add("fclayer", 6, vectors, transfer=transfer)
    deep = nodes.add("fclayer", 1, hidden)
    return nodes.graph(nodes.add("sumpooling", 1, wide, second, deep), LOSSES[loss]())


def _rows(count: int = 12, seed: int = 0):
    generator = np.random.default_rng(seed)
    return rows_of("sparse", count, FEATURES, FIELDS, generator), generator.choice([-1.0, 1.0], count)


@pytest.mark.parametrize("loss", ["l2loss", "logloss", "hingeloss", "huberloss"])
def test_a_whole_network_agrees_with_finite_differences_for_every_loss(loss):
    """All layers and losses were correct, but a factor between them was missing."""
    graph = _deep_fm(loss=loss, transfer="tanh")
    rows, labels = _rows()

    def feed() -> None:
        graph.feed_data(rows, labels, training=True)

    feed()
    give_values(graph, np.random.default_rng(1))
    assert_gradients_agree(graph, feed)


@pytest.mark.parametrize(
    ("loss", "outputs", "transfer"),
    [("softmaxloss", 3, "identity"), ("crossentropyloss", 1, "sigmoid"), ("kmeansloss", 3, "identity")],
)
def test_losses_of_other_outputs_agree_with_finite_differences(loss, outputs, transfer):
    """The backward pass must be right for several outputs, for probabilities, and for the nearest centre."""
    nodes = Nodes(PlaceHolder(FEATURES, "float64"))
    if loss == "kmeansloss":
        last = nodes.add("kmeansinputlayer", outputs)
    else:
        last = nodes.add("fclayer", outputs, nodes.hidden(4), transfer=transfer)
    graph = nodes.graph(last, LOSSES[loss]())
    rows, _ = _rows()
    labels = np.arange(12) % 3 if loss == "softmaxloss" else np.arange(12) % 2

    def feed() -> None:
        graph.feed_data(rows, labels, training=True)

    feed()
    give_values(graph, np.random.default_rng(1))
    assert_gradients_agree(graph, feed)


def test_k_means_needs_no_labels_and_moves_the_nearest_centre():
    """A step with a rate of ½·rows/(rows of the cluster) moves a centre to the mean of its rows."""
    nodes = Nodes(PlaceHolder(2, "float64"))
    graph = nodes.graph(nodes.add("kmeansinputlayer", 2), LOSSES["kmeansloss"]())
    graph.feed_data([[1.0, 0.0], [3.0, 0.0], [0.0, 8.0], [0.0, 9.0]], training=True)
    centres = np.array([[1.0, 0.0], [1.0, 5.0]])
    graph.parameters[0].values = centres
    gradients = gradients_of(graph)
    stepped = centres - gradients["kmeansinputlayer0.centres"] * 0.5 * 4 / 2
    np.testing.assert_allclose(stepped.T, [[2.0, 0.0], [0.0, 8.5]])
    assert graph.predictions().label.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_only_the_features_of_the_mini_batch_have_values_and_gradients():
    """A million weights were pulled for ten rows."""
    nodes = Nodes(PlaceHolder(1_000_000, "float32"))
    graph = nodes.graph(nodes.add("sumpooling", 12, nodes.vectors(), nodes.hidden(12)))
    graph.feed_data(rows_of("one-hot", 3, 1_000_000, FIELDS, np.random.default_rng(0)), [1, 2, 3], training=True)
    give_values(graph, np.random.default_rng(1))
    gradients = gradients_of(graph)
    present = len(graph.place_holder.indices)
    assert present <= 12
    assert gradients["embedding0.weight"].shape == (present, 3)
    assert gradients["simpleinputlayer1.weight"].shape == (present, 12)


def test_loss_and_predictions_are_available_after_every_step():
    """The scores are read again for the report, after the gradients have been pushed."""
    graph = _deep_fm()
    rows, labels = _rows()
    graph.feed_data(rows, labels, training=True)
    give_values(graph, np.random.default_rng(1))
    loss, predictions = graph.loss(), graph.predictions().value
    for step in (graph.backward, graph.gradients, graph.update):
        step()
        assert graph.loss() == loss
        np.testing.assert_array_equal(graph.predictions().value, predictions)


def test_dropout_leaves_predictions_as_they_are():
    """A validation during the training applied dropout, and evaluated half of the network."""
    graph, without = _deep_fm(transfer="dropout"), _deep_fm(transfer="identity")
    rows, labels = _rows()
    scores = []
    for one, training in ((graph, False), (without, False), (graph, True)):
        one.feed_data(rows, labels, training=training)
        give_values(one, np.random.default_rng(1))
        scores.append(one.forward().copy())
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[2] != scores[0]).any()


def test_dropout_depends_only_on_the_seed_and_the_mini_batch():
    """After a restore, dropout omitted other numbers than in the run without an interruption."""
    rows, labels = _rows()

    def scores(graph: LayerGraph, number: int | None) -> np.ndarray:
        graph.feed_data(rows, labels, training=True, number=number)
        give_values(graph, np.random.default_rng(1))
        return graph.forward().copy()

    def another(seed: int) -> LayerGraph:
        graph = _deep_fm(transfer="dropout")
        return LayerGraph(graph.layers, graph.place_holder, graph.loss_layer, seed=seed)

    counted = another(5)
    first, second = scores(counted, None), scores(counted, None)
    np.testing.assert_array_equal(scores(another(5), 0), first)
    np.testing.assert_array_equal(scores(another(5), 1), second)
    assert (first != second).any()
    assert (scores(another(6), 0) != first).any()


def test_a_mini_batch_for_prediction_is_not_learned_from():
    """The network learned from a validation with labels, without dropout."""
    graph = _deep_fm()
    graph.feed_data(*_rows())
    give_values(graph, np.random.default_rng(1))
    graph.forward()
    with pytest.raises(ModelError, match=r"expected a mini-batch to learn from, .* training=True"):
        graph.backward()


def test_a_loss_needs_labels_and_predictions_do_not():
    """The loss used the labels of the previous mini-batch."""
    graph = _deep_fm()
    rows, labels = _rows()
    graph.feed_data(rows, labels, training=True)
    graph.feed_data(rows, training=True)
    give_values(graph, np.random.default_rng(1))
    assert graph.predictions().value.shape == (12,)
    with pytest.raises(ModelError, match="'losslayer6': expected labels for the loss, given none"):
        graph.loss()


def test_labels_that_the_loss_does_not_know_are_refused_as_they_are_fed():
    """A log loss received the labels 0 and 1."""
    with pytest.raises(BadRows, match=r"'losslayer6': expected labels −1 or 1 for logloss, given 0\.0"):
        _deep_fm().feed_data(_rows(2)[0], [1, 0], training=True)


def test_a_mini_batch_with_labels_that_are_refused_is_not_learned_from_either():
    """The layers still had the outputs of the previous mini-batch, and the labels of the refused one."""
    graph = _deep_fm()
    graph.feed_data(*_rows(), training=True)
    give_values(graph, np.random.default_rng(1))
    graph.loss()
    with pytest.raises(BadRows):
        graph.feed_data(_rows(2)[0], [1, 0], training=True)
    with pytest.raises(ModelError, match="expected status Forward for cal_backward, given Null"):
        graph.backward()
    give_values(graph, np.random.default_rng(1))
    with pytest.raises(ModelError, match="expected labels for the loss, given none"):
        graph.loss()


def test_a_chain_of_2000_layers_needs_no_deep_recursion():
    """Each layer called its input, so a deep network exceeded Python's stack."""
    nodes = Nodes(PlaceHolder(FEATURES, "float64"))
    last = nodes.hidden(1)
    for _ in range(2000):
        last = nodes.add("fclayer", 1, last)
    graph = nodes.graph(last)
    rows, labels = _rows(2)
    graph.feed_data(rows, labels, training=True)
    for parameter in graph.parameters:
        parameter.values = np.full(graph.shape_of(parameter), float(parameter.initial == "weight"))
    gradients = gradients_of(graph)
    # Each layer returns its input, except the first layer, which applies tanh.
    np.testing.assert_allclose(gradients["fclayer1.bias"], gradients["fclayer2000.bias"], rtol=1e-12)
    assert np.abs(gradients["simpleinputlayer0.weight"]).max() > 0


@pytest.mark.parametrize("type_name", ["simpleinputlayer", "kmeansinputlayer"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_rows_of_any_number_of_features_have_the_right_gradients(type_name, outputs):
    """Rows of equal length have a faster path; on the other path, a row without features got the next row's values."""
    nodes = Nodes(PlaceHolder(FEATURES, "float64"))
    graph = nodes.graph(nodes.add(type_name, outputs))
    rows = SparseRows.from_rows([([], []), ([0, 4], [1.0, 2.0]), ([], []), ([1, 4, 8], [3.0, -1.0, 0.5])], FEATURES)
    for some in (rows, rows[:1]):

        def feed(some=some) -> None:
            graph.feed_data(some, np.arange(len(some)) + 0.5, training=True)

        feed()
        give_values(graph, np.random.default_rng(3))
        assert_gradients_agree(graph, feed)


@pytest.mark.parametrize("given", ["none", "shape", "dtype"])
def test_values_that_do_not_fit_the_mini_batch_are_named(given):
    """The values had the shape of the previous mini-batch, and numpy's error named no parameter."""
    graph = _deep_fm("float32")
    graph.feed_data(_rows()[0])
    give_values(graph, np.random.default_rng(1))
    weight = graph.parameters[0]
    weight.values = {"none": None, "shape": np.ones((2, 1), dtype="float32"), "dtype": np.ones((9, 1))}[given]
    expected = r"parameter 'simpleinputlayer0.weight': expected values of shape \(9, 1\) in float32, given "
    said = {"none": "none", "shape": r"float32 of shape \(2, 1\)", "dtype": r"float64 of shape \(9, 1\)"}[given]
    with pytest.raises(ModelError, match=expected + said):
        graph.forward()


def test_a_loss_that_is_not_finite_is_an_error_and_no_warning():
    """A learning rate that was too large gave NaN, and the model was saved."""
    graph = _deep_fm("float32")
    graph.feed_data(*_rows(), training=True)
    give_values(graph, np.random.default_rng(1))
    for parameter in graph.parameters:
        parameter.values *= 1e30
    with pytest.raises(
        Diverged, match=r"^layer 'losslayer6': expected a finite loss, given (inf|nan); lower lr, scale the features"
    ):
        finite_loss(graph)


ROWS = st.lists(
    st.dictionaries(st.integers(0, 19), st.floats(-5, 5, allow_subnormal=False), max_size=6), min_size=1, max_size=6
)


def _sparse(rows: list[dict[int, float]], width: int) -> SparseRows:
    return SparseRows.from_rows([(sorted(row), [row[at] for at in sorted(row)]) for row in rows], width)


@given(ROWS, st.sampled_from([20, 1_000_000]))
def test_rows_count_the_features_that_are_there(rows, width):
    """Positions are found by sorting if the features are many, and by a table if they are few; both must agree."""
    place_holder = PlaceHolder(width, "float64")
    sparse = _sparse(rows, width)
    place_holder.feed_data(sparse)
    assert place_holder.indices.tolist() == sorted({at for row in rows for at in row})
    assert place_holder.indices.dtype == np.int64
    held = place_holder.rows
    assert place_holder.indices[held.indices].tolist() == sparse.indices.tolist()
    assert held.values.tolist() == sparse.values.tolist()
    assert held.indptr.tolist() == sparse.indptr.tolist()
    assert place_holder.batch_size == len(rows)


@given(ROWS)
def test_sparse_rows_have_the_values_of_the_current_mini_batch(rows):
    """The place holder returned the values and the features per row of the previous mini-batch."""
    place_holder = PlaceHolder(20, "float32")
    place_holder.feed_data(_sparse([{1: 1.0, 2: 1.0}], 20))
    assert place_holder.values is None
    assert place_holder.features_per_row == 2
    place_holder.feed_data(_sparse(rows, 20))
    numbers = [row[at] for row in rows for at in sorted(row)]
    assert (place_holder.values is None) == all(number == 1.0 for number in numbers)
    if place_holder.values is not None:
        assert place_holder.values.dtype == "float32"
        np.testing.assert_array_equal(place_holder.values, np.array(numbers, dtype="float32"))
    lengths = {len(row) for row in rows}
    assert place_holder.features_per_row == (lengths.pop() if len(lengths) == 1 else None)


def test_prepared_rows_are_taken_as_they_are():
    """A mini-batch that returns in every epoch was searched for its features in every epoch."""
    first, again = PlaceHolder(100, "float32"), PlaceHolder(100, "float32")
    first.feed_data(_sparse([{3: 1.0, 50: 2.0}, {50: 1.0}], 100))
    again.feed_data(first.rows, indices=first.indices)
    assert again.rows is first.rows
    assert again.indices is first.indices


def test_dense_rows_have_all_features():
    """Dense rows pull all parameters."""
    place_holder = PlaceHolder(3, "float32")
    place_holder.feed_data([[1, 0, 2]], [1])
    assert place_holder.indices.tolist() == [0, 1, 2]
    assert place_holder.rows.dtype == place_holder.labels.dtype == "float32"
    assert (place_holder.is_sparse, place_holder.feature_dimension, place_holder.training) == (False, 3, False)


def test_without_a_mini_batch_there_are_no_rows():
    """A layer read the rows before any data had arrived."""
    with pytest.raises(ModelError, match="expected a mini-batch, given none yet; call feed_data first"):
        _ = PlaceHolder(4, "float64").rows
