"""Versions of a network as changes: their bytes, the time to write and to apply them, and a follower's start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.kafka import new_topic, run
from benchmarks.measuring import Figure, Stopwatch, Target
from benchmarks.session import Session
from streamiter.models import ModelUpdateEncoder, model_updates
from streamiter.networks import Network, ServedNetwork
from streamiter.networks.serving import version_of
from streamiter.topics.topic import OutgoingBatch, Topic
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.numbers import Array

__all__ = ["networks_versions"]

_INDEX_RANGE: Final = 10**9
_FACTORS: Final = 8
_MODEL: Final = "clicks"
_LAYERS: Final[list[dict[str, Any]]] = [
    {"name": "wide", "type": "simpleinputlayer", "outputdim": 1},
    {"name": "vectors", "type": "embedding", "numfactors": _FACTORS, "outputdim": 10 * _FACTORS},
    {"name": "cross", "type": "biinnersumcross", "inputlayer": "vectors"},
    {"name": "score", "type": "sumpooling", "outputdim": 1, "inputlayers": ["wide", "cross"]},
    {"name": "loss", "type": "simplelosslayer", "inputlayer": "score"},
]

# Of the rows of a version one in a hundred has changed; one in 2,000 came, and one in 2,000 went.
_CHANGED: Final = 100
_CHURN: Final = 2000
_CHANGES: Final = 50

_ROW: Final = list(range(0, 1000, 100))

_SHARE_BELOW: Final = 0.05
_READY_S_BELOW: Final = 1.5


def networks_versions(session: Session) -> Iterator[Figure]:
    """A sparse FM of 1,000,000 features with 8 factors; each version changes 1 % of its rows, and .05 % come and go."""
    count, repeat = session.size(1_000_000, 10_000), min(session.repeat, 3)
    versions = _Versions(count)
    encoder = ModelUpdateEncoder(_MODEL, 1, clock=SystemClock(), changes=True)
    batches: list[OutgoingBatch] = []
    encoding: list[Stopwatch] = []
    for _ in range(session.size(_CHANGES, 5) + 1):
        parameters = versions.next()
        with Stopwatch() as watch:
            batches.append(encoder.encode([parameters]))
        encoding.append(watch)
    whole, *changes = (_bytes(batch) for batch in batches)
    yield Figure("whole", "MB", (whole / 1e6,))
    yield Figure("change", "MB", tuple(each / 1e6 for each in changes))
    shares = tuple(each / whole for each in changes)
    yield Figure("change", "of a whole version", shares, target=Target("figure", below=_SHARE_BELOW))
    for name, watches in (("whole", encoding[:1]), ("change", encoding[1:])):
        yield Figure(name, "s to encode", tuple(watch.seconds for watch in watches))
        yield Figure(name, "CPU-s to encode", tuple(watch.cpu_seconds for watch in watches))
    target = new_topic(session, "versions")
    run(_written(target, batches[:1]))
    applying = run(_apply(target, batches[1:]))
    yield Figure("follower", "s to apply a change", tuple(watch.seconds for watch in applying))
    yield Figure("follower", "CPU-s to apply a change", tuple(watch.cpu_seconds for watch in applying))
    label = f"follower of one whole version and {len(changes)} changes"
    ready = [run(_ready(target, parameters)) for _ in range(repeat)]
    seconds_of = tuple(watch.seconds for watch in ready)
    yield Figure(label, "s until it is ready", seconds_of, target=Target("figure", below=_READY_S_BELOW))
    yield Figure(label, "CPU-s until it is ready", tuple(watch.cpu_seconds for watch in ready))


class _Versions:
    """Makes versions of a network, whose features come, change and go."""

    def __init__(self, count: int) -> None:
        self._random = np.random.default_rng(1)
        self._network = Network.from_json(
            {"data": {"indexrange": _INDEX_RANGE}, "model": {"modeltype": "T_FLOAT_SPARSE_LONGKEY"}, "layers": _LAYERS}
        )
        start = self._network.initial_parameters(seed=1)
        self._features = np.unique(self._random.integers(0, _INDEX_RANGE, count))
        self._arrays: dict[str, Array] = {
            name: self._drawn((len(self._features), *array.shape[1:])) if name.endswith(".weight") else array
            for name, array in start.items()
        }

    def _drawn(self, shape: tuple[int, ...]) -> Array:
        return self._random.normal(size=shape).astype(np.float32)

    def next(self) -> dict[str, object]:
        """Return the next version; its arrays are its own."""
        count = len(self._features)
        gone = self._random.choice(count, count // _CHURN, replace=False)
        came = np.setdiff1d(self._random.integers(0, _INDEX_RANGE, count // _CHURN), self._features)
        kept = np.delete(self._features, gone)
        places = kept.searchsorted(came)
        changed = self._random.choice(len(kept), count // _CHANGED, replace=False)
        for name, array in self._arrays.items():
            if name.endswith(".weight"):
                new = np.delete(array, gone, axis=0)
                new[changed] += np.float32(0.01)
                self._arrays[name] = np.insert(new, places, self._drawn((len(came), *array.shape[1:])), axis=0)
        self._features = np.insert(kept, places, came)
        return version_of(self._network, {**self._arrays, "features": self._features})


def _bytes(batch: OutgoingBatch) -> int:
    return sum(len(value) for value in batch.values if value is not None)


async def _written(target: Topic, batches: list[OutgoingBatch]) -> None:
    writer = await target.open_writer()
    for batch in batches:
        await writer.write(batch)
    await writer.flush()
    await writer.close()


async def _apply(target: Topic, batches: list[OutgoingBatch]) -> list[Stopwatch]:
    """Return the time from the flushed write of each change to its version in a follower, without predictions."""
    watches = []
    async with model_updates(target, _MODEL, start="latest_model") as updates:
        await anext(updates)
        for batch in batches:
            await _written(target, [batch])
            with Stopwatch() as watch:
                await anext(updates)
            watches.append(watch)
    return watches


async def _ready(target: Topic, expected: dict[str, object]) -> Stopwatch:
    """Return the time from the start of a served network to its first prediction; check that it is the last version."""
    async with ServedNetwork(target, _MODEL) as served:
        with Stopwatch() as watch:
            await served.ready(timeout_s=60)
            served.predict((_ROW, [1.0] * len(_ROW)))
        update = served.update
    assert update is not None
    assert isinstance(update.parameters, dict)
    for name, value in expected.items():
        assert np.array_equal(np.asarray(update.parameters[name]), np.asarray(value)), name
    return watch
