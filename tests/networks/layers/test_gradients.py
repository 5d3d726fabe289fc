"""Every layer is compared with central finite differences, because accuracy does not show a wrong gradient."""

from __future__ import annotations

import numpy as np
import pytest
from networks.finite_differences import assert_gradients_agree, give_values, gradients_of
from networks.functions_by_name import LAYER_TYPES
from networks.layers.cases import CASES, FACTORS, FIELDS, Nodes, graph_around
from networks.rows_at_hand import KINDS, rows_of

from streamiter.networks.data import PlaceHolder
from streamiter.networks.network import LayerGraph


def _features(kind: str) -> int:
    return FIELDS if kind == "dense" else 9


def _fed(graph: LayerGraph, kind: str, rows: int = 6, seed: int = 3) -> None:
    generator = np.random.default_rng(seed)
    features = graph.place_holder.feature_dimension
    given = rows_of(kind, rows, features, FIELDS, generator)
    labels = generator.normal(size=rows)

    def feed() -> None:
        graph.feed_data(given, labels, training=True, number=0)

    feed()
    give_values(graph, generator)
    assert_gradients_agree(graph, feed)


def test_every_type_of_layer_has_a_case():
    """A layer was added without a test of its gradient."""
    assert set(CASES) == set(LAYER_TYPES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_name", list(CASES))
def test_gradients_agree_with_finite_differences(type_name, kind):
    """A gradient that was wrong by a factor, or wrong for dense rows only, trained to nearly the same accuracy."""
    _fed(graph_around(type_name, PlaceHolder(_features(kind), "float64")), kind)


@pytest.mark.parametrize("type_name", list(CASES))
def test_a_batch_of_one_row_has_the_right_gradients(type_name):
    """A reshape by -1, or a product that drops an axis, fails for one row first."""
    _fed(graph_around(type_name, PlaceHolder(9, "float64")), "sparse", rows=1)


@pytest.mark.parametrize("kind", ["sparse", "dense with zeros"])
def test_several_consumers_of_one_layer_have_their_gradients_summed(kind):
    """The embedding received the gradient of the last consumer only."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    vectors = nodes.vectors()
    parts = [
        nodes.add("biinnersumcross", 1, vectors),
        nodes.add("fclayer", 1, vectors, transfer="tanh"),
        nodes.add("dotpooling", 1, vectors, vectors),
        nodes.hidden(1),
    ]
    _fed(nodes.graph(nodes.add("sumpooling", 1, *parts)), kind)


def test_a_layer_may_be_an_input_of_another_one_twice():
    """The gradient of the first input was counted twice, or the second input had none."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    hidden = nodes.hidden(3)
    joined = nodes.add("mulpooling", 3, hidden, hidden, hidden)
    _fed(nodes.graph(nodes.add("concatlayer", 6, joined, hidden)), "sparse")


def test_a_diamond_of_layers_has_the_right_gradients():
    """Gradients of two paths of different length were added before the longer path had finished."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    top = nodes.hidden(4)
    longer = top
    for _ in range(3):
        longer = nodes.add("fclayer", 4, longer, transfer="tanh")
    _fed(nodes.graph(nodes.add("sumpooling", 4, top, longer)), "sparse")


def test_a_chain_of_50_layers_has_the_right_gradients():
    """Only a deep chain shows a recursion for each layer, or a scale that shrinks with the depth."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    last = nodes.hidden(2)
    for _ in range(50):
        last = nodes.add("fclayer", 2, last, transfer="tanh")
    graph = nodes.graph(last)
    generator = np.random.default_rng(5)
    rows, labels = rows_of("sparse", 4, 9, FIELDS, generator), generator.normal(size=4)

    def feed() -> None:
        graph.feed_data(rows, labels, training=True)

    feed()
    # The weights rotate the plane, so that 50 layers do not shrink the input to 0.
    give_values(graph, generator, scale=0.1)
    for parameter in graph.parameters:
        if parameter.shape == (2, 2):
            angle = generator.uniform(0, 6)
            turn = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
            parameter.values = 1.1 * np.array(turn)
    assert_gradients_agree(graph, feed)
    assert np.abs(gradients_of_first(graph)).max() > 1e-6


def gradients_of_first(graph: LayerGraph) -> np.ndarray:
    gradient = graph.parameters[0].gradient
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("type_name", list(CASES))
def test_a_last_short_batch_has_its_own_gradients(type_name):
    """A layer kept an array with the size and the sums of the previous mini-batch."""
    place_holder = PlaceHolder(9, "float64")
    graph, other = graph_around(type_name, place_holder), graph_around(type_name, PlaceHolder(9, "float64"))
    generator = np.random.default_rng(7)
    rows, labels = rows_of("sparse", 8, 9, FIELDS, generator), generator.normal(size=8)
    graph.feed_data(rows[:6], labels[:6], training=True)
    give_values(graph, generator)
    gradients_of(graph)
    for one in (graph, other):
        one.feed_data(rows[6:], labels[6:], training=True)
        give_values(one, np.random.default_rng(8))
    short, alone = gradients_of(graph), gradients_of(other)
    for name, gradient in alone.items():
        np.testing.assert_array_equal(short[name], gradient, err_msg=name)


@pytest.mark.parametrize("type_name", list(CASES))
def test_sparse_and_dense_rows_give_the_same(type_name):
    """A dense row with a 0 had one vector more than the same row in sparse form."""
    graph = graph_around(type_name, PlaceHolder(9, "float64"))
    generator = np.random.default_rng(11)
    sparse, labels = rows_of("sparse", 12, 9, FIELDS, generator), generator.normal(size=12)
    found = []
    for rows in (sparse, sparse.to_dense()):
        graph.feed_data(rows, labels, training=True)
        assert len(graph.place_holder.indices) == 9, "all features must be there, or the parameters differ"
        give_values(graph, np.random.default_rng(12))
        found.append(gradients_of(graph))
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_name", list(CASES))
def test_float32_is_close_to_float64_and_stays_float32(type_name, kind):
    """One float64 array made all later arrays float64, at half the speed."""
    found = []
    for dtype in ("float64", "float32"):
        graph = graph_around(type_name, PlaceHolder(_features(kind), dtype))
        generator = np.random.default_rng(13)
        rows = rows_of(kind, 6, graph.place_holder.feature_dimension, FIELDS, generator)
        graph.feed_data(rows, generator.normal(size=6), training=True)
        give_values(graph, generator)
        scores = np.array(graph.forward())
        gradients = gradients_of(graph)
        for layer in graph.layers:
            assert layer.output.dtype == dtype, layer.name
        assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(dtype)}
        found.append({"scores": scores, **gradients})
    scale = max(np.abs(array).max() for array in found[0].values())
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol=1e-3, atol=1e-5 * scale, err_msg=name)


def test_no_layer_changes_its_inputs():
    """Two layers read one output, and the relu of the first changed the output in place."""
    generator = np.random.default_rng(17)
    for type_name in CASES:
        graph = graph_around(type_name, PlaceHolder(9, "float64"))
        graph.feed_data(rows_of("sparse", 5, 9, FIELDS, generator), generator.normal(size=5), training=True)
        give_values(graph, generator)
        values = {parameter.name: np.array(parameter.values) for parameter in graph.parameters}
        graph.forward()
        outputs = [layer.output.copy() for layer in graph.layers]
        gradients_of(graph)
        for layer, output in zip(graph.layers, outputs, strict=True):
            np.testing.assert_array_equal(layer.output, output, err_msg=layer.name)
        for parameter in graph.parameters:
            np.testing.assert_array_equal(parameter.values, values[parameter.name], err_msg=parameter.name)


def test_an_embedding_has_as_many_vectors_as_there_are_fields():
    """The cases of the tests need one vector for each field."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    assert nodes.vectors().output_dim == FIELDS * FACTORS
