"""Tests use these configurations: one is made for the tests, and four are published."""

import copy
from pathlib import Path
from typing import Any

import pytest

PUBLISHED = ["logreg", "deepfm", "daw", "graph"]

_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "networks"

_DEEP_FM: dict[str, Any] = {
    "data": {"format": "dummy", "indexrange": 148, "numfield": 13},
    "model": {"modeltype": "T_FLOAT_DENSE", "modelsize": 148},
    "train": {"epoch": 5, "lr": 0.5, "decayclass": "WarmRestarts", "decayalpha": 0.05},
    "default_optimizer": "Momentum",
    "layers": [
        {"name": "wide", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
        {
            "name": "embedding",
            "type": "embedding",
            "numfactors": 8,
            "outputdim": 104,
            "optimizer": {"type": "momentum", "momentum": 0.9, "reg2": 0.01},
        },
        {
            "name": "deep",
            "type": "FCLayer",
            "inputlayer": "embedding",
            "outputdims": [100, 100, 1],
            "transfuncs": ["relu", "relu", "identity"],
        },
        {"name": "cross", "type": "BiInnerSumCross", "inputlayer": "embedding", "outputdim": 1},
        {"name": "sum", "type": "SumPooling", "outputdim": 1, "inputlayers": ["wide", "cross", "deep"]},
        {"name": "loss", "type": "simplelosslayer", "lossfunc": "logloss", "inputlayer": "sum"},
    ],
}


def deep_fm() -> dict[str, Any]:
    """Return a DeepFM that the caller may change."""
    return copy.deepcopy(_DEEP_FM)


def layer(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a layer of the array; the caller may change it."""
    found: dict[str, Any] = next(layer for layer in document["layers"] if layer["name"] == name)
    return found


def published(name: str) -> Path:
    """Return the path of a file of Angel's project, or skip the test if the file is missing."""
    path = _FOLDER / f"{name}.json"
    if not path.exists():
        pytest.skip(f"needs {path.name} among the published configurations, in {_FOLDER.name}/ next to the repository")
    return path
