"""The result of each layer is compared with its formula in plain loops, number by number."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from networks.finite_differences import give_values
from networks.layers.cases import FACTORS, FIELDS, PAIRS, Nodes
from networks.rows_at_hand import KINDS, rows_of

from streamiter.networks.data import PlaceHolder
from streamiter.networks.layers import Layer
from streamiter.values.sparse_rows import SparseRows

FEATURES = 9
Lists = list[list[float]]


def _computed(build: Callable[[Nodes], Layer], kind: str = "sparse", rows: int = 5) -> tuple[Nodes, Lists]:
    """Return the nodes with values, and the output of the last node."""
    features = FIELDS if kind == "dense" else FEATURES
    nodes = Nodes(PlaceHolder(features, "float64"))
    last = build(nodes)
    graph = nodes.graph(last)
    generator = np.random.default_rng(23)
    graph.feed_data(rows_of(kind, rows, features, FIELDS, generator))
    give_values(graph, generator)
    graph.forward()
    return nodes, last.output.tolist()


def _output(nodes: Nodes, position: int) -> Lists:
    return nodes.layers[position].output.tolist()


def _vectors(row: list[float], width: int = FACTORS) -> Lists:
    return [row[start : start + width] for start in range(0, len(row), width)]


def _values(nodes: Nodes, position: int) -> list:
    return [np.array(parameter.values).tolist() for parameter in nodes.layers[position].parameters]


def _present(nodes: Nodes) -> list[list[tuple[int, float]]]:
    """Return the features of each row, as positions in the parameters, with their values."""
    rows = nodes.place_holder.rows
    if isinstance(rows, SparseRows):
        return [list(zip(indices, values, strict=True)) for indices, values in rows.rows()]
    takes_all = rows.shape[1] == FIELDS
    return [[(at, value) for at, value in enumerate(row) if value or takes_all] for row in rows.tolist()]


def _equal(given: Lists, expected: Lists) -> None:
    np.testing.assert_allclose(given, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_layer_is_the_transfer_function_of_xw_and_b(kind):
    """The product ignored values of sparse rows other than 1."""
    nodes, output = _computed(lambda nodes: nodes.add("simpleinputlayer", 3, transfer="sigmoid"), kind)
    weight, bias = _values(nodes, 0)
    expected = [
        [1 / (1 + math.exp(-(sum(value * weight[at][out] for at, value in row) + bias[out]))) for out in range(3)]
        for row in _present(nodes)
    ]
    _equal(output, expected)


def test_an_input_layer_takes_rows_of_any_number_of_features():
    """A row without features got the sum of the next row."""
    rows = SparseRows.from_rows([([0, 4], [1.0, 2.0]), ([], []), ([1], [3.0]), ([], [])], FEATURES)
    nodes = Nodes(PlaceHolder(FEATURES, "float64"))
    last = nodes.add("simpleinputlayer", 2)
    graph = nodes.graph(last)
    graph.feed_data(rows)
    give_values(graph, np.random.default_rng(0))
    graph.forward()
    weight, bias = (np.array(values) for values in _values(nodes, 0))
    expected = [bias + weight[0] + 2 * weight[2], bias, bias + 3 * weight[1], bias]
    np.testing.assert_allclose(last.output, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_the_vectors_of_the_features_in_their_order(kind):
    """The vectors had the order of the row's text instead of the order of the features."""
    nodes, output = _computed(lambda nodes: nodes.vectors(), kind)
    (weight,) = _values(nodes, 0)
    expected = [[value * number for at, value in row for number in weight[at]] for row in _present(nodes)]
    _equal(output, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_k_means_layer_gives_the_squared_distance_to_each_centre(kind):
    """The distance ignored a centre's coordinates at features that the mini-batch does not have."""
    nodes, output = _computed(lambda nodes: nodes.add("kmeansinputlayer", 3), kind, rows=2)
    (centres,) = _values(nodes, 0)
    rows, indices = nodes.place_holder.rows, nodes.place_holder.indices
    dense = np.zeros((2, nodes.place_holder.feature_dimension))
    dense[:, indices] = rows.to_dense() if isinstance(rows, SparseRows) else rows
    expected = [
        [sum((x - centre[k]) ** 2 for x, centre in zip(row, centres, strict=True)) for k in range(3)]
        for row in dense.tolist()
    ]
    _equal(output, expected)


def test_a_fully_connected_layer_is_the_transfer_function_of_xw_and_b():
    """The weights were transposed, which square weights do not show."""
    nodes, output = _computed(lambda nodes: nodes.add("fclayer", 5, nodes.vectors(), transfer="tanh"))
    weight, bias = _values(nodes, 1)
    expected = [
        [math.tanh(sum(x * weight[at][out] for at, x in enumerate(row)) + bias[out]) for out in range(5)]
        for row in _output(nodes, 0)
    ]
    _equal(output, expected)


def _crossed(type_name: str, output_dim: int, formula: Callable[[Lists], list[float]]) -> None:
    nodes, output = _computed(lambda nodes: nodes.add(type_name, output_dim, nodes.vectors()))
    _equal(output, [formula(_vectors(row)) for row in _output(nodes, 0)])


def _dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def test_the_inner_sum_adds_the_products_of_all_pairs():
    """The layer computes ½(‖Σu‖² − Σ‖u‖²), which must equal the sum over the pairs."""
    _crossed("biinnersumcross", 1, lambda vectors: [sum(_dot(u, v) for u, v in itertools.combinations(vectors, 2))])


def test_the_interaction_is_the_sum_of_the_products_of_all_pairs():
    """The layer computes ½((Σu)² − Σu²) for each number, which must equal the sum over the pairs."""
    _crossed(
        "biinteractioncross",
        FACTORS,
        lambda vectors: [sum(u[at] * v[at] for u, v in itertools.combinations(vectors, 2)) for at in range(FACTORS)],
    )


def test_inner_products_are_ordered_by_the_rows_of_the_triangle():
    """Column by column the products would be the same set, but a saved model would have another meaning."""
    _crossed("biinnercross", PAIRS, lambda vectors: [_dot(u, v) for u, v in itertools.combinations(vectors, 2)])


def test_outer_products_are_ordered_by_rows():
    """U ⊗ v and v ⊗ u are each the transpose of the other."""
    _crossed(
        "bioutercross",
        PAIRS * FACTORS**2,
        lambda vectors: [a * b for u, v in itertools.combinations(vectors, 2) for a in u for b in v],
    )


def test_tiled_interactions_are_the_products_of_the_pairs_one_after_the_other():
    """The attention layer reads one pair at a time."""
    _crossed(
        "biinteractioncrosstiled",
        PAIRS * FACTORS,
        lambda vectors: [a * b for u, v in itertools.combinations(vectors, 2) for a, b in zip(u, v, strict=True)],
    )


@pytest.mark.parametrize(
    ("type_name", "output_dim", "formula"),
    [
        ("concatlayer", 36, lambda rows: [x for row in rows for x in row]),
        ("sumpooling", 12, lambda rows: [sum(column) for column in zip(*rows, strict=True)]),
        ("mulpooling", 12, lambda rows: [math.prod(column) for column in zip(*rows, strict=True)]),
        ("dotpooling", 1, lambda rows: [sum(math.prod(column) for column in zip(*rows, strict=True))]),
    ],
)
def test_joins_take_all_their_inputs_in_their_order(type_name, output_dim, formula):
    """A product that was written for two inputs ignored the third."""
    nodes, output = _computed(
        lambda nodes: nodes.add(type_name, output_dim, nodes.vectors(), nodes.hidden(12), nodes.hidden(12))
    )
    inputs = zip(_output(nodes, 0), _output(nodes, 1), _output(nodes, 2), strict=True)
    _equal(output, [formula(rows) for rows in inputs])


def test_a_cross_layer_is_x0_times_xw_and_b_and_x():
    """x₀ and x were exchanged, which the first cross layer does not show, because both are equal there."""
    nodes, output = _computed(lambda nodes: nodes.add("crosslayer", 12, nodes.vectors(), nodes.hidden(12)))
    weight, bias = _values(nodes, 2)
    expected = [
        [first[at] * _dot(last, weight) + bias[at] + last[at] for at in range(12)]
        for first, last in zip(_output(nodes, 0), _output(nodes, 1), strict=True)
    ]
    _equal(output, expected)


def test_a_shared_layer_has_the_same_weights_for_each_vector():
    """The softmax must cover all vectors of a row: over one vector of one number it is always 1."""
    nodes, output = _computed(
        lambda nodes: nodes.add("paramsharedfc", FIELDS, nodes.vectors(), weight_dim=1, transfer="softmax")
    )
    weight, bias = _values(nodes, 1)
    expected = []
    for row in _output(nodes, 0):
        powers = [math.exp(_dot(u, [w for (w,) in weight]) + bias[0]) for u in _vectors(row)]
        expected.append([power / sum(powers) for power in powers])
    _equal(output, expected)


def test_a_weighted_sum_weighs_whole_vectors():
    """The weights are the first input, and the vectors are the second."""
    nodes, output = _computed(
        lambda nodes: nodes.add("weightedsumlayer", FACTORS, nodes.hidden(FIELDS), nodes.vectors())
    )
    expected = [
        [sum(a * u[at] for a, u in zip(weights, _vectors(row), strict=True)) for at in range(FACTORS)]
        for weights, row in zip(_output(nodes, 0), _output(nodes, 1), strict=True)
    ]
    _equal(output, expected)
