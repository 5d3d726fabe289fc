"""What may go wrong in a simulation, and how much of it does under one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Final

from streamiter.errors import StorageFull, TopicUnavailable
from streamiter.numbers import whole_number

__all__ = ["Faults", "Levels", "SimulatedStorageFull", "SimulatedUnavailable", "drawn_levels"]

# Below the connectors' own deadlines most calls are a little slow; now and then one takes as long as an election.
_SLOW_S_MAX: Final = 2.0

# Longer than sessions and transactions of a simulation last, so that they expire.
_STUCK_S_MAX: Final = 120.0


class SimulatedUnavailable(TopicUnavailable):
    """A fault: the call failed, before or after it took effect."""


class SimulatedStorageFull(StorageFull):
    """A fault: the store had no room."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What may go wrong in the first phase of a simulation; each seed chooses out of it.

    >>> Faults(fenced=False, crashes=1).crashes
    1
    """

    crashes: int = 5
    """At most so many times the job ends early: by a crash, a stop or a pause after which another run has begun."""
    slow: bool = True
    """Calls of topics and of the store take up to seconds."""
    stuck: bool = True
    """For up to two minutes, no call comes back."""
    failing: bool = True
    """Calls fail, before or after they took effect: a commit may have succeeded although an error was raised."""
    duplicates: bool = True
    """Writes outside transactions are stored twice, as by a retry whose first answer was lost."""
    fenced: bool = True
    """Another owner opens the job's transactions."""
    storage_full: bool = True
    """The store has no room for a snapshot."""

    def __post_init__(self) -> None:
        whole_number("Faults: crashes", self.crashes, 0)

    @classmethod
    def none(cls) -> Faults:
        """Nothing goes wrong; tasks still run in shuffled order, and batches are cut at random."""
        switches = {field.name: False for field in fields(cls) if field.name != "crashes"}
        return cls(crashes=0, **switches)


@dataclass(frozen=True, slots=True)
class Levels:
    """How likely each fault is, for a call."""

    slow: float = 0.0
    slow_s_max: float = 0.0
    stuck: float = 0.0
    stuck_s_max: float = 0.0
    failing: float = 0.0
    duplicates: float = 0.0
    fenced: float = 0.0
    """For each turn of the job in which it could be."""
    storage_full: float = 0.0
    cuts_batches: bool = True
    """Whether what is read comes in pieces of random size."""


CALM: Final = Levels()
UNDISTURBED: Final = Levels(cuts_batches=False)


def drawn_levels(faults: Faults, chosen: random.Random) -> Levels:
    """The levels of one seed.

    Each kind is left out by half of the seeds: what hides behind a fault that ends every run early is found by the
    seeds without it (Groce et al., "Swarm testing", ISSTA 2012).
    """

    def level(wanted: bool, highest: float) -> float:
        drawn = chosen.random() < 0.5, chosen.random()
        return highest * drawn[1] if wanted and drawn[0] else 0.0

    return Levels(
        slow=level(faults.slow, 0.5),
        slow_s_max=_SLOW_S_MAX * chosen.choice([0.01, 0.1, 1.0]),
        stuck=level(faults.stuck, 0.01),
        stuck_s_max=_STUCK_S_MAX * chosen.random(),
        failing=level(faults.failing, 0.02),
        duplicates=level(faults.duplicates, 0.5),
        fenced=level(faults.fenced, 0.002),
        storage_full=level(faults.storage_full, 0.3),
    )
