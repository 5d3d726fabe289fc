"""Deterministic simulation: a flow runs under faults, crashes and restarts that all follow from one seed.

- ``simulate``: what users call; the runs of one job, what disturbs them, and the comparison with an undisturbed run.
- ``life``: one run of the job, in one process or in several.
- ``processes``: the host of several processes, and what happens to them.
- ``world``: what survives a crash (topics, the checkpoint store, time), the inputs, and the checks of the outputs.
- ``network``: the way between a job and the world, with its faults.
- ``sockets``: the connections between the processes of a job, with their faults.
- ``event_loop``: the order in which tasks run.
- ``simulated_time``: time, the trace of a run, and random numbers.
"""

from streamiter.testing.simulated_time import SimulationFailed
from streamiter.testing.simulation.network import Faults
from streamiter.testing.simulation.simulate import SimulationResult, Undisturbed, simulate
from streamiter.testing.simulation.world import Simulation

__all__ = ["Faults", "Simulation", "SimulationFailed", "SimulationResult", "Undisturbed", "simulate"]
