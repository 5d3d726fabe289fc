"""A setting that does not fit the inputs gives an error with the layer, the expectation and the given value."""

from __future__ import annotations

import numpy as np
import pytest
from networks.layers.cases import Nodes

from streamiter.errors import ConfigurationError
from streamiter.learn.rows import BadRows
from streamiter.networks.data import PlaceHolder
from streamiter.networks.functions import LOSSES
from streamiter.networks.layers import LAYER_TYPES
from streamiter.networks.layers.layer import LayerSettings
from streamiter.sparse_rows import SparseRows


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(PlaceHolder(9, "float64"))


WRONG = {
    "not a multiple": (
        lambda nodes: nodes.add("embedding", 13, factors=3),
        r"layer 'embedding0': expected outputdim as a multiple of numfactors \(3\), given 13",
    ),
    "no factors": (
        lambda nodes: nodes.add("embedding", 12),
        "layer 'embedding0': expected the key 'numfactors', given none",
    ),
    "sum of two dimensions": (
        lambda nodes: nodes.add("sumpooling", 2, nodes.hidden(2), nodes.hidden(3)),
        "layer 'sumpooling2': expected inputs of one outputdim, "
        "given simpleinputlayer0 2, simpleinputlayer1 3; make them equal",
    ),
    "sum of one": (
        lambda nodes: nodes.add("sumpooling", 2, nodes.hidden(2)),
        r"layer 'sumpooling1' \(sumpooling\): expected at least 2 inputs, given 1",
    ),
    "product of another dimension": (
        lambda nodes: nodes.add("mulpooling", 3, nodes.hidden(2), nodes.hidden(2)),
        r"layer 'mulpooling2': expected outputdim 2 \(as its inputs have\), given 3",
    ),
    "dot of more than one": (
        lambda nodes: nodes.add("dotpooling", 2, nodes.hidden(2), nodes.hidden(2)),
        r"layer 'dotpooling2': expected outputdim 1 \(the sum over the row\), given 2",
    ),
    "concat": (
        lambda nodes: nodes.add("concatlayer", 4, nodes.hidden(2), nodes.hidden(3)),
        r"layer 'concatlayer2': expected outputdim 5 \(the sum over its inputs\), given 4",
    ),
    "cross of three": (
        lambda nodes: nodes.add("crosslayer", 2, nodes.hidden(2), nodes.hidden(2), nodes.hidden(2)),
        r"layer 'crosslayer3' \(crosslayer\): expected 2 inputs, given 3",
    ),
    "pairs": (
        lambda nodes: nodes.add("biinnercross", 5, nodes.vectors()),
        r"layer 'biinnercross1': expected outputdim 6 \(the pairs of 4 vectors\), given 5",
    ),
    "outer pairs": (
        lambda nodes: nodes.add("bioutercross", 5, nodes.vectors()),
        r"layer 'bioutercross1': expected outputdim 54 \(3 × 3 for each of the pairs of 4 vectors\), given 5",
    ),
    "interaction": (
        lambda nodes: nodes.add("biinteractioncross", 12, nodes.vectors()),
        r"layer 'biinteractioncross1': expected outputdim 3 \(the width of one vector\), given 12",
    ),
    "no vectors": (
        lambda nodes: nodes.add("biinnersumcross", 1, nodes.hidden(12)),
        r"layer 'biinnersumcross1': expected an input that consists of vectors, such as an embedding, "
        r"given 'simpleinputlayer0' \(simpleinputlayer\); choose an embedding as its input",
    ),
    "two inputs for one": (
        lambda nodes: nodes.add("fclayer", 1, nodes.hidden(1), nodes.hidden(1)),
        "layer 'fclayer2': expected 1 input, given 2; set 'inputlayer'",
    ),
    "shared without weightdim": (
        lambda nodes: nodes.add("paramsharedfc", 4, nodes.vectors()),
        "layer 'paramsharedfc1': expected the key 'weightdim', given none",
    ),
    "shared not a multiple": (
        lambda nodes: nodes.add("paramsharedfc", 5, nodes.vectors(), weight_dim=2),
        r"layer 'paramsharedfc1': expected outputdim as a multiple of weightdim \(2\), given 5",
    ),
    "shared for other vectors": (
        lambda nodes: nodes.add("paramsharedfc", 6, nodes.vectors(), weight_dim=2),
        r"layer 'paramsharedfc1': expected an input of 3 vectors \(outputdim 6 / weightdim 2\), "
        "given 'embedding0' of outputdim 12 of vectors of 3",
    ),
    "weights for other vectors": (
        lambda nodes: nodes.add("weightedsumlayer", 3, nodes.hidden(3), nodes.vectors()),
        r"layer 'weightedsumlayer2': expected a weight for each vector of 'embedding1' \(outputdim 12\), "
        "given 3 of 'simpleinputlayer0'",
    ),
    "several scores for one label": (
        lambda nodes: nodes.add("losslayer", -1, nodes.hidden(2), loss=LOSSES["logloss"]()),
        "layer 'losslayer1': expected an input of 1 output for logloss, given 2",
    ),
    "one score for several classes": (
        lambda nodes: nodes.add("losslayer", -1, nodes.hidden(1), loss=LOSSES["softmaxloss"]()),
        "layer 'losslayer1': expected an input of one output for each class, 2 or more, for softmaxloss, given 1",
    ),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_settings_that_do_not_fit_are_refused(nodes, wrong):
    """Numpy's error about shapes names neither the layer nor the key."""
    build, message = WRONG[wrong]
    with pytest.raises(ConfigurationError, match=message):
        build(nodes)


@pytest.mark.parametrize(
    "type_name", ["simpleinputlayer", "embedding", "fclayer", "crosslayer", "paramsharedfc"]
)
def test_a_layer_that_learns_needs_an_optimizer(nodes, type_name):
    """Without an optimizer, the parameters would be pulled but would never change."""
    source = nodes.vectors()
    inputs = {"fclayer": [source], "paramsharedfc": [source], "crosslayer": [source, source]}.get(
        type_name, []
    )
    settings = LayerSettings("deep", 12, factors=3, weight_dim=3)
    with pytest.raises(ConfigurationError, match="layer 'deep': expected an optimizer, given none"):
        LAYER_TYPES[type_name].from_settings(settings, inputs, nodes.place_holder)


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_of_another_number_of_features_than_fields_is_named(nodes, dense):
    """The vectors of such a row shifted the vectors of all later rows."""
    graph = nodes.graph(nodes.vectors())
    rows = SparseRows.from_rows([([0, 2, 5, 8], [1.0] * 4), ([0, 2, 5], [1.0] * 3)], 9)
    graph.feed_data(rows.to_dense() if dense else rows)
    for parameter in graph.parameters:
        parameter.values = np.ones(graph.shape_of(parameter))
    with pytest.raises(
        BadRows, match=r"'embedding0': expected 4 features in each row .*, given 3;.*\(row 1 of"
    ) as bad:
        graph.forward()
    assert bad.value.rows == (1,)


def test_dimensions_that_follow_from_the_inputs_need_not_be_given(nodes):
    """Saved files contain −1 for such dimensions."""
    assert nodes.add("biinnersumcross", -1, nodes.vectors()).output_dim == 1
    assert nodes.add("sumpooling", -1, nodes.hidden(5), nodes.hidden(5)).output_dim == 5


def test_vectors_stay_vectors_through_layers_that_keep_them(nodes):
    """A factorization machine over the sum of two embeddings was refused."""
    both = nodes.add("sumpooling", 12, nodes.vectors(), nodes.vectors())
    assert nodes.add("biinnercross", 6, both).output_dim == 6
    side_by_side = nodes.add("concatlayer", 24, both, nodes.vectors())
    assert nodes.add("biinnercross", 28, side_by_side).output_dim == 28


def test_all_types_are_known_by_the_names_of_the_files():
    """The table lacked a type that published files use."""
    assert set(LAYER_TYPES) >= {
        "simpleinputlayer",
        "embedding",
        "fclayer",
        "biinnersumcross",
        "biinnercross",
        "biinteractioncross",
        "bioutercross",
        "biouttercross",
        "concatlayer",
        "sumpooling",
        "mulpooling",
        "dotpooling",
        "crosslayer",
        "paramsharedfc",
        "weightedsumlayer",
        "kmeansinputlayer",
        "simplelosslayer",
        "losslayer",
    }
