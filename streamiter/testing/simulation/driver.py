"""Who decides, between the turns of a job, what becomes of it."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from typing import Final

from streamiter.testing.simulation.event_loop import Deadlock
from streamiter.testing.simulation.failure import SimulationFailed, where_tasks_wait
from streamiter.testing.simulation.life import Ending, Life, LifeSettings, MakeFlow
from streamiter.testing.simulation.ready import Shuffle
from streamiter.testing.simulation.world import World

__all__ = ["TURNS_AT_A_TIME", "Bounds", "Driver"]

# Turns of the job between two looks of the driver: often enough to hit any of its phases.
TURNS_AT_A_TIME: Final = 16

# What still runs when a job has ended is given so many turns to end as well.
_TURNS_TO_SETTLE: Final = 2_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """After which time, and how many turns, a job without faults must have ended."""

    within_s: float
    turns: int


class Driver:
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
