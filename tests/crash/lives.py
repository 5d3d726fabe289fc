"""Kill a program several times while events arrive, in each way in which a process dies, and restart it each time."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Protocol, Self

from crash.feed import Feed
from crash.follower import LINE_BYTES
from crash.places import CHECKPOINT, RESTORE, SHUTDOWN, Place
from crash.programs import Process, Program, running

# A process works for at most this time after its start; it takes a checkpoint every tenth of a second.
_RUNNING_S: Final = 0.5
_STOPPING_S: Final = 0.1
_POLL_S: Final = 0.01
# A process dies at one of its first checkpoints; later checkpoints are no different.
_CHECKPOINTS: Final = 4


class Death(Protocol):
    """One way to die."""

    @property
    def place(self) -> Place | None:
        """Return the place where the process kills itself."""

    @property
    def number(self) -> int:
        """Return the number of the call."""

    @property
    def may_be_too_late(self) -> bool:
        """Return whether the process may have ended normally before its death."""

    async def kill(self, process: Process, start_s: float) -> None:
        """Kill the process in time, or give it the arguments for its place; a process starts in about
        ``start_s`` seconds.
        """


@dataclass(frozen=True)
class AtPlace:
    """Kills the process when it reaches the place."""

    place: Place
    number: int
    is_terminated: bool = False
    may_be_too_late: bool = False

    @property
    def needs_commit(self) -> bool:
        """Return whether only a run that resumes from a checkpoint reaches this place."""
        return self.place.function.endswith("._load")

    async def kill(self, process: Process, start_s: float) -> None:
        if self.is_terminated and await process.until(process.has_committed):
            process.send(signal.SIGTERM)


@dataclass(frozen=True)
class _Timed:
    """Kills the process at a ``moment`` from 0 to 1 of a time span."""

    moment: float
    place: None = None
    number: int = 1
    may_be_too_late: bool = False


class Starting(_Timed):
    """Kills the process between its start and the first records."""

    async def kill(self, process: Process, start_s: float) -> None:
        await process.lives_for(1.2 * start_s * self.moment)
        process.send(signal.SIGKILL)


class Running(_Timed):
    """Kills the process while it works."""

    async def kill(self, process: Process, start_s: float) -> None:
        await process.until(process.has_taken_over)
        await process.lives_for(_RUNNING_S * self.moment)
        process.send(signal.SIGKILL)


class Writing(_Timed):
    """Kills the process when a snapshot in the folder is half written, if the folder has one."""

    async def kill(self, process: Process, start_s: float) -> None:
        await process.until(process.has_taken_over)
        await process.until(process.program.is_writing, limit_s=2 * _RUNNING_S)
        process.send(signal.SIGKILL)


@dataclass(frozen=True)
class Stopping(_Timed):
    """Kills the process while it stops."""

    may_be_too_late: bool = True

    async def kill(self, process: Process, start_s: float) -> None:
        await process.until(process.has_committed)
        process.send(signal.SIGTERM)
        await process.lives_for(_STOPPING_S * self.moment)
        process.send(signal.SIGKILL)


def deaths(count: int, random: Random, commit: Sequence[Place]) -> list[Death]:
    """Return this many deaths in random order; seven of ten are at places.

    The moments right before and right after a commit are always among ten deaths, because errors in the order
    of actions show there. The other places are used in turn. ``commit`` has the places of a commit, these two
    first; it is empty if no place is in a transaction.
    """
    has_transactions = any(_is_of_transaction(place) for place in commit)
    restore, checkpoint, committing, shutdown = (
        itertools.cycle(random.sample(there, len(there)))
        for there in (
            [place for place in places if has_transactions or not _is_of_transaction(place)]
            for places in (RESTORE, CHECKPOINT, commit[2:], SHUTDOWN)
        )
    )
    found: list[Death] = []
    while len(found) < count:
        at_checkpoint = [*commit[:2], next(committing), next(checkpoint), next(checkpoint)]
        ten: list[Death] = [
            *(AtPlace(place, random.randint(1, _CHECKPOINTS)) for place in at_checkpoint),
            AtPlace(next(restore), 1),
            AtPlace(next(shutdown), 1, is_terminated=True),
            *(timed(random.random()) for timed in (Starting, random.choice((Running, Writing)), Stopping)),
        ]
        found += random.sample(ten, len(ten))
    return found[:count]


def _is_of_transaction(place: Place) -> bool:
    return "transaction" in place.function.lower()


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


class KilledFollowers:
    """Processes that follow a model while the block runs: each is killed after some versions, and the next one starts.

    ``notes`` is the file with the versions that they have seen.
    """

    def __init__(self, url: str, model: str, notes: Path) -> None:
        script = Path(__file__).with_name("follower.py")
        self._program = Program(script, notes.parent, (url, model, str(notes)))
        self._notes = notes
        self._kills = 0
        self._is_at_end = False

    async def __aenter__(self) -> Self:
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        self._notes.touch()
        self._following = asyncio.ensure_future(self._follow_and_die())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following

    async def _follow_and_die(self) -> None:
        for count in itertools.cycle((1, 4, 9)):
            first = self._seen()  # Now: on a busy machine the process may note a version before the block begins.
            async with running(self._program) as process:
                while self._seen() < first + (1 if self._is_at_end else count):
                    await process.lives_for(_POLL_S)
                    assert not process.is_over, await process.ends()
                process.send(signal.SIGKILL)
            self._kills += 1

    def _seen(self) -> int:
        return self._notes.stat().st_size // LINE_BYTES

    async def versions(self, kills: int) -> list[str]:
        """Return the lines of all versions that were seen, once so many followers were killed.

        The topic is complete, so at least the last one of them sees the last version.
        """
        self._is_at_end = True
        before = self._kills
        while self._kills < max(kills, before + 2):
            await asyncio.wait([self._following], timeout=_POLL_S)
            if self._following.done():
                await self._following
        return self._notes.read_text(encoding="ascii").splitlines(keepends=True)
