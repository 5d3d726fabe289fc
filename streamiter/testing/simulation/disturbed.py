"""The two phases of a simulated run: with faults, then without."""

from __future__ import annotations

import random
from typing import Final

from streamiter.testing.simulation.driver import TURNS_AT_A_TIME, Bounds, Driver
from streamiter.testing.simulation.faults import Faults
from streamiter.testing.simulation.life import Life
from streamiter.testing.simulation.world import World

__all__ = ["Disturbed"]

# A supervisor takes a moment to start a job that has ended.
_RESTART_S_MAX: Final = 5.0

# Jobs are restarted at most so often while there are faults: with a fault in every other call they get nowhere.
_LIVES_MAX: Final = 12

# How often a job that has finished is started once more.
_BEGINS_AGAIN: Final = 0.25

# Turns that a run which was paused takes after another one has begun.
_TURNS_OF_A_PAUSED_RUN: Final = 400


class Disturbed:
    """Ends the job early, again and again; then lets it come to its end."""

    def __init__(self, driver: Driver, faults: Faults, *, turns_undisturbed: int, bounds: Bounds) -> None:
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
