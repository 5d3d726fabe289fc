"""Running a flow under a seed: first with faults, for safety checks, then without, for liveness checks.

``simulate`` runs the flow once undisturbed and once under a seed. The ``SimulationDriver`` starts lives and checks
them. ``DisturbedRun`` decides, between turns of
the event loop, when a life ends early, and lets the last one finish.
"""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from typing import Final

from streamiter.engine.storage.store import Checkpoints
from streamiter.testing.simulated_time import SimulationFailed, where_tasks_wait
from streamiter.testing.simulation.event_loop import Deadlock, Shuffle
from streamiter.testing.simulation.life import CALM_SETTINGS, Ending, Life, LifeSettings
from streamiter.testing.simulation.network import CALM, UNDISTURBED, Faults, drawn_levels
from streamiter.testing.simulation.world import CheckOutputs, MakeFlow, OutputRecords, World
from streamiter.values.numbers import positive, whole_number
from streamiter.values.records import BATCH_RECORDS
from streamiter.values.times import Seconds, in_seconds


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulated run without findings."""

    seed: int
    """The seed of the run."""
    trace_hash: str
    """The hash of every decision; equal for equal seeds."""
    turns: int
    """The count of turns of tasks."""
    elapsed_s: float
    """Simulated seconds."""
    runs: int
    """The count of starts of the job."""
    outputs: OutputRecords
    """Committed records by topic."""
    undisturbed: Undisturbed


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The results of one run without faults."""

    outputs: OutputRecords
    """Committed records by topic."""
    turns: int
    """Turns of tasks."""


