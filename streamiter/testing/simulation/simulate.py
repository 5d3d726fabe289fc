"""Who decides, between the turns of a job, what becomes of it."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from typing import Final

from streamiter.numbers import positive, whole_number
from streamiter.testing.simulation.event_loop import Deadlock, Shuffle
from streamiter.testing.simulation.life import Ending, Life, LifeSettings, MakeFlow
from streamiter.testing.simulation.network import CALM, UNDISTURBED, Faults, drawn_levels
from streamiter.testing.simulation.simulated_time import SimulationFailed, where_tasks_wait
from streamiter.testing.simulation.world import Check, Outputs, World

__all__ = [
    "SimulationResult",
    "Undisturbed",
    "simulate",
]


# Turns of the job between two looks of the driver: often enough to hit any of its phases.
TURNS_AT_A_TIME: Final = 16

# What still runs when a job has ended is given so many turns to end as well.
_TURNS_TO_SETTLE: Final = 2_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """After which time, and how many turns, a job without faults must have ended."""

    within_s: float
    turns: int


class SimulationDriver:
    """Begins lives of a job one after the other, and watches over them."""

    def __init__(self, world: World, name: str, make_flow: MakeFlow, *, settle_s: float) -> None:
        self.world = world
        self.lives: list[Life] = []
        """All that are not disposed of, the latest last."""
        self.begun = 0
        """How many lives there were."""
        self._name = name
        self._make_flow = make_flow
        self._settle_s = settle_s
        self._all_read_since_s: float | None = None

    # -- lives -----------------------------------------------------------------------------------------

    def begin(self, settings: LifeSettings) -> Life:
        """Start the job, from its last checkpoint if it has one."""
        self.begun += 1
        self._all_read_since_s = None
        life = Life(self.world, self.begun, self._make_flow, settings)
        self.lives.append(life)
        return life

    def drawn_settings(self, chosen: random.Random) -> LifeSettings:
        """Settings that must make no difference."""
        interval_s = chosen.choice([0.01, 0.03, 0.1, 0.3, 1.0])
        alignment_timeout_s = chosen.choice([0.3, 5.0, 60.0])
        return LifeSettings(
            shuffle=Shuffle(chosen.getrandbits(64), chosen.choice([0, 2, 8, 32])),
            channel_records=chosen.choice([1, 2, 4, 16, 64, 8192]),
            interval_s=interval_s,
            keep=chosen.randint(1, 3),
            alignment_timeout_s=alignment_timeout_s,
            transaction_timeout_s=interval_s + alignment_timeout_s + chosen.choice([1.0, 10.0, 300.0]),
        )

    def go_on(self, life: Life, turns: int = TURNS_AT_A_TIME) -> None:
        """Let a life take some turns. Raises SimulationFailed for whatever is found to be wrong."""
        try:
            life.go_on(turns)
        except Deadlock:
            self.fail("nothing is ready and no timer is set, but the job has not ended", life)
        self.check()
        self._drain_if_read(life)

    def _drain_if_read(self, life: Life) -> None:
        """Tell a job without an end of its own, once it has read everything, that this is the end."""
        if not life.goes_on_for_ever or not life.has_read_all:
            self._all_read_since_s = None
            return
        now_s = self.world.time.now_s
        if self._all_read_since_s is None:
            self._all_read_since_s = now_s
        if now_s - self._all_read_since_s >= self._settle_s:
            life.stop("drain")

    def end(self, life: Life) -> Ending:
        """Clear up behind a job that has ended by itself; says how it has."""
        try:
            ending = life.ending()
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            raise self._failure(f"run {life.number} fails, and no fault has led to that:\n{told}") from error
        self._check_left_nothing(life)
        self.drop(life)
        return ending

    def _check_left_nothing(self, life: Life) -> None:
        loop, until = life.loop, self.world.trace.turns + _TURNS_TO_SETTLE
        loop.run(lambda: loop.is_quiet or self.world.trace.turns >= until)
        if loop.unfinished:
            self.fail(f"run {life.number} has ended and leaves tasks behind", life)
        if loop.errors:
            self.fail(f"run {life.number} has ended with exceptions that nobody has looked at: {loop.errors}")

    def drop(self, life: Life) -> None:
        """Let go of it."""
        self.lives.remove(life)
        life.dispose()

    def crash(self, life: Life) -> None:
        """It ends between two turns."""
        self.lives.remove(life)
        life.crash()

    def drop_all(self) -> None:
        """Let go of all that still live."""
        for life in list(self.lives):
            self.drop(life)

    # -- the end ---------------------------------------------------------------------------------------

    def complete(self, life: Life, bounds: Bounds) -> Ending:
        """Let it come to its end by itself, within bounds."""
        until_s = self.world.time.now_s + bounds.within_s
        until_turns = self.world.trace.turns + bounds.turns
        while not life.is_over:
            self.go_on(life)
            if self.world.time.now_s > until_s:
                self.fail(f"run {life.number} has not ended {bounds.within_s:g} s after the last fault", life)
            if self.world.trace.turns > until_turns:
                self.fail(f"run {life.number} has not ended {bounds.turns} turns after the last fault", life)
        return self.end(life)

    def check(self) -> None:
        """Raise SimulationFailed if something was found to be wrong."""
        if self.world.violation is not None:
            self.fail(self.world.violation)

    def fail(self, what: str, life: Life | None = None) -> None:
        """Raise SimulationFailed; with where the tasks of a life wait."""
        if life is not None:
            what = "\n".join([what + ":", *(f"  {line}" for line in where_tasks_wait(life.loop.unfinished))])
        raise self._failure(what)

    def _failure(self, what: str) -> SimulationFailed:
        trace = self.world.trace
        return SimulationFailed(self._name, self.world.seed, what, trace_hash=trace.hash, events=trace.events)


# A supervisor takes a moment to start a job that has ended.
_RESTART_S_MAX: Final = 5.0

# Jobs are restarted at most so often while there are faults: with a fault in every other call they get nowhere.
_LIVES_MAX: Final = 12

# How often a job that has finished is started once more.
_BEGINS_AGAIN: Final = 0.25

# Turns that a run which was paused takes after another one has begun.
_TURNS_OF_A_PAUSED_RUN: Final = 400


class Disturbed:
    """Ends the job early, again and again; then lets it come to its end.

    The two phases of a simulated run: with faults, then without.
    """

    def __init__(
        self, driver: SimulationDriver, faults: Faults, *, turns_undisturbed: int, bounds: Bounds
    ) -> None:
        self._driver = driver
        self._world: World = driver.world
        self._random: random.Random = driver.world.random
        self._turns_undisturbed = turns_undisturbed
        self._bounds = bounds
        self._endings_left = self._random.randint(0, faults.crashes)
        # Under some seeds runs hardly get beyond their start, under others most of the work is done by one.
        self._life_turns_max = max(1, int(turns_undisturbed * self._random.choice([0.1, 0.3, 1.0])))
        self._life: Life | None = None
        self._ends_at: int | None = None
        """The turn at which the life is ended early."""
        self._paused: Life | None = None

    def run(self) -> None:
        """All of it. Raises SimulationFailed."""
        has_finished = self._with_faults()
        self._heal()
        if not has_finished:
            self._come_to_the_end()
        self._world.look(is_complete=True)
        self._driver.check()
        if self._random.random() < _BEGINS_AGAIN:
            self._begin_what_has_finished()

    # -- with faults -----------------------------------------------------------------------------------

    def _with_faults(self) -> bool:
        """Says whether the job has come to its end nevertheless."""
        until = int(self._turns_undisturbed * self._random.uniform(0.3, 2.5))
        while self._world.trace.turns < until and self._driver.begun < _LIVES_MAX:
            if self._life is None:
                self._begin()
            assert self._life is not None
            turns = TURNS_AT_A_TIME if self._ends_at is None else self._ends_at - self._world.trace.turns
            self._driver.go_on(self._life, min(turns, TURNS_AT_A_TIME))
            self._disturb_from_outside(self._life)
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
            self._world.network.event(f"run {life.number} is paused")
            life.was_paused = True
            self._paused, self._life = life, None
        elif how in ("suspend", "abort") and life.job is not None and not life.is_stopping:
            life.stop("suspend" if how == "suspend" else "abort")
            # It may crash while it stops.
            self._ends_at = self._world.trace.turns + self._random.randint(1, 1000)
        else:
            self._driver.crash(life)
            self._life = None

    def _disturb_from_outside(self, life: Life) -> None:
        network = self._world.network
        if network.draws(network.levels.fenced * TURNS_AT_A_TIME) and not life.is_over:
            life.lose_transactions()
        if self._paused is not None and self._random.random() < 0.05:
            self._resume(self._paused)

    def _resume(self, paused: Life) -> None:
        """A run that did not know that it was thought dead; another has taken over."""
        self._paused = None
        self._world.network.event(f"run {paused.number} goes on after a pause")
        until = self._world.trace.turns + self._random.randint(1, _TURNS_OF_A_PAUSED_RUN)
        while not paused.is_over and self._world.trace.turns < until:
            self._driver.go_on(paused)
        if paused.is_over:
            self._driver.end(paused)
        else:
            self._driver.crash(paused)

    # -- without ---------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self._world.network.event("no faults from now on")
        self._world.network.heal()
        if self._paused is not None:
            self._driver.crash(self._paused)
            self._paused = None

    def _come_to_the_end(self) -> None:
        # What it met before may still end the run that is there, but not the one after it.
        if self._life is not None and self._driver.complete(self._life, self._bounds) == "finished":
            return
        life = self._driver.begin(self._driver.drawn_settings(self._random))
        if (ending := self._driver.complete(life, self._bounds)) != "finished":
            self._driver.fail(
                f"run {life.number}, after the last fault: expected it to finish, and it {ending}"
            )

    def _begin_what_has_finished(self) -> None:
        """The job of an end that is committed has nothing left to do."""
        life = self._driver.begin(self._driver.drawn_settings(self._random))
        if (ending := self._driver.complete(life, self._bounds)) != "finished":
            self._driver.fail(f"run {life.number}, of a job that had finished: it {ending}")
        self._world.look(is_complete=True)
        self._driver.check()


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

    Running a flow under a seed: first faults and safety checks, then healing and liveness checks.
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
    driver = SimulationDriver(world, name, flow, settle_s=settle_s)
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
    driver = SimulationDriver(world, f"{name}, undisturbed", flow, settle_s=settle_s)
    try:
        life = driver.begin(_CALMLY)
        if (ending := driver.complete(life, Bounds(within_s, _TURNS_MAX))) != "finished":
            driver.fail(f"expected it to finish, and it {ending}")
        world.look()
        driver.check()
    finally:
        driver.drop_all()
    return Undisturbed(world.committed.records, world.trace.turns)
