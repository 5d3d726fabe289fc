"""Kill a program several times while events arrive, and restart it each time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from crash.deaths import AtPlace, Death, Running, deaths
from crash.feed import Feed
from crash.places import Place
from crash.programs import Program, running

__all__ = ["KilledProgram"]


@dataclass(frozen=True)
class KilledProgram:
    """One program and its deaths; ``seed`` chooses the deaths, and ``commit`` has the places of commits.

    ``last`` is the program with the option that makes it end after all events.
    """

    program: Program
    last: Program
    feed: Feed
    seed: int
    commit: Sequence[Place]

    async def kill_and_finish(self, kills: int) -> None:
        """Kill the program this many times, and then run it to its end. An error contains all deaths so far."""
        history = [f"seed {self.seed}, {kills} kills; again: STREAMITER_CRASH_KILLS={kills} make soak SEED={self.seed}"]
        try:
            start_s = 1.0
            for number, planned in enumerate(deaths(kills, Random(self.seed), self.commit)):
                death = self._possible(planned)
                history.append(f"{number}: {death}")
                start_s = await self._life(death, kills - number - 1, start_s)
            await self.feed.rest()
            async with running(self.last) as process:
                code, printed = await process.ends()
            assert code == 0, f"ended with {code}: {printed}"
        except BaseException as error:
            error.add_note("\n".join(history))
            raise

    def _possible(self, death: Death) -> Death:
        is_too_early = isinstance(death, AtPlace) and death.needs_commit and not self.program.record().committed_run
        return Running(1.0) if is_too_early else death

    async def _life(self, death: Death, lives_left: int, start_s: float) -> float:
        """Run the program until it dies; return the duration of its start, or ``start_s`` if it died before."""
        began_s = time.monotonic()
        async with running(self.program, death.place, death.number) as process:
            dying = asyncio.ensure_future(death.kill(process, start_s))
            if await process.until(process.has_taken_over):
                start_s = time.monotonic() - began_s
                # The feed begins after the start, so that events also arrive after the first checkpoint.
                await self.feed.during(lambda: process.is_over, lives_left)
            await dying
            code, printed = await process.ends()
        is_as_planned = code == -signal.SIGKILL or (death.may_be_too_late and code == 0)
        assert is_as_planned, f"ended with {code}: {printed}"
        return start_s