def simulate(
    flow: MakeFlow,
    seed: int,
    *,
    processes: int = 1,
    faults: Faults | None = None,
    check: CheckOutputs | None = None,
    within_s: Seconds = 600.0,
    settle_s: Seconds = 0.0,
    has_store: bool = True,
    undisturbed: Undisturbed | None = None,
) -> SimulationResult:
    """Run a flow under the faults of a seed, and compare its committed outputs with those of an undisturbed run.

    ``flow`` builds the flow from the topics of a :class:`Simulation`; it is called again for each start. Everything
    happens in simulated time, in one thread, and follows from the seed: the order of ready tasks, the cuts of batches,
    the sizes of channels, the calls of topics and of the checkpoint store that are late or fail, and when the job
    crashes (at any ``await``), is paused, suspended or stopped. It restarts from its last checkpoint.

    In the first phase, with ``faults``, the committed records must at any time be a part of those of the undisturbed
    run: in order, without gaps, and without duplicates. In the second phase, without faults, the flow must finish
    within ``within_s`` simulated seconds, with exactly the outputs of the undisturbed run. A flow without an end of its
    own is drained after it has read all inputs and has waited for another ``settle_s`` seconds.

    A crash shows a state that ``snapshot`` forgets only if a checkpoint happens between records. So feed the records
    over a few seconds, ``simulation.input(…, over_s=5)``, and run some dozens of seeds. Do not use ``stop="latest"``
    then: the source would end at the records that have arrived at its start, which differ from run to run.

    With ``processes=3``, each start of the job has one to three processes, as with ``flow.run(on=…)``; the undisturbed
    run has one. Records and messages between processes arrive late and in pieces. Processes die, and connections are
    cut or carry nothing for a while.

    ``check`` is called with the committed records of all outputs after each commit, also in the undisturbed run.
    ``has_store=False`` is for a flow without state, whose sources have ``start="committed"``: no checkpoint is stored.

    ``undisturbed`` is the undisturbed run of an earlier result, for flows whose inputs do not depend on the seed.

    Raises :class:`SimulationFailed`, which names the seed: the same seed repeats exactly the same run.

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
    whole_number("simulate: processes", processes, 1)
    within_s, settle_s = positive("simulate: within_s", in_seconds(within_s)), in_seconds(settle_s)
    name = getattr(flow, "__name__", type(flow).__name__)
    if undisturbed is None:
        undisturbed = _undisturbed(flow, name, seed, check, within_s=within_s, settle_s=settle_s, has_store=has_store)
    faults = Faults() if faults is None else faults
    world = World(seed, CALM, expected=undisturbed.outputs, check=check)
    world.network.levels = drawn_levels(faults, world.random, processes)
    world.network.event(f"seed {seed}: {world.network.levels}")
    driver = SimulationDriver(world, name, flow, settle_s=settle_s, has_store=has_store, processes=processes)
    expected_turns = undisturbed.turns * (1 if processes == 1 else _TIMES_ONE_PROCESS)
    turns = max(_TURNS_AT_LEAST, _TIMES_UNDISTURBED * expected_turns)
    try:
        DisturbedRun(driver, faults, turns_undisturbed=expected_turns, bounds=Bounds(within_s, turns)).run()
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
    flow: MakeFlow,
    name: str,
    seed: int,
    check: CheckOutputs | None,
    *,
    within_s: float,
    settle_s: float,
    has_store: bool,
) -> Undisturbed:
    world = World(seed, UNDISTURBED, expected=None, check=check)
    driver = SimulationDriver(world, f"{name}, undisturbed", flow, settle_s=settle_s, has_store=has_store)
    try:
        life = driver.begin(CALM_SETTINGS)
        if (ending := driver.complete(life, Bounds(within_s, _TURNS_MAX))) != "finished":
            driver.fail(f"expected it to finish, and it {ending}")
        world.look()
        driver.check()
    finally:
        driver.drop_all()
    return Undisturbed(world.committed.records, world.trace.turns)


# An undisturbed flow that takes more turns never ends, or is too large for a simulation.
_TURNS_MAX: Final = 200_000
# Turns that a flow may take after the last fault: a multiple of its turns undisturbed, and at least this many.
_TIMES_UNDISTURBED: Final = 30
_TURNS_AT_LEAST: Final = 20_000
# Turns in several processes, compared with one: messages and pieces of bytes take turns, too.
_TIMES_ONE_PROCESS: Final = 3
# The longest time that a supervisor takes to restart a job.
_RESTART_S_MAX: Final = 5.0
# The most starts of the job while there are faults: with many faults each life ends early.
_LIVES_MAX: Final = 12
# The probability that a finished job is started again.
_BEGIN_AGAIN_PROBABILITY: Final = 0.25
# The most turns of a paused run after another one has started.
_TURNS_OF_A_PAUSED_RUN: Final = 400


class DisturbedRun:
    """The two phases of a simulated run: with faults, in which lives end early; then without, to the end."""

    def __init__(self, driver: SimulationDriver, faults: Faults, *, turns_undisturbed: int, bounds: Bounds) -> None:
        self._driver = driver
        self._world: World = driver.world
        self._random: random.Random = driver.world.random
        self._turns_undisturbed = turns_undisturbed
        self._bounds = bounds
        self._endings_left = self._random.randint(0, faults.crashes)
        # Under some seeds lives end soon after their start; under others one life does most of the work.
        self._life_turns_max = max(1, int(turns_undisturbed * self._random.choice([0.1, 0.3, 1.0])))
        self._life: Life | None = None
        self._ends_at: int | None = None
        """The turn at which the life ends early."""
        self._paused: Life | None = None

    def run(self) -> None:
        """Run both phases. Raises SimulationFailed."""
        has_finished = self._with_faults()
        self._heal()
        if not has_finished:
            self._finish()
        self._world.look(is_complete=True)
        self._driver.check()
        if self._random.random() < _BEGIN_AGAIN_PROBABILITY:
            self._begin_again()

    # -- with faults -----------------------------------------------------------------------------------

    def _with_faults(self) -> bool:
        """Run the phase with faults; return whether the job has finished in it."""
        until = int(self._turns_undisturbed * self._random.uniform(0.3, 2.5))
        while self._world.trace.turns < until and self._driver.begun < _LIVES_MAX:
            if self._life is None:
                self._begin()
            assert self._life is not None
            turns = TURNS_AT_A_TIME if self._ends_at is None else self._ends_at - self._world.trace.turns
            self._driver.take_turns(self._life, min(turns, TURNS_AT_A_TIME))
            self._disturb(self._life)
            if self._life.is_over:
                if self._driver.end(self._life) == "finished":
                    self._life = None
                    return True
                self._life = None
            elif self._ends_at is not None and self._world.trace.turns >= self._ends_at:
                self._end_early(self._life)
        return False

    def _begin(self) -> None:
        if self._driver.begun:
            self._world.time.pass_until(self._world.time.now_s + self._random.random() * _RESTART_S_MAX)
        self._life = self._driver.begin(self._driver.drawn_settings(self._random))
        self._ends_at = None
        if self._endings_left:
            self._endings_left -= 1
            self._ends_at = self._world.trace.turns + self._random.randint(1, self._life_turns_max)

    def _end_early(self, life: Life) -> None:
        how = self._random.choice(["crash", "crash", "pause", "suspend", "abort"])
        if how == "pause" and self._paused is None:
            life.pause()
            self._paused, self._life = life, None
        elif how in ("suspend", "abort") and life.can_stop:
            life.stop("suspend" if how == "suspend" else "abort")
            # The life may crash while it stops.
            self._ends_at = self._world.trace.turns + self._random.randint(1, 1000)
        else:
            self._driver.crash(life)
            self._life = None

    def _disturb(self, life: Life) -> None:
        network = self._world.network
        if network.draws(network.levels.fenced * TURNS_AT_A_TIME) and not life.is_over:
            life.lose_transactions()
        if network.draws(network.levels.lost * TURNS_AT_A_TIME) and not life.is_over:
            life.disturb()
        if self._paused is not None and self._random.random() < 0.05:
            self._resume(self._paused)

    def _resume(self, paused: Life) -> None:
        """Continue a paused life, after another life has taken over."""
        self._paused = None
        self._world.network.event(f"run {paused.number} resumes after a pause")
        if self._life is not None:
            self._life.miss_turns()
        until = self._world.trace.turns + self._random.randint(1, _TURNS_OF_A_PAUSED_RUN)
        while not paused.is_over and self._world.trace.turns < until:
            self._driver.take_turns(paused)
        if paused.is_over:
            self._driver.end(paused)
        else:
            self._driver.crash(paused)

    # -- without ---------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self._world.network.event("no faults from now on")
        self._world.network.heal()
        self._world.sockets.heal()
        if self._paused is not None:
            self._driver.crash(self._paused)
            self._paused = None

    def _finish(self) -> None:
        # Earlier faults may still end the current life, but not the next one.
        if self._life is not None and self._driver.complete(self._life, self._bounds) == "finished":
            return
        life = self._driver.begin(self._driver.drawn_settings(self._random))
        if (ending := self._driver.complete(life, self._bounds)) != "finished":
            self._driver.fail(f"run {life.number}, after the last fault: expected it to finish, and it {ending}")

    def _begin_again(self) -> None:
        """Start a finished job again: it must finish at once, without new records."""
        life = self._driver.begin(self._driver.drawn_settings(self._random))
        if (ending := self._driver.complete(life, self._bounds)) != "finished":
            self._driver.fail(f"run {life.number}, of a job that had finished: it {ending}")
        self._world.look(is_complete=True)
        self._driver.check()


# Turns of the job between two decisions of the driver: few enough to hit each of its phases.
TURNS_AT_A_TIME: Final = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits within which a job without faults must end."""

    within_s: float
    """Simulated seconds."""
    turns: int
    """Turns of tasks."""


