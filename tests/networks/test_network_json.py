"""A network is read from a file, saved again, and made into a graph."""

import json
import warnings
from typing import Any

import numpy as np
import pytest
from networks.published import PUBLISHED, deep_fm, layer, published

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration.sections import LOSSES, TRANSFER_FUNCTIONS
from streamiter.networks.network import ConfigurationWarning, Network


def logistic(**document: Any) -> dict[str, Any]:
    layers = {
        "wide": {"type": "simpleinputlayer", "outputdim": 1},
        "loss": {"type": "simplelosslayer", "inputlayer": "wide"},
    }
    return {"layers": layers, **document}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_network_saved_and_loaded_is_the_same(name, tmp_path):
    """A user may pass the saved document on, or write it to a file."""
    network = Network.from_json(published(name))
    path = tmp_path / "saved.json"
    document = network.to_json(path)
    assert json.loads(path.read_text()) == document
    assert Network.from_json(path).to_json() == Network.from_json(document).to_json() == document


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_network_computes_its_loss_and_gradients(name):
    """All published networks must run without changes."""
    network = Network.from_json(published(name))
    network = network if network.features is not None else network.with_features(123)
    graph = network.graph()
    start = network.initial_parameters(seed=3)
    rows = np.zeros((4, graph.place_holder.feature_dimension), dtype=np.float32)
    rows[:, :13] = 1.0
    graph.feed_data(rows, [1, -1, 1, -1], training=True)
    for parameter in graph.parameters:
        parameter.values = start[parameter.name]
    assert np.isfinite(graph.loss())
    graph.backward()
    for parameter in graph.gradients():
        assert parameter.gradient is not None
        assert parameter.gradient.shape == parameter.shape
        assert parameter.gradient.dtype == np.float32


def test_every_function_has_the_defaults_of_its_class():
    """A default of the file that is not the default of the class makes the same network from other code."""
    for kinds in (LOSSES, TRANSFER_FUNCTIONS):
        for make, parameters in kinds.kinds.values():
            assert make(**{key: default for key, (default, _) in parameters.items()}) == make()


def test_settings_of_the_file_reach_the_layers():
    """A setting that is read but not passed to a layer looks like a setting with an effect."""
    document = deep_fm()
    layer(document, "deep")["transfuncs"][0] = {"type": "dropout", "proba": 0.125}
    document["default_lossfunc"] = "logloss"
    layer(document, "loss")["lossfunc"] = {"type": "huberloss", "delta": 3}
    graph = Network.from_json(document).graph()
    by_name = {built.name: built for built in graph.layers}
    start = {parameter.name: np.zeros(parameter.shape, np.float32) for parameter in graph.parameters}
    start["deep_0.bias"] += 1
    graph.feed_data(np.eye(13, 148, dtype=np.float32).sum(axis=0, keepdims=True), [1], training=True)
    for parameter in graph.parameters:
        parameter.values = start[parameter.name]
    graph.forward()
    assert set(by_name["deep_0"].output.ravel().tolist()) == {0.0, np.float32(1 / 0.875)}
    assert graph.loss_layer.loss.delta == 3.0
    rules = {parameter.name: parameter.optimizer for parameter in graph.parameters}
    assert rules["embedding.weight"].l2 == 0.01
    assert rules["deep_0.weight"].l2 == 0.0
    assert [built.name for built in by_name["sum"].inputs] == ["wide", "cross", "deep"]


def test_the_model_type_gives_the_default_dtype():
    """Tests compute gradients in float64, for any dtype in the file."""
    single = Network.from_json(logistic(data={"indexrange": 3}))
    double = Network.from_json(logistic(data={"indexrange": 3}, model={"modeltype": "T_DOUBLE_SPARSE"}))
    assert (single.dtype, double.dtype) == (np.float32, np.float64)
    assert single.graph().place_holder.dtype == np.float32
    assert single.graph("float64").place_holder.dtype == np.float64
    assert double.initial_parameters(1)["wide.weight"].dtype == np.float64
    with pytest.raises(ConfigurationError) as caught:
        single.graph("int32")
    assert str(caught.value) == "Network: expected dtype float32 or float64, given int32"


def test_the_number_of_features_may_come_from_the_data():
    """logreg.json gives -1 as the number of features."""
    network = Network.from_json(logistic(data={"indexrange": -1}))
    assert network.features is None
    with pytest.raises(ConfigurationError) as caught:
        network.graph()
    assert str(caught.value) == (
        "configuration: expected the number of features, given indexrange -1; "
        "set indexrange, or take network.with_features(…) with the number in the data"
    )
    sized = network.with_features(123)
    assert sized.initial_parameters(1)["wide.weight"].shape == (123, 1)
    assert sized.to_json()["data"]["indexrange"] == 123
    assert network.features is None
    with pytest.raises(ConfigurationError, match="with_features: expected a whole number of at least 1, given 0"):
        network.with_features(0)


def test_unknown_keys_are_warnings_at_the_line_that_loads_the_file():
    """The warning must come once, and must show the line of the user's program that loads the file."""
    with pytest.warns(ConfigurationWarning) as caught:
        Network.from_json(logistic(trian={"lr": 1}))
    assert [str(found.message) for found in caught] == [
        "configuration: trian: unknown, and left out; did you mean 'train'?"
    ]
    assert caught[0].filename == __file__


def test_a_saved_network_gives_no_second_warning():
    """A network that was saved and loaded again has no unknown keys."""
    with pytest.warns(ConfigurationWarning):
        network = Network.from_json(logistic(colour="blue"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Network.from_json(network.to_json())
        network.with_features(2).graph()


def test_the_representation_shows_layers_and_dtype():
    """The representation is shown in notebooks and in messages."""
    assert repr(Network.from_json(deep_fm())) == "Network('configuration', 8 layers, float32)"
