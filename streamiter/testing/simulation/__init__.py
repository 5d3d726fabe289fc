"""Deterministic simulation: a flow under faults, crashes and restarts, all of which follow from one seed.

`event_loop` takes the turns, in simulated time; `topic`, `transactions` and `store` stand between a job and what
survives it (`world`), with the faults of `network` on the way; a `life` is one run of the job, `driver` and
`disturbed` decide what becomes of it, `outputs` says whether what is committed is right.
"""

from streamiter.testing.simulation.life import Simulation
from streamiter.testing.simulation.network import Faults
from streamiter.testing.simulation.simulate import SimulationResult, Undisturbed, simulate
from streamiter.testing.simulation.simulated_time import SimulationFailed

__all__ = ["Faults", "Simulation", "SimulationFailed", "SimulationResult", "Undisturbed", "simulate"]
