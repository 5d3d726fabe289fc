"""A network is read from a file, saved to disk and loaded again, and invalid folders are refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from networks.published import PUBLISHED, deep_fm, layer, published
from networks.training_support import network, rows

from streamiter.errors import ConfigurationError, ModelError
from streamiter.networks.configuration.sections import LOSSES, TRANSFER_FUNCTIONS
from streamiter.networks.network import ConfigurationWarning, Network
from streamiter.networks.serving import EpochResult, Evaluation, load_network, save_network
from streamiter.networks.training import fit_network


def test_a_saved_network_predicts_the_same_and_continues(tmp_path: Path) -> None:
    """A loaded model with one different bit is a model that was never evaluated."""
    data = rows(300)
    fitted = fit_network(network(data={"indexrange": -1}), data, data, progress=False)
    save_network(tmp_path / "models" / "small", fitted.network, fitted.parameters, fitted.results)
    saved = load_network(tmp_path / "models" / "small")
    assert saved.network.to_json() == fitted.network.to_json()
    assert saved.network.features == 24
    for name, array in fitted.parameters.items():
        assert saved.parameters[name].tobytes() == array.tobytes()
    assert saved.predictor(data.rows).tolist() == fitted.predictor(data.rows).tolist()
    then = fit_network(saved.network, data, data, start=saved.parameters, epochs=1, progress=False)
    first, last = fitted.results[-1].validation, then.results[-1].validation
    assert first is not None
    assert last is not None
    assert last.loss < first.loss


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    """Other programs need only JSON and safetensors to read the folder."""
    made = network()
    results = [EpochResult(1, 0.5, Evaluation(10, 0.4, 0.8, 0.9)), EpochResult(2, 0.4, None)]
    save_network(tmp_path / "m", made, made.initial_parameters(seed=1), results)
    assert json.loads((tmp_path / "m" / "network.json").read_text()) == made.to_json()
    arrays = safetensors.numpy.load_file(tmp_path / "m" / "parameters.safetensors")
    assert arrays["embedding.weight"].shape == (24, 3)
    stored = json.loads((tmp_path / "m" / "results.json").read_text())
    assert stored[0]["validation"] == {"rows": 10, "loss": 0.4, "accuracy": 0.8, "auc": 0.9}
    assert stored[1] == {"epoch": 2, "training_loss": 0.4, "validation": None}


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    """Saving must not destroy other content of the folder."""
    made = network()
    arrays = made.initial_parameters(seed=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ModelError, match=r"expected a new folder, an empty one, or one with network.json, given something else"
    ):
        save_network(tmp_path, made, arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    save_network(tmp_path / "m", made, arrays)
    save_network(tmp_path / "m", made, {name: array + 1 for name, array in arrays.items()})
    assert load_network(tmp_path / "m").parameters["wide.bias"].tolist() == [1.0]
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "network.json",
        "parameters.safetensors",
        "results.json",
    ]


def test_a_folder_without_a_saved_network_is_refused(tmp_path: Path) -> None:
    """The user gave a wrong path, an old folder or a broken file."""
    with pytest.raises(
        ModelError, match=r"expected a folder with network.json and .*, given no folder; streamiter train"
    ):
        load_network(tmp_path / "none")
    with pytest.raises(ModelError, match="given a folder without them"):
        load_network(tmp_path)
    made = network()
    save_network(tmp_path / "m", made, made.initial_parameters(seed=1))
    (tmp_path / "m" / "parameters.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"expected parameters in parameters.safetensors, given a broken file"):
        load_network(tmp_path / "m")
    partly = {name: array for name, array in made.initial_parameters(seed=1).items() if name != "deep.bias"}
    with pytest.raises(ModelError, match=r"expected 'deep.bias' of shape \(1,\), given none; load it"):
        save_network(tmp_path / "n", made, partly)
    more = {**made.initial_parameters(seed=1), "other.weight": np.zeros(1)}
    with pytest.raises(ModelError, match=r"expected only arrays of the network, given 'other\.weight'; load it"):
        save_network(tmp_path / "n", made, more)
    assert not (tmp_path / "n").exists()


def test_a_failed_save_names_the_folder(tmp_path: Path) -> None:
    """After the training, the error was an Errno that did not mention the model."""
    made = network()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match=r"given a path below '.*file', which is a file; save it elsewhere"):
        save_network(tmp_path / "file" / "m", made, made.initial_parameters(seed=1))
    with pytest.raises(ModelError, match=r"^model '/proc/m': expected a folder that can be written, given: No such"):
        save_network("/proc/m", made, made.initial_parameters(seed=1))


def test_numbers_that_numpy_has_not_are_named(tmp_path: Path) -> None:
    """Other programs write bfloat16, and the error was a KeyError."""
    made = network()
    save_network(tmp_path / "m", made, made.initial_parameters(seed=1))
    header = b'{"wide.bias":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    path = tmp_path / "m" / "parameters.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ModelError, match=r"in float32 or float64, given numbers of type 'BF16', which numpy has not"):
        load_network(tmp_path / "m")


def test_predictions_do_not_depend_on_how_rows_come(tmp_path: Path) -> None:
    """Rows are served one by one, or read from a file all at once."""
    data = rows(7)
    fitted = fit_network(network(train={"batchsize": 3}), data, progress=False)
    predict = fitted.predictor
    at_once = predict(data.rows)
    pairs = list(data.rows.rows())  # type: ignore[union-attr]
    assert at_once.shape == (7,)
    assert predict([(indices, values) for indices, values in pairs]) == pytest.approx(at_once, rel=1e-12)
    assert [predict((indices, values)) for indices, values in pairs] == pytest.approx(at_once, rel=1e-12)
    assert predict(data.rows.to_dense()) == pytest.approx(at_once, rel=1e-12)  # type: ignore[union-attr]
    found = predict.predictions(data.rows)
    assert found.probability is not None
    assert found.label is not None
    assert (found.label == np.where(found.probability >= 0.5, 1, -1)).all()
    with pytest.raises(
        ModelError, match=r"network: expected rows of 24 features, as \(24,\) or \(n, 24\), given shape"
    ):
        predict([1.0, 2.0])


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
