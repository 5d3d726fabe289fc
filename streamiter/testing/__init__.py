"""What users need to test their flows."""

from streamiter.testing.clock import VirtualClock
from streamiter.testing.simulation import (
    Faults,
    Simulation,
    SimulationFailed,
    SimulationResult,
    Undisturbed,
    simulate,
)

__all__ = [
    "Faults",
    "Simulation",
    "SimulationFailed",
    "SimulationResult",
    "Undisturbed",
    "VirtualClock",
    "simulate",
]
