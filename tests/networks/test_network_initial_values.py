"""Initial values of parameters depend on one seed and on nothing else."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from networks.published import deep_fm, layer
from support.waiting import PATIENCE_S

from streamiter.errors import ConfigurationError
from streamiter.networks.layers.layer import Parameter, initial_values
from streamiter.networks.network import Network
from streamiter.parameter_server.optimizers import SGD


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


def test_the_same_numbers_in_another_process():
    """Python's hash of a name differs between processes."""
    code = (
        "from networks.published import deep_fm\n"
        "from streamiter.networks.network import Network\n"
        "print(Network.from_json(deep_fm()).initial_parameters(7)['deep_0.weight'].sum().item())"
    )
    path = [entry for entry in sys.path if entry]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert float(ran.stdout) == start(7)["deep_0.weight"].sum().item()


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
