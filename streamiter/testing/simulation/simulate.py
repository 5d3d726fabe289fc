"""Running a flow under a seed: first faults and safety checks, then healing and liveness checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamiter.numbers import positive, whole_number
from streamiter.testing.simulation.disturbed import Disturbed
from streamiter.testing.simulation.driver import Bounds, Driver
from streamiter.testing.simulation.faults import CALM, UNDISTURBED, Faults, drawn_levels
from streamiter.testing.simulation.life import LifeSettings, MakeFlow
from streamiter.testing.simulation.ready import Shuffle
from streamiter.testing.simulation.world import Check, Outputs, World

__all__ = ["SimulationResult", "Undisturbed", "simulate"]

# An undisturbed flow that takes more turns than this is in a circle, or too large for a simulation.
_TURNS_MAX: Final = 200_000

# Turns that a flow may take after the last fault, as a multiple of those it takes undisturbed, and at least.
_TIMES_UNDISTURBED: Final = 30
_TURNS_AT_LEAST: Final = 20_000

_CALMLY: Final = LifeSettings(
    shuffle=Shuffle(0, 0),
    channel_records=8192,
    interval_s=1.0,
    keep=3,
    alignment_timeout_s=60.0,
    transaction_timeout_s=300.0,
)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a flow commits in one run in which nothing goes wrong, and how many turns that takes."""

    outputs: Outputs
    turns: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A simulated run in which nothing was found."""

    seed: int
    trace_hash: str
    """Of every decision that was taken; equal for equal seeds."""
    turns: int
    """Turns of tasks in all."""
    elapsed_s: float
    """Simulated seconds."""
    runs: int
    """How often the job was started."""
    outputs: Outputs
    """Committed records by topic."""
    undisturbed: Undisturbed


def simulate(
    flow: MakeFlow,
    seed: int,
    *,
    faults: Faults | None = None,
    check: Check | None = None,
    within_s: float = 600.0,
    settle_s: float = 0.0,
    undisturbed: Undisturbed | None = None,
) -> SimulationResult:
    """Run a flow with all that may go wrong under this seed, and compare it with an undisturbed run.

    ``flow`` builds it from the topics of a :class:`Simulation`, again for each start. All happens in simulated time, in
    one thread, and follows from the seed: which of the tasks that are ready runs next, where batches are cut, how small
    channels are, when the job crashes (at any ``await``), is paused, suspended or stopped, which calls of topics
    and of the checkpoint store are late or fail. It restarts from its last checkpoint.

    While there are ``faults``, what readers of committed records see must at any time be a part of what the
    undisturbed run has committed, in order, nothing missing in between and nothing twice. Then nothing goes wrong any
    more: within ``within_s`` simulated seconds the flow must finish, with just those outputs. Flows without an end of
    their own are drained when they have read all inputs, and then nothing has come for ``settle_s`` seconds.

    Crashes find what ``snapshot`` forgets only where a checkpoint falls between records. So let them come over a few
    seconds, ``simulation.input(…, over_s=5)``, and run some dozens of seeds; one alone proves little. Leave out
    ``stop="latest"`` then: the source would end with what has come when it starts, another amount in each run.

    ``check`` is called with the committed records of all outputs after each commit, in the undisturbed run, too.
    ``undisturbed`` is that of an earlier result, for flows whose inputs do not depend on the seed.

    Raises :class:`SimulationFailed`, which names the seed: running it again does exactly the same.

    >>> from streamiter import Flow
    >>> def totals(simulation):
    ...     flow = Flow("totals")
    ...     orders = flow.source(simulation.input("orders", [3, 1, 4, 1, 5], over_s=5))
    ...     orders.key_by(lambda x: x % 2).reduce(lambda a, b: a + b, name="total").sink(simulation.output("totals"))
    ...     return flow
    >>> for seed in range(3):
    ...     result = simulate(totals, seed)
    >>> [record.value for record in result.outputs["totals"]]
    [b'3', b'4', b'4', b'5', b'10']
    """
    whole_number("simulate: seed", seed, 0)
    positive("simulate: within_s", within_s)
    name = getattr(flow, "__name__", type(flow).__name__)
    if undisturbed is None:
        undisturbed = _undisturbed(flow, name, seed, check, within_s=within_s, settle_s=settle_s)
    faults = Faults() if faults is None else faults
    world = World(seed, CALM, expected=undisturbed.outputs, check=check)
    world.network.levels = drawn_levels(faults, world.random)
    world.network.event(f"seed {seed}: {world.network.levels}")
    driver = Driver(world, name, flow, settle_s=settle_s)
    turns = max(_TURNS_AT_LEAST, _TIMES_UNDISTURBED * undisturbed.turns)
    try:
        Disturbed(driver, faults, turns_undisturbed=undisturbed.turns, bounds=Bounds(within_s, turns)).run()
    finally:
        driver.drop_all()
    return SimulationResult(
        seed=seed,
        trace_hash=world.trace.hash,
        turns=world.trace.turns,
        elapsed_s=world.time.now_s,
        runs=driver.begun,
        outputs=world.committed.records,
        undisturbed=undisturbed,
    )


def _undisturbed(
    flow: MakeFlow, name: str, seed: int, check: Check | None, *, within_s: float, settle_s: float
) -> Undisturbed:
    world = World(seed, UNDISTURBED, expected=None, check=check)
    driver = Driver(world, f"{name}, undisturbed", flow, settle_s=settle_s)
    try:
        life = driver.begin(_CALMLY)
        if (ending := driver.complete(life, Bounds(within_s, _TURNS_MAX))) != "finished":
            driver.fail(f"expected it to finish, and it {ending}")
        world.look()
        driver.check()
    finally:
        driver.drop_all()
    return Undisturbed(world.committed.records, world.trace.turns)
