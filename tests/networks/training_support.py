"""Tests of training networks share this code."""

from typing import Any

import numpy as np

from streamiter import Flow
from streamiter.networks.data import LabelledRows
from streamiter.networks.network import Network
from streamiter.networks.training import train_network
from streamiter.parameter_server import ParameterServer
from streamiter.values.sparse_rows import SparseRows

FIELDS = 4
FEATURES = 24


def document(**sections: Any) -> dict[str, Any]:
    """Return a small DeepFM in float64; ``sections`` replace keys of sections, such as ``train={"epoch": 3}``."""
    given: dict[str, Any] = {
        "data": {"format": "dummy", "indexrange": FEATURES, "validateratio": 0.25},
        "model": {"modeltype": "T_DOUBLE_DENSE"},
        "train": {"epoch": 3, "numupdateperepoch": 5, "lr": 0.05, "decayclass": "Constant"},
        "default_optimizer": {"type": "momentum", "momentum": 0.8},
        "layers": [
            {"name": "wide", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
            {
                "name": "embedding",
                "type": "embedding",
                "numfactors": 3,
                "outputdim": FIELDS * 3,
                "optimizer": {"type": "adam", "reg2": 0.01},
            },
            {
                "name": "deep",
                "type": "fclayer",
                "inputlayer": "embedding",
                "outputdims": [5, 1],
                "transfuncs": ["tanh", "identity"],
            },
            {"name": "cross", "type": "biinnersumcross", "inputlayer": "embedding", "outputdim": 1},
            {"name": "sum", "type": "sumpooling", "outputdim": 1, "inputlayers": ["wide", "cross", "deep"]},
            {"name": "loss", "type": "simplelosslayer", "lossfunc": "logloss", "inputlayer": "sum"},
        ],
    }
    for section, keys in sections.items():
        given[section] = {**given[section], **keys} if isinstance(keys, dict) else keys
    return given


def network(**sections: Any) -> Network:
    """Return the network of ``document`` with these sections."""
    return Network.from_json(document(**sections))


def rows(count: int, *, seed: int = 1) -> LabelledRows:
    """Return rows with one feature of six in each field; the label depends on pairs of features."""
    generator = np.random.default_rng(seed)
    fields = generator.integers(0, 6, (count, FIELDS)) + 6 * np.arange(FIELDS)
    secret = np.random.default_rng(0).normal(size=(FEATURES, 2))
    vectors = secret[fields]
    scores = (vectors.sum(axis=1) ** 2).sum(axis=1) - (vectors**2).sum(axis=(1, 2))
    chances = 1 / (1 + np.exp(-scores))
    features = SparseRows.from_rows(((row, np.ones(FIELDS)) for row in fields), FEATURES)
    return LabelledRows(features, np.where(generator.random(count) < chances, 1.0, -1.0))


def records(data: LabelledRows) -> list[dict[str, Any]]:
    """Return the rows as the records of a dummy file."""
    assert isinstance(data.rows, SparseRows)
    return [
        {"label": float(label), "indices": np.array(indices), "values": np.array(values)}
        for label, (indices, values) in zip(data.labels, data.rows.rows(), strict=True)
    ]


def trained(made: Network, data: LabelledRows, *, shards: int = 2, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the versions and the losses of a training."""
    flow = Flow("training")
    training = train_network(flow, data, made, ParameterServer(shards=shards), **options)
    models, losses = training.models.collect(), training.losses.collect()
    flow.run()
    return models.items, losses.items


def arrays_of(model: Any) -> dict[str, Any]:
    """Return the parameters of a version by name."""
    return {name: array for name, array in model.parameters.items() if name != "network"}
