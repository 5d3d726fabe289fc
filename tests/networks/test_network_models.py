"""Each published kind of model is built and trained in a small form, from initial values that follow from one seed."""

import math
from typing import Any

import numpy as np
import pytest
from networks.published import deep_fm, layer

from streamiter.errors import ConfigurationError
from streamiter.networks.layers.layer import Parameter, initial_values
from streamiter.networks.network import Network
from streamiter.parameter_server.optimizers import SGD

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


def network(**model: Any) -> Network:
    document = deep_fm()
    document["model"].update(model)
    return Network.from_json(document)


def start(seed: int = 7, **model: Any) -> dict[str, Any]:
    return network(**model).initial_parameters(seed)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    """A user must be able to repeat the result of a run."""
    first, again, other = start(7), start(7), start(8)
    assert first.keys() == again.keys() == other.keys()
    for name, values in first.items():
        assert np.array_equal(values, again[name])
        if not name.endswith("bias"):
            assert not np.array_equal(values, other[name])


def test_float32_has_the_numbers_of_float64_rounded():
    """The two runs in float64 and float32 must be comparable."""
    single, double = network().initial_parameters(7), network().initial_parameters(7, "float64")
    for name, values in double.items():
        assert values.dtype == np.float64
        assert single[name].dtype == np.float32
        assert np.array_equal(values.astype(np.float32), single[name])
        assert name.endswith("bias") or not np.array_equal(values, single[name])


def test_a_layer_begins_the_same_with_any_other_layers():
    """A user who removes a layer for a comparison must get the same initial values in the other layers."""
    document = deep_fm()
    whole = Network.from_json(document).initial_parameters(7)
    document["layers"].reverse()
    document["layers"].remove(layer(document, "wide"))
    layer(document, "sum")["inputlayers"] = ["deep", "cross"]
    part = Network.from_json(document).initial_parameters(7)
    assert set(part) == {name for name in whole if not name.startswith("wide.")}
    for name, values in part.items():
        assert np.array_equal(values, whole[name])


def test_layers_of_one_shape_begin_differently():
    """Layers with equal initial values learn the same."""
    document = deep_fm()
    layer(document, "deep")["outputdims"] = [104, 104, 1]
    begun = Network.from_json(document).initial_parameters(7)
    assert begun["deep_0.weight"].shape == begun["deep_1.weight"].shape
    assert abs(np.corrcoef(begun["deep_0.weight"].ravel(), begun["deep_1.weight"].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("name", "fan_in", "fan_out"),
    [("deep_0.weight", 104, 100), ("deep_1.weight", 100, 100), ("embedding.weight", 148, 104)],
)
def test_xavier_keeps_the_variance_of_the_values(name, fan_in, fan_out):
    """Values are uniform in ±√(6/(fan_in + fan_out)), with variance 2/(fan_in + fan_out): Glorot and Bengio 2010."""
    values = network().initial_parameters(7, "float64")[name]
    limit = math.sqrt(6 / (fan_in + fan_out))
    assert np.abs(values).max() <= limit
    assert np.abs(values).max() > 0.99 * limit
    assert values.var() == pytest.approx(2 / (fan_in + fan_out), rel=0.1)
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(values.size)


def test_initial_values_of_angel_are_available_by_name():
    """Runs of Angel must be repeatable: its values are normal, with a standard deviation of 1e-4."""
    begun = start(7, init="angel")
    assert begun["deep_0.weight"].std() == pytest.approx(1e-4, rel=0.05)
    assert abs(begun["deep_0.weight"].mean()) < 4e-6
    kurtosis = ((begun["deep_0.weight"] / begun["deep_0.weight"].std()) ** 4).mean()
    assert kurtosis == pytest.approx(3.0, abs=0.3)  # 3.0 is normal; a uniform distribution has 1.8
    again = network(init="Angel").to_json()
    assert again["model"]["init"] == "angel"
    assert np.array_equal(Network.from_json(again).initial_parameters(7)["deep_0.weight"], begun["deep_0.weight"])


@pytest.mark.parametrize("way", ["xavier", "angel"])
def test_biases_begin_with_zero(way):
    """Biases must be 0 with both kinds of initial values."""
    begun = start(7, init=way)
    biases = [name for name in begun if name.endswith(".bias")]
    assert biases == ["wide.bias", "deep_0.bias", "deep_1.bias", "deep.bias"]
    assert not any(begun[name].any() for name in biases)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_an_invalid_seed_is_refused(seed):
    """With None the seed would differ in every run."""
    with pytest.raises(ConfigurationError) as caught:
        start(seed)
    assert str(caught.value) == f"seed: expected a whole number of at least 0, given {seed!r}"


def test_the_numbers_of_a_seed_do_not_change():
    """If another version of the program began with other values, comparisons with older runs would be worthless."""
    weight = Parameter("wide.weight", (2, 1), True, SGD(), "weight", fan_in=3, fan_out=3)
    of_1 = initial_values(weight, seed=1, dtype="float64")
    assert of_1.ravel().tolist() == pytest.approx([-0.23303261535925834, -0.23491669356535438], rel=1e-12)
    angels = initial_values(weight, seed=1, way="angel", dtype="float64")
    assert angels.ravel().tolist() == pytest.approx([-1.3876252696916664e-05, -1.899223151045569e-05], rel=1e-12)