class SimulationDriver:
    """Starts the lives of a job, and checks each of them."""

    def __init__(
        self, world: World, name: str, make_flow: MakeFlow, *, settle_s: float, has_store: bool, processes: int = 1
    ) -> None:
        self.world = world
        self.lives: list[Life] = []
        """The lives that are not disposed of, the latest last."""
        self.begun = 0
        """The count of lives so far."""
        self._name = name
        self._make_flow = make_flow
        self._settle_s = settle_s
        self._has_store = has_store
        self._processes = processes
        self._all_read_since_s: float | None = None

    # -- lives -----------------------------------------------------------------------------------------

    def begin(self, settings: LifeSettings) -> Life:
        """Start the job, from its last checkpoint if there is one."""
        self.begun += 1
        self._all_read_since_s = None
        life = Life(self.world, self.begun, self._make_flow, settings, has_store=self._has_store)
        self.lives.append(life)
        return life

    def drawn_settings(self, chosen: random.Random) -> LifeSettings:
        """Draw settings that must not change the result."""
        interval_s = chosen.choice([0.01, 0.03, 0.1, 0.3, 1.0])
        alignment_timeout_s = chosen.choice([0.3, 5.0, 60.0])
        return LifeSettings(
            shuffle=Shuffle(chosen.getrandbits(64), chosen.choice([0, 2, 8, 32])),
            channel_records=chosen.choice([1, 2, 4, 16, 64, BATCH_RECORDS]),
            checkpoints=Checkpoints(
                interval_s=interval_s,
                keep=chosen.randint(1, 3),
                alignment_timeout_s=alignment_timeout_s,
                transaction_timeout_s=interval_s + alignment_timeout_s + chosen.choice([1.0, 10.0, 300.0]),
            ),
            processes=1 if self._processes == 1 else chosen.randint(1, self._processes),
        )

    def take_turns(self, life: Life, turns: int = TURNS_AT_A_TIME) -> None:
        """Let a life take some turns; raise SimulationFailed for a finding."""
        try:
            life.take_turns(turns)
        except Deadlock:
            self.fail("nothing is ready and no timer is set, but the job has not ended", life)
        self.check()
        self._drain_if_read(life)

    def _drain_if_read(self, life: Life) -> None:
        """Drain a job without an end of its own after it has read all records."""
        if not life.is_unbounded or not life.has_read_all:
            self._all_read_since_s = None
            return
        now_s = self.world.time.now_s
        if self._all_read_since_s is None:
            self._all_read_since_s = now_s
        if now_s - self._all_read_since_s >= self._settle_s:
            life.stop("drain")

    def end(self, life: Life) -> Ending:
        """Dispose of a job that has ended by itself; return how it has ended."""
        try:
            ending = life.ending()
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            raise self._failure(f"run {life.number} fails, and no fault has led to that:\n{told}") from error
        if (left := life.left()) is not None:
            raise self._failure(f"run {life.number} has ended and {left}")
        self.drop(life)
        return ending

    def drop(self, life: Life) -> None:
        self.lives.remove(life)
        life.dispose()

    def crash(self, life: Life) -> None:
        """Crash a life between two turns."""
        self.lives.remove(life)
        life.crash()

    def drop_all(self) -> None:
        for life in list(self.lives):
            self.drop(life)

    # -- the end ---------------------------------------------------------------------------------------

    def complete(self, life: Life, bounds: Bounds) -> Ending:
        """Let a life end by itself, within bounds; return how it has ended."""
        until_s = self.world.time.now_s + bounds.within_s
        until_turns = self.world.trace.turns + bounds.turns
        while not life.is_over:
            self.take_turns(life)
            if self.world.time.now_s > until_s:
                self.fail(f"run {life.number} has not ended {bounds.within_s:g} s after the last fault", life)
            if self.world.trace.turns > until_turns:
                self.fail(f"run {life.number} has not ended {bounds.turns} turns after the last fault", life)
        return self.end(life)

    def check(self) -> None:
        """Raise SimulationFailed if there is a finding."""
        if self.world.violation is not None:
            self.fail(self.world.violation)

    def fail(self, what: str, life: Life | None = None) -> None:
        """Raise SimulationFailed, with the places where the tasks of a life wait."""
        if life is not None:
            what = "\n".join([what + ":", *(f"  {line}" for line in where_tasks_wait(life.unfinished))])
        raise self._failure(what)

    def _failure(self, what: str) -> SimulationFailed:
        trace = self.world.trace
        return SimulationFailed(self._name, self.world.seed, what, trace_hash=trace.hash, events=trace.events)
