"""The testing kit for users: a virtual clock, checks that a restored flow continues exactly, and simulated faults."""

from streamiter.testing.restore import RestoreMismatch, RestoreProcess, check_flow_restore, check_restore
from streamiter.testing.simulated_time import VirtualClock
from streamiter.testing.simulation import Faults, Simulation, SimulationFailed, SimulationResult, Undisturbed, simulate

__all__ = [
    "Faults",
    "RestoreMismatch",
    "RestoreProcess",
    "Simulation",
    "SimulationFailed",
    "SimulationResult",
    "Undisturbed",
    "VirtualClock",
    "check_flow_restore",
    "check_restore",
    "simulate",
]
