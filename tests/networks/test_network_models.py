"""Each published kind of model is built and trained in a small form, with a configuration that passes the check."""

from typing import Any

import numpy as np
import pytest

from streamiter.errors import ConfigurationError
from streamiter.networks.network import Network

FIELDS, FACTORS, FEATURES = 4, 3, 20
PAIRS = FIELDS * (FIELDS - 1) // 2
WIDTH = FIELDS * FACTORS


def chain(name: str, source: str, *dims: int, functions: list[str] | None = None) -> dict[str, Any]:
    functions = functions or ["tanh"] * (len(dims) - 1) + ["identity"]
    return {"name": name, "type": "FCLayer", "inputlayer": source, "outputdims": list(dims), "transfuncs": functions}


def one(name: str, kind: str, source: str, dim: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "inputlayer": source, "outputdim": dim}


def several(name: str, kind: str, sources: list[str], dim: int) -> dict[str, Any]:
    return {"name": name, "type": kind, "inputlayers": sources, "outputdim": dim}


def embedding(name: str = "embedding") -> dict[str, Any]:
    return {"name": name, "type": "Embedding", "numfactors": FACTORS, "outputdim": WIDTH}


def wide(dim: int = 1) -> dict[str, Any]:
    return {"name": "wide", "type": "SimpleInputLayer", "outputdim": dim}


def loss(source: str, function: str = "logloss") -> dict[str, Any]:
    return {"name": "loss", "type": "LossLayer", "lossfunc": function, "inputlayer": source}


MODELS: dict[str, list[dict[str, Any]]] = {
    "softmax regression": [wide(3), loss("wide", "softmaxloss")],
    "factorization machine": [
        wide(),
        embedding(),
        one("cross", "BiInnerSumCross", "embedding", 1),
        several("sum", "SumPooling", ["wide", "cross"], 1),
        loss("sum"),
    ],
    "neural factorization machine": [
        embedding(),
        one("cross", "BiInteractionCross", "embedding", FACTORS),
        chain("deep", "cross", 5, 1),
        loss("deep"),
    ],
    "product network, inner": [
        embedding(),
        one("cross", "BiInnerCross", "embedding", PAIRS),
        several("both", "ConcatLayer", ["embedding", "cross"], WIDTH + PAIRS),
        chain("deep", "both", 5, 1),
        loss("deep"),
    ],
    "product network, outer": [
        embedding(),
        one("cross", "bioutterCross", "embedding", PAIRS * FACTORS**2),
        chain("deep", "cross", 5, 1),
        loss("deep"),
    ],
    "deep and cross": [
        embedding(),
        several("first", "CrossLayer", ["embedding", "embedding"], WIDTH),
        several("second", "CrossLayer", ["embedding", "first"], WIDTH),
        chain("deep", "embedding", 7, 5),
        several("both", "ConcatLayer", ["deep", "second"], WIDTH + 5),
        chain("score", "both", 1),
        loss("score"),
    ],
    "attention factorization machine": [
        embedding(),
        one("pairs", "BiInteractionCrossTiled", "embedding", PAIRS * FACTORS),
        {
            "name": "attention",
            "type": "ParamSharedFC",
            "inputlayer": "pairs",
            "outputdims": [PAIRS * 5, PAIRS],
            "transfuncs": ["relu", "softmax"],
            "weightdims": [5, 1],
        },
        several("pooled", "WeightedSumLayer", ["attention", "pairs"], FACTORS),
        chain("score", "pooled", 1),
        loss("score"),
    ],
    "k-means": [
        {"name": "centres", "type": "KmeansInputLayer", "outputdim": 3, "optimizer": "kmeansoptimizer"},
        loss("centres", "kmeansloss"),
    ],
    "mixture of logistic regressions": [
        {**wide(), "name": "gates", "outputdim": 3, "transfunc": "softmax"},
        {**wide(), "name": "experts", "outputdim": 3, "transfunc": "sigmoid"},
        several("both", "DotPooling", ["gates", "experts"], 1),
        loss("both", "crossentropyloss"),
    ],
    "product of two parts": [
        wide(2),
        {**wide(2), "name": "other"},
        several("product", "MulPooling", ["wide", "other"], 2),
        chain("score", "product", 1),
        loss("score", "huberloss"),
    ],
    "crosses of two tables of vectors": [
        embedding(),
        embedding("other"),
        several("added", "SumPooling", ["embedding", "other"], WIDTH),
        several("joined", "ConcatLayer", ["embedding", "added"], 2 * WIDTH),
        one("cross", "BiInnerSumCross", "joined", 1),
        loss("cross", "hingeloss"),
    ],
}


def document(model: str) -> dict[str, Any]:
    return {
        "data": {"indexrange": FEATURES, "numfield": FIELDS},
        "model": {"modeltype": "T_DOUBLE_DENSE"},
        "layers": MODELS[model],
    }


def rows(generator: np.random.Generator) -> np.ndarray:
    """Return one-hot rows with one feature of each field."""
    dense = np.zeros((8, FEATURES))
    each = FEATURES // FIELDS
    for field in range(FIELDS):
        dense[np.arange(8), field * each + generator.integers(each, size=8)] = 1.0
    return dense


@pytest.mark.parametrize("model", MODELS)
def test_a_published_kind_of_model_is_built_and_learned_from(model):
    """The check of the configuration and the layers must have the same rules for dimensions."""
    network = Network.from_json(document(model))
    graph = network.graph()
    dims = {found.name: found.output_dim for found in network.configuration.layers[:-1]}
    assert {built.name: built.output_dim for built in graph.layers[:-1]} == dims
    generator = np.random.default_rng(5)
    labels = generator.choice([0.0, 1.0, 2.0] if model in ("softmax regression", "k-means") else [-1.0, 1.0], size=8)
    batch = rows(generator)
    graph.feed_data(batch, labels, training=True)
    start = network.initial_parameters(seed=2)
    for parameter in graph.parameters:
        parameter.values = start[parameter.name]
    before = graph.loss()
    graph.backward()
    for parameter in graph.gradients():
        assert parameter.gradient is not None
        if parameter.name == "attention.bias":
            # A softmax does not change with a number added to all scores: this gradient is 0, but for rounding.
            np.testing.assert_allclose(parameter.gradient, 0.0, rtol=0, atol=1e-12)
        else:
            assert parameter.gradient.any(), parameter.name
        parameter.values = parameter.values - 1e-3 * parameter.gradient
    graph.feed_data(batch, labels, training=True)
    assert graph.loss() < before


@pytest.mark.parametrize("model", MODELS)
def test_its_canonical_form_is_the_same_network(model):
    """The canonical form is saved with a model, so it must describe any layers."""
    saved = Network.from_json(document(model)).to_json()
    assert Network.from_json(saved).to_json() == saved
    assert str(Network.from_json(saved).summary()) == str(Network.from_json(document(model)).summary())


def test_shared_layers_count_the_vectors_of_the_pairs():
    """If the number of vectors were unknown, 12 = 6 × 2 could be divided into vectors of another width."""
    layers = [dict(found) for found in MODELS["attention factorization machine"]]
    layers[2] = {**layers[2], "outputdims": [PAIRS * 5, PAIRS - 3]}
    layers[2]["outputdims"][0] = (PAIRS + 3) * 5
    with pytest.raises(ConfigurationError) as caught:
        Network.from_json({**document("attention factorization machine"), "layers": layers})
    assert str(caught.value) == (
        "configuration: layers.attention.outputdims[0]: expected 30, 5 (weightdim) for each of the "
        "6 vectors of 'pairs', given 45; change it, or its input"
    )
