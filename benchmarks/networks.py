"""Train networks, compared with the same steps in plain numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Figure, Stopwatch, Target, Trial, alternate
from benchmarks.networks_by_hand import train_deepfm
from benchmarks.session import PROJECT, Session
from streamiter.networks.data import LabelledRows, part, read_rows
from streamiter.networks.network import Network
from streamiter.networks.serving import TrainedNetwork
from streamiter.networks.training import fit_network
from streamiter.values.sparse_rows import SparseRows

__all__ = ["DATA", "EPOCHS", "OWN", "PUBLISHED", "census", "networks_speed"]

DATA: Final = PROJECT.parent / "shared" / "data"
"""LIBSVM's a9a, and the same people with 13 fields ("census"); both are made from UCI's Adult data set."""
PUBLISHED: Final = PROJECT.parent / "shared" / "networks"
OWN: Final = PROJECT / "examples" / "networks"

EPOCHS: Final = "epochs/s"
# fit_network may take 1.5 times as long as the bare steps.
_RATIO_AT_LEAST: Final = 1 / 1.5
_SECONDS_BELOW: Final = 0.5


def networks_speed(session: Session) -> Iterator[Figure]:
    """DeepFM learns census in epochs of 20,512 rows in ten steps (Adam, float32); logistic regression learns a9a."""
    yield from _deepfm(session)
    yield from _logistic_regression(session)


def _deepfm(session: Session) -> Iterator[Figure]:
    network = Network.from_json(OWN / "deepfm.json")
    data = census(network)
    if data is None:
        return
    epochs = session.size(10, 2)
    start = network.initial_parameters(seed=1)
    features, labels = _fields(data), data.labels.astype(np.float32)
    bare, ours = "numpy, the same steps", "fit_network"

    def by_hand() -> Trial:
        arrays = {name: array.copy() for name, array in start.items()}
        rate = 0.01
        with Stopwatch() as watch:
            train_deepfm(arrays, features, labels, epochs=epochs, updates=10, rate=rate)
        return Trial(watch.rates(epochs, "epochs"), _digest(arrays))

    def fitted() -> Trial:
        with Stopwatch() as watch:
            trained = fit_network(network_at_constant_rate, data, epochs=epochs, seed=1, progress=False)
        return Trial(watch.rates(epochs, "epochs"), _digest(trained.parameters))

    network_at_constant_rate = _with_constant_rate(network)
    series = alternate({bare: by_hand, ours: fitted}, repeat=session.repeat, agree=_agree)
    yield series.figure(bare, EPOCHS)
    yield series.figure(
        ours,
        EPOCHS,
        compared_with=bare,
        target=Target("ratio", at_least=_RATIO_AT_LEAST),
        note="the whole call, with its losses",
    )


def _logistic_regression(session: Session) -> Iterator[Figure]:
    path = DATA / "a9a" / "a9a_123d_train.libsvm"
    config = PUBLISHED / "logreg.json"
    if not (path.exists() and config.exists()):
        return

    def read() -> tuple[Network, LabelledRows]:
        network = Network.from_json(config)
        return network, read_rows(path, network.configuration.data, owner="a9a")

    def train(network: Network, data: LabelledRows) -> TrainedNetwork:
        parted = part(data, validate_ratio=network.configuration.data.validate_ratio)
        return fit_network(network, parted.training, parted.validation, progress=False)

    def in_all() -> Trial:
        with Stopwatch() as watch:
            train(*read())
        return Trial({"s": watch.seconds})

    def without_reading() -> Trial:
        given = read()
        with Stopwatch() as watch:
            train(*given)
        return Trial({"s": watch.seconds})

    name = "a9a, logistic regression, 10 epochs"
    series = alternate(
        {f"{name}, with reading the file": in_all, f"{name}, rows in memory": without_reading}, repeat=session.repeat
    )
    yield series.figure(f"{name}, with reading the file", "s", target=Target("figure", below=_SECONDS_BELOW))
    yield series.figure(f"{name}, rows in memory", "s")


def _with_constant_rate(network: Network) -> Network:
    document = network.to_json()
    return Network.from_json({**document, "train": {**document["train"], "decayclass": "Constant"}})


def census(network: Network) -> LabelledRows | None:
    path = DATA / "census" / "census_148d_train.dummy"
    if not path.exists():
        return None
    settings = network.configuration.data
    data = read_rows(path, settings, owner="census")
    return part(data, validate_ratio=settings.validate_ratio).training


def _fields(data: LabelledRows) -> npt.NDArray[np.intp]:
    """Return the feature of each field, as an array of (rows, fields)."""
    assert isinstance(data.rows, SparseRows)
    return data.rows.indices.reshape(len(data), -1)


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """Return the mean of each parameter array, which differs between different results."""
    return np.array([np.abs(arrays[name]).mean(dtype=np.float64) for name in sorted(arrays)])


def _agree(first: Any, other: Any) -> bool:
    return bool(np.allclose(first, other, rtol=2e-2, atol=1e-3))
