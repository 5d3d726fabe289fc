"""A program that is killed again and again, while events come in, and started again each time."""

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

__all__ = ["Story"]


@dataclass(frozen=True)
class Story:
    """One program and its deaths; ``seed`` decides how it dies, ``commit`` where its commits can be hit.

    ``last`` is the program with the option that makes it end after all events.
    """

    program: Program
    last: Program
    feed: Feed
    seed: int
    commit: Sequence[Place]

    async def tell(self, kills: int) -> None:
        """Let the program die this many times, then let it end. An error contains the deaths so far."""
        told = [
            f"seed {self.seed}, {kills} kills; again: STREAMITER_CRASH_KILLS={kills} make soak SEED={self.seed}"
        ]
        try:
            start_s = 1.0
            for number, planned in enumerate(deaths(kills, Random(self.seed), self.commit)):
                death = self._possible(planned)
                told.append(f"{number}: {death}")
                start_s = await self._life(death, kills - number - 1, start_s)
            await self.feed.rest()
            async with running(self.last) as process:
                code, printed = await process.ends()
            assert code == 0, f"ended with {code}: {printed}"
        except BaseException as error:
            error.add_note("\n".join(told))
            raise

    def _possible(self, death: Death) -> Death:
        is_too_early = (
            isinstance(death, AtPlace) and death.needs_commit and not self.program.record().committed_run
        )
        return Running(1.0) if is_too_early else death

    async def _life(self, death: Death, lives_left: int, start_s: float) -> float:
        """Run the program until it dies; return the time of a start, if known."""
        began_s = time.monotonic()
        async with running(self.program, death.place, death.number) as process:
            dying = asyncio.ensure_future(death.come(process, start_s))
            if await process.until(process.has_taken_over):
                start_s = time.monotonic() - began_s
                # Only now, or all of it would be there before the first checkpoint, and nothing behind it.
                await self.feed.during(lambda: process.is_over, lives_left)
            await dying
            code, printed = await process.ends()
        is_as_told = code == -signal.SIGKILL or (death.may_come_late and code == 0)
        assert is_as_told, f"ended with {code}: {printed}"
        return start_s
