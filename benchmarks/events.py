"""Make the events that the Kafka benchmarks read: rows of a linear regression as JSON, about 100 bytes each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap
from struct import Struct

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

__all__ = ["FEATURES", "TRUE_WEIGHTS", "Event", "PackedEvent", "make_events", "packed_features"]

FEATURES = 10
TRUE_WEIGHTS: npt.NDArray[np.float64] = np.linspace(-1.0, 1.0, FEATURES)
_CHUNK = 10_000


class Event(msgspec.Struct, gc=False):
    """The schema of an event."""

    id: int
    x: list[float]
    y: float


class PackedEvent(msgspec.Struct, gc=False):
    """The same schema for the best code by hand: msgspec decodes a tuple in two thirds of the time of a list."""

    id: int
    x: tuple[(float,) * FEATURES]  # type: ignore[misc]
    y: float


_ROW = Struct(f"={FEATURES}d")


def packed_features(events: Sequence[PackedEvent]) -> npt.NDArray[np.float64]:
    """Return the features of some events: packing takes half the time of ``np.array``."""
    packed = b"".join(starmap(_ROW.pack, [event.x for event in events]))
    return np.frombuffer(packed).reshape(len(events), FEATURES)


def make_events(count: int) -> Iterator[bytes]:
    """Return events ``{"id", "x": [10 floats], "y"}`` in the order of their ids, the same in each call."""
    generator = np.random.default_rng(seed=7)
    for first in range(0, count, _CHUNK):
        size = min(_CHUNK, count - first)
        features = np.round(generator.normal(size=(size, FEATURES)), 3)
        targets = np.round(features @ TRUE_WEIGHTS + 0.1 * generator.normal(size=size), 3)
        rows = zip(range(first, first + size), features.tolist(), targets.tolist(), strict=True)
        for number, x, y in rows:
            yield orjson.dumps({"id": number, "x": x, "y": y})
