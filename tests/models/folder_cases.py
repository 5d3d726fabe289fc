"""Tests of followers with a folder share this code: histories of models, followers, and comparisons of two of them."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from models.model_case import same
from support.waiting import until

from streamiter.learn import AdaptiveLinearModel, Embeddings
from streamiter.models import ServedModel
from streamiter.models.stored_rows import StoredRows
from streamiter.networks import Network, ServedNetwork
from streamiter.networks.serving import version_of
from streamiter.topics.topic import Topic
from streamiter.topics.urls import topic as topic_of

TESTS = Path(__file__).parent.parent

_FEATURES = 500  # The others of the network are never learned.


def network_versions(count: int = 200, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield versions of a sparse FM whose features change, come and go."""
    layers = [
        {"name": "wide", "type": "simpleinputlayer", "outputdim": 1},
        {"name": "vectors", "type": "embedding", "numfactors": 8, "outputdim": 80},
        {"name": "cross", "type": "biinnersumcross", "inputlayer": "vectors"},
        {"name": "score", "type": "sumpooling", "outputdim": 1, "inputlayers": ["wide", "cross"]},
        {"name": "loss", "type": "simplelosslayer", "inputlayer": "score"},
    ]
    network = Network.from_json(
        {"data": {"indexrange": 10**6}, "model": {"modeltype": "T_FLOAT_SPARSE_LONGKEY"}, "layers": layers}
    )
    random = np.random.default_rng(seed)
    keys = np.unique(random.integers(0, _FEATURES, count))
    arrays = {
        name: random.normal(size=(len(keys), *array.shape[1:])).astype(np.float32)
        if name.endswith(".weight")
        else array
        for name, array in network.initial_parameters(seed=1).items()
    }
    while True:
        yield version_of(network, {**arrays, "features": keys})
        gone = random.choice(len(keys), random.integers(0, 4), replace=False)
        kept = np.delete(keys, gone)
        new = np.setdiff1d(random.integers(0, _FEATURES, random.integers(0, 4)), kept)
        at, changed = kept.searchsorted(new), random.choice(len(kept), 5)
        for name, array in arrays.items():
            if name.endswith(".weight"):
                rows = np.delete(array, gone, axis=0)
                rows[changed] += np.float32(0.5)
                arrays[name] = np.insert(rows, at, random.normal(size=(len(new), *array.shape[1:])), axis=0)
        keys = np.insert(kept, at, new)


def learner_versions(seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield versions of the ready-made learner with embeddings, which learns from more and more users."""
    random = np.random.default_rng(seed)
    model = AdaptiveLinearModel(embeddings=Embeddings(kind="fm", admit=2, at_most="2 MB"), shapes=False)
    for number in range(10**6):
        users = random.integers(0, 50 + 20 * number, 40)
        model.learn([{"user": f"u{each}", "item": f"i{each % 7}"} for each in users], users % 3 == 0)
        yield model.parameters()


def rows_of(model: type[ServedModel]) -> list[Any]:
    """Return rows to predict: of features that are known, and of others."""
    if model is ServedNetwork:
        return [(np.arange(start, start + 10), np.ones(10)) for start in range(0, 500, 10)]
    return [{"user": f"u{number}", "item": f"i{number % 8}"} for number in range(0, 400, 10)]


CASES: list[Any] = [(ServedNetwork, network_versions), (ServedModel, learner_versions)]


def whole(value: Any) -> Any:
    """Return parameters with arrays in place of rows on disk."""
    if isinstance(value, StoredRows):
        return value[np.arange(len(value))]
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def stored_in(value: Any) -> list[StoredRows]:
    """Return the rows on disk that parameters have."""
    if isinstance(value, StoredRows):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [rows for part in parts for rows in stored_in(part)]


def assert_equal(given: ServedModel, expected: ServedModel) -> None:
    """Two followers have the same version to the last bit, and predict the same numbers."""
    assert given.update is not None
    assert expected.update is not None
    assert given.update.rank == expected.update.rank
    assert stored_in(given.update.parameters)
    assert same(whole(given.update.parameters), expected.update.parameters)
    rows = rows_of(type(given))
    assert same(given.predict(rows).value, expected.predict(rows).value)
    assert given.predict(rows[0]).value == expected.predict(rows[0]).value


async def caught_up(served: ServedModel, rank: tuple[int, int]) -> None:
    await until(lambda: served.update is not None and served.update.rank >= rank)


async def _follow(kind: str, url: str, folder: str) -> None:
    """Tell each version that the follower takes over, until the process is killed."""
    model = ServedNetwork if kind == "ServedNetwork" else ServedModel
    async with model(topic_of(url), "ctr", folder=folder) as served:
        told = None
        while True:
            if served.update is not None and served.update.rank != told:
                told = served.update.rank
                values = served.predict(rows_of(model)).value.tolist()
                print(json.dumps({"rank": told, "values": values}), flush=True)
            await asyncio.sleep(0.001)


def follower_command(model: type[ServedModel], topic: Topic, folder: Path) -> list[str]:
    """Return the command of a follower that tells its versions; it runs in ``TESTS``."""
    return [sys.executable, "-m", "models.folder_cases", model.__name__, topic.url, str(folder)]


if __name__ == "__main__":
    asyncio.run(_follow(*sys.argv[1:]))
