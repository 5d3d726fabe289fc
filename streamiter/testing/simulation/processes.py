"""The processes of a simulated run, and their host.

The supervisor, the part of each process and its signs of life are the real ones (:mod:`streamiter.engine.processes`). A
process has two event loops: one for its job, and one for its signs of life, which a real process sends from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, final

import msgspec

from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.host import ProcessSettings
from streamiter.engine.processes.link import LinkError, ProcessLink, connect_link
from streamiter.engine.processes.process import Pulse, identity_of, run_part
from streamiter.engine.processes.silence import ProcessLook
from streamiter.flow.flow import Flow
from streamiter.testing.simulated_time import TaskClock, where_tasks_wait
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop, SimulatedTask, drop_all
from streamiter.testing.simulation.network import NetworkConnection, SimulatedTopics
from streamiter.testing.simulation.world import World
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.closing import closed_after
from streamiter.values.plain_data import PlainData

# A program starts within a second, and the host says a little later that one has ended.
_START_S_MAX: Final = 1.0
_TOLD_S_MAX: Final = 0.3
_LOOK_S: Final = 0.01
# Turns after the end of a process, in which its last tasks must end.
_TURNS_TO_SETTLE: Final = 2_000
# The share of the orders to end a process that do not reach its machine.
_UNREACHABLE: Final = 0.2


@final
class SimulatedProcess:
    """A process: its event loops, and its connection to the world."""

    def __init__(self, world: World, name: str, shuffle: Shuffle) -> None:
        self.name = name
        self.connection = NetworkConnection(world.network)
        self.cluster = SimulatedTopics(world.broker, self.connection, world.look)
        self.loops: list[SimulatedEventLoop] = []
        self.is_frozen = False
        """Whether it takes no turns."""
        self._world = world
        self._shuffle = shuffle

    def start(self, main: Coroutine[Any, Any, Any], name: str) -> SimulatedTask:
        """Start a coroutine in an event loop of its own."""
        shuffle = replace(self._shuffle, seed=self._shuffle.seed + len(self.loops))
        loop = SimulatedEventLoop(self._world.time, shuffle, self._world.trace, self._world.sockets)
        self.loops.append(loop)
        task: SimulatedTask = loop.create_task(main, name=name)  # type: ignore[assignment]
        return task

    def left(self) -> str | None:
        """Let the tasks of the first loop end, since its main task has ended; return what is left, if anything."""
        loop, until = self.loops[0], self._world.trace.turns + _TURNS_TO_SETTLE
        loop.run(lambda: loop.is_quiet or self._world.trace.turns >= until)
        if loop.unfinished:
            lines = ["leaves tasks behind:", *where_tasks_wait(loop.unfinished)]
            return "\n  ".join(lines)
        return f"has exceptions that no code has retrieved: {loop.errors}" if loop.errors else None

    def dispose(self) -> None:
        """Cut the connections, and drop all tasks."""
        self.connection.cut()
        for loop in self.loops:
            self._world.sockets.drop(loop)
            drop_all(loop)


@final
class PartOfAttempt:
    """One process of an attempt, as its host sees it."""

    def __init__(self, host: SimulatedHost, settings: ProcessSettings, process: SimulatedProcess) -> None:
        self.process = process
        self.attempt = settings.attempt
        self.main: SimulatedTask
        """Its part of the flow."""
        self.signs: SimulatedTask
        """Its signs of life; the process ends with them, because it has lost its supervisor."""
        self.end: str | None = None
        """How it has ended; it takes no further turns."""
        self._host = host
        self._told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        """End the process, or only say so, if its machine does not answer: then its signs of life notice that."""
        if self.end is None and not self._told.done():
            if self._host.is_unreachable(self):
                self._tell("its machine does not answer")
            else:
                self._host.end(self, "it was killed")

    def tell_later(self, how: str, delay_s: float, world: World) -> None:
        """Let the host say how the process has ended."""
        world.time.call_later(delay_s, lambda: self._tell(how))

    def _tell(self, how: str) -> None:
        if not self._told.done() and not self._told.get_loop().is_closed():
            self._told.set_result(how)

    @property
    def is_known_to_have_ended(self) -> bool:
        """Whether the supervisor was told that it has ended."""
        return self._told.done()

    async def look(self, process: int, note: int) -> ProcessLook | None:
        """No kernel knows these processes."""
        return None

    async def ended(self) -> str:
        """Wait until the host says that the process has ended; return how."""
        return await self._told


@final
class SimulatedHost:
    """A :class:`~streamiter.engine.processes.host.Host` whose processes take turns in one thread, in simulated time."""

    def __init__(
        self,
        world: World,
        name: str,
        processes: int,
        shuffle: Shuffle,
        load: Callable[[SimulatedProcess], Flow],
        options_of: Callable[[SimulatedProcess, JobOptions], JobOptions],
    ) -> None:
        """``options_of`` adds to the options of a job what is not plain data."""
        self.alive: list[PartOfAttempt] = []
        self.clusters: list[SimulatedTopics] = []
        """The topics as each process sees them, also those that have ended."""
        self.fingerprint = ""
        """The fingerprint of the flow in the last attempt, once it is known."""
        self.has_changed = False
        """Whether there are other processes now, or they can no longer take turns: see :meth:`settle`."""
        self._world = world
        self._name = name
        self._processes = processes
        self._shuffle = shuffle
        self._load = load
        self._options_of = options_of
        self._random = random.Random(shuffle.seed)  # noqa: S311 (nothing here is a secret)
        self._clock = TaskClock(world.time)

    # -- what the supervisor asks for ------------------------------------------------------------------

    async def room(self) -> int:
        """Return the number of processes; after a loss there may be one fewer."""
        return self._random.randint(max(1, self._processes - 1), self._processes) if self.clusters else self._processes

    def address(self, name: str) -> str:
        """Return an address."""
        return f"{self._name}: {name}"

    async def start(self, settings: ProcessSettings) -> PartOfAttempt:
        """Start a process; it is a finding if one of an earlier attempt still runs, as far as the host knows."""
        for part in self.alive:
            if part.attempt < settings.attempt and not part.is_known_to_have_ended:
                self._world.found(f"attempt {settings.attempt} begins before {part.process.name} has ended")
        name = f"{self._name}, process {settings.number} of attempt {settings.attempt}"
        shuffle = replace(self._shuffle, seed=self._shuffle.seed + 2 * len(self.clusters) + 2)
        part = PartOfAttempt(self, settings, SimulatedProcess(self._world, name, shuffle))
        part.main = part.process.start(self._run(settings, part.process), name)
        part.signs = part.process.start(Pulse(settings, self._clock).beat(), f"signs of life of {name}")
        for task in (part.main, part.signs):
            task.add_done_callback(lambda _: self._change())
        self.alive.append(part)
        self.clusters.append(part.process.cluster)
        self._change()
        return part

    async def _run(self, settings: ProcessSettings, process: SimulatedProcess) -> None:
        await self._clock.sleep(self._random.random() * _START_S_MAX)
        late = asyncio.create_task(self._come_late(settings), name="a connection of an old attempt")
        options = self._options_of(process, settings.job_options())
        async with closed_after(late.cancel):
            await run_part(settings, lambda: self._load(process), options)

    async def _come_late(self, settings: ProcessSettings) -> None:
        """Connect to a process as one of the attempt before would do; it must be refused."""
        old = msgspec.structs.replace(settings, attempt=settings.attempt - 1)
        address = self.address(f"{self._random.randrange(settings.processes)}-{settings.attempt}")
        while True:
            await self._clock.sleep(_LOOK_S)
            with contextlib.suppress(ConnectionRefusedError):  # The process does not listen yet.
                identity = identity_of(old, settings.number, self.fingerprint)
                link = ProcessLink(identity, _Late(self._world), FrameEncoding(PlainData()), self._clock)
                await connect_link(address, link)
                return

    # -- what happens to processes ---------------------------------------------------------------------

    def loops(self) -> list[SimulatedEventLoop]:
        """Return the event loops that can take turns."""
        return [loop for part in self.alive if not part.process.is_frozen for loop in part.process.loops]

    def running(self) -> list[PartOfAttempt]:
        """Return the processes of the current attempt that take turns."""
        return [part for part in self.alive if not (part.process.is_frozen or part.end or part.is_known_to_have_ended)]

    def end(self, part: PartOfAttempt, how: str) -> None:
        """End a process: none of its code runs any more."""
        part.end = how
        self._change()

    def is_unreachable(self, part: PartOfAttempt) -> bool:
        """Draw whether an order to end a process does not reach it."""
        is_unreachable = self._world.network.draws(_UNREACHABLE if self._world.network.levels.lost else 0.0)
        if is_unreachable:
            self._world.network.event(f"{part.process.name} does not hear that it must end")
        return is_unreachable

    def freeze(self, process: SimulatedProcess, seconds: float) -> None:
        """Let a process take no turns for some seconds, as a signal or a machine without memory does."""
        self._world.network.event(f"{process.name} is frozen for {seconds:.1f} s")
        process.is_frozen = True
        self._change()

        def thaw() -> None:
            process.is_frozen = False
            self._change()

        self._world.time.call_later(seconds, thaw)

    def settle(self) -> None:
        """Dispose of the processes that have ended, between two turns."""
        self.has_changed = False
        for part in list(self.alive):
            if part.end is None and (part.main.done() or part.signs.done()):
                part.end = self._exit(part) if part.main.done() else "it has ended with exit code 3"
            if part.end is not None:
                self.alive.remove(part)
                part.process.dispose()
                self._world.network.event(f"{part.process.name}: {part.end}")
                part.tell_later(part.end, self._random.random() * _TOLD_S_MAX, self._world)

    def _exit(self, part: PartOfAttempt) -> str:
        error = part.main.exception()
        if isinstance(error, OSError):  # There is no supervisor.
            return "it has ended with exit code 1"
        left = f"ends with {type(error).__name__}: {error}" if error is not None else part.process.left()
        self._world.found(left and f"{part.process.name} {left}")
        return "it has ended with exit code 0"

    def dispose(self) -> None:
        """Drop all processes."""
        for part in self.alive:
            part.process.dispose()
        self.alive.clear()

    def unfinished(self) -> list[SimulatedTask]:
        """Return the tasks of all processes that have not ended."""
        return [task for part in self.alive for loop in part.process.loops for task in loop.unfinished]

    def _change(self) -> None:
        self.has_changed = True


@final
class _Late:
    """The owner of a connection of the attempt before, which arrives late."""

    def __init__(self, world: World) -> None:
        self._world = world

    def opened(self, link: ProcessLink) -> None:
        """Note that the connection was not refused."""
        self._world.found("a process accepts a connection of an old attempt")

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """No message arrives."""

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """The connection was refused."""
