"""Layers find the vectors in their inputs, and refuse rows that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from networks.layers.cases import FACTORS, Nodes

from streamiter.learn.rows import BadRows
from streamiter.networks.data import PlaceHolder
from streamiter.values.sparse_rows import SparseRows


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(PlaceHolder(9, "float64"))


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_of_another_number_of_features_than_fields_is_named(nodes, dense):
    """The vectors of such a row shifted the vectors of all later rows."""
    graph = nodes.graph(nodes.vectors())
    rows = SparseRows.from_rows([([0, 2, 5, 8], [1.0] * 4), ([0, 2, 5], [1.0] * 3)], 9)
    graph.feed_data(rows.to_dense() if dense else rows)
    for parameter in graph.parameters:
        parameter.values = np.ones(graph.shape_of(parameter))
    with pytest.raises(BadRows, match=r"'embedding0': expected 4 features in each row .*, given 3;.*\(row 1 of") as bad:
        graph.forward()
    assert bad.value.rows == (1,)


def test_vectors_stay_vectors_through_layers_that_keep_them(nodes):
    """A factorization machine over the sum of two embeddings was refused."""
    both = nodes.add("sumpooling", 12, nodes.vectors(), nodes.vectors(), vector_width=FACTORS)
    assert nodes.add("biinnercross", 6, both).output_dim == 6
    side_by_side = nodes.add("concatlayer", 24, both, nodes.vectors(), vector_width=FACTORS)
    assert nodes.add("biinnercross", 28, side_by_side).output_dim == 28
