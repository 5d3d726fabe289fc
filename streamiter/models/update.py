"""What a training operator publishes (:class:`ModelSnapshot`) and a reader gets (:class:`ModelUpdate`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from streamiter.clock import Clock
from streamiter.models.parameters import Parameters

__all__ = ["ModelSnapshot", "ModelUpdate", "Rank"]

Rank = tuple[int, int]
"""Generation and version: updates of one model are ordered by it."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """What a training operator emits when it has more to say than bare parameters.

    ``parameters``: an array, or a dict of names to arrays, numbers and strings. ``records``: how many
    examples the model has learned from so far. ``metrics``: numbers by name, such as the loss.
    ``epoch``: the epoch the model belongs to; left out, the one it is published in.

    >>> ModelSnapshot({"weights": [0.5]}, records=1000, metrics={"loss": 0.31}).records
    1000
    """

    parameters: Any
    records: int | None = None
    metrics: dict[str, float] = {}
    epoch: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelUpdate:
    """One published state of a model, exactly as it was published; its arrays are read-only.

    A *generation* is a run of the publishing flow that began from nothing; within it ``version`` counts
    up by one. ``created_at_ms`` is the publisher's clock, milliseconds since 1970-01-01 UTC; ``epoch``
    and ``records`` are None where the publisher did not say.
    """

    model: str
    generation: int
    version: int
    epoch: int | None
    created_at_ms: int
    records: int | None
    metrics: dict[str, float]
    parameters: Parameters

    @property
    def rank(self) -> Rank:
        """``(generation, version)``: of two updates the one of the higher rank is the newer."""
        return (self.generation, self.version)

    def age_s(self, clock: Clock) -> float:
        """Seconds since it was made; 0 where the publisher's clock is ahead of this one."""
        return max(0, clock.now_ms() - self.created_at_ms) / 1000
