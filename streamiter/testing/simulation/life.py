"""One run of a simulated job, in one process or in several, from its start to its end or its crash.

A ``Life`` with several processes is one attempt: real links join the processes over simulated connections. Each
process has an event loop and a job of its own. The loss of a process, or of a connection, ends the life.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import msgspec

from streamiter.checkpoints.store import Checkpoints
from streamiter.deferred import PlainValue
from streamiter.errors import CheckpointError, JobFailed, ProducerFenced, StorageFull, TopicUnavailable
from streamiter.flow.flow import Flow
from streamiter.processes.frames import FrameEncoding
from streamiter.processes.link import LinkError, LinkIdentity, ProcessLink, connect
from streamiter.processes.mesh import ProcessMesh
from streamiter.runtime.checkpointing.barriers import WorkersApart
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.placement import Placement
from streamiter.runtime.plan import ChannelLimits, JobOptions, OwnProcess, first_process
from streamiter.runtime.statistics import JobState
from streamiter.testing.simulated_time import TaskClock, at_once
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop, SimulatedTask, drop_all, run_together
from streamiter.testing.simulation.network import NetworkConnection, SimulatedStore, SimulatedTopics
from streamiter.testing.simulation.world import MakeFlow, Simulation, World

Ending = JobState | Literal["failed by a fault"]

# Process 0 gets the error of another process as data, so of a class that is not only of the simulation.
_FAULTS = (TopicUnavailable, StorageFull, ProducerFenced)
# A life that was paused during its start may know a checkpoint that a later life has removed.
_FAULTS_OF_THE_PAUSED = (*_FAULTS, CheckpointError)
# With a shorter limit, a suspension may end with WorkersApart because the input of a worker is late, and the last
# checkpoint because a connection carries nothing for a while.
_LONG_ALIGNMENT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """Settings that are drawn for each life, and must not change the result."""

    shuffle: Shuffle
    """The order of tasks."""
    channel_records: int
    """The limit of each channel."""
    interval_s: float
    """Seconds between checkpoints."""
    keep: int
    """The checkpoints that are kept."""
    alignment_timeout_s: float
    """The limit for the barriers of a checkpoint."""
    transaction_timeout_s: float
    """The limit of a transaction."""
    processes: int = 1
    """The most processes."""

    def __str__(self) -> str:
        return (
            f"at most {self.processes} processes, shuffled within {self.shuffle.window} turns, channels of "
            f"{self.channel_records} records, a checkpoint every {self.interval_s:.3f} s"
        )


CALM_SETTINGS: Final = LifeSettings(
    shuffle=Shuffle(0, 0),
    channel_records=8192,
    interval_s=1.0,
    keep=3,
    alignment_timeout_s=60.0,
    transaction_timeout_s=300.0,
)


# The signs of life of a process come each second; its end, and the ends of its connections, are told at once. Until the
# supervisor has ended all processes, they still work.
_LOST_S_MAX: Final = 0.3
_LOOK_S: Final = 0.01


@final
class SimulatedProcess:
    """One process of a life: its event loop, its connection to the world, and its job."""

    def __init__(self, life: Life, number: int) -> None:
        world = life.world
        self.number = number
        self.connection = NetworkConnection(world.network)
        self.cluster = SimulatedTopics(world.broker, self.connection, world.look)
        shuffle = dataclasses.replace(life.settings.shuffle, seed=life.settings.shuffle.seed + number)
        self.loop = SimulatedEventLoop(world.time, shuffle, world.trace, world.sockets)
        self.job: Job | None = None
        """The job, once it runs."""
        self.main: SimulatedTask

    def dispose(self, world: World) -> None:
        """Cut the connections, and drop all tasks."""
        self.connection.cut()
        world.sockets.drop(self.loop)
        drop_all(self.loop)


class Life:
    """One run of a simulated job, in event loops of its own; it takes turns only when the driver says so."""

    def __init__(
        self, world: World, number: int, make_flow: MakeFlow, settings: LifeSettings, *, has_store: bool
    ) -> None:
        self.world = world
        self.number = number
        self.settings = settings
        self._make_flow = make_flow
        self._has_store = has_store
        self._random = random.Random(settings.shuffle.seed)  # noqa: S311 (nothing here is a secret)
        self._bounded_sources: frozenset[str] = frozenset()
        self._has_unbounded_source = False
        self.is_stopping = False
        """Whether it was asked to stop."""
        self._is_suspending = False
        self.was_paused = False
        """Whether it was paused, and another life started meanwhile."""
        self._is_disturbed = False
        """Whether one of its processes was killed, or a connection disturbed."""
        self._is_lost = self._has_lost = False
        """Whether a process is lost, and whether the supervisor has ended all because of that."""
        self._addresses: dict[int, str] = {}
        self._finished: set[int] = set()
        """The processes whose jobs have ended."""
        world.network.event(f"run {number} begins: {settings}")
        self.processes: list[SimulatedProcess] = []
        """Those that are alive."""
        self._first = self._begin(0)
        self._all = [self._first]

    def _begin(self, number: int, placement: bytes = b"") -> SimulatedProcess:
        process = SimulatedProcess(self, number)
        live = self._live(process, placement) if number else self._live_first(process)
        name = f"run {self.number}" + (f", process {number}" if number else "")
        process.main = process.loop.create_task(live, name=name)  # type: ignore[assignment]
        self.processes.append(process)
        return process

    async def _live_first(self, process: SimulatedProcess) -> JobState:
        flow = self._flow(process)
        sources = [step for step in flow.steps if step.source is not None]
        self._bounded_sources = frozenset(step.name for step in sources if step.bounded)
        self._has_unbounded_source = len(self._bounded_sources) < len(sources)
        count = min(self.settings.processes, max(step.parallelism for step in flow.steps))
        if count == 1:
            process.job = await flow.start(**self._options(process))
            return (await process.job.wait()).state
        own = first_process(flow.name, flow.steps, count)
        placement = msgspec.msgpack.encode(own.placement)
        self._all += [self._begin(number, placement) for number in range(1, count)]
        return await self._run_job(process, flow, own)

    async def _live(self, process: SimulatedProcess, placement: bytes) -> JobState:
        own = OwnProcess(msgspec.msgpack.decode(placement, type=Placement), process.number)
        return await self._run_job(process, self._flow(process), own)

    async def _run_job(self, process: SimulatedProcess, flow: Flow, own: OwnProcess) -> JobState:
        """Do what a real process does (see :mod:`streamiter.processes.process`)."""
        number, count, clock = process.number, own.placement.processes, TaskClock(self.world.time)
        identity = LinkIdentity(number, "simulation", self.number, own.placement.fingerprint, b"secret")
        encoding = FrameEncoding(flow.plain_data)
        mesh = ProcessMesh(identity, count, encoding, clock, on_loss=self._lose)
        self._addresses[number] = str(await mesh.listen(f"{self.number}-{number}"))
        while len(self._addresses) < count:
            await clock.sleep(_LOOK_S)
        stranger = ProcessLink(dataclasses.replace(identity, attempt=self.number - 1), _Late(self), encoding, clock)
        await connect(self._addresses[self._random.randrange(count)], stranger)
        others = await mesh.connect([self._addresses[other] for other in range(count)])
        own = dataclasses.replace(own, others=others, messages=mesh)
        job = flow.job(JobOptions(**self._options(process)), own)
        mesh.deliver()
        await job.start()
        process.job = job
        state = (await job.wait()).state
        self._finished.add(number)
        while len(self._finished) < count:  # The others may still ask this process.
            await clock.sleep(_LOOK_S)
        await mesh.close()
        return state

    def _flow(self, process: SimulatedProcess) -> Flow:
        return self._make_flow(Simulation(self.world, process.cluster, self.number))

    def _options(self, process: SimulatedProcess) -> dict[str, Any]:
        settings = self.settings
        store = SimulatedStore(self.world.store.another(), process.connection) if self._has_store else None
        return {
            "clock": TaskClock(self.world.time),
            "new_id": self.world.new_id,
            "channel_limits": ChannelLimits(records=settings.channel_records),
            "checkpoints": Checkpoints(
                store,
                interval_s=settings.interval_s,
                keep=settings.keep,
                alignment_timeout_s=settings.alignment_timeout_s,
                transaction_timeout_s=settings.transaction_timeout_s,
            ),
        }

    # -- losses ----------------------------------------------------------------------------------------

    def _lose(self, number: int, reason: str) -> None:
        """End all processes soon: one of them, or a connection, is lost."""
        if not (self._is_disturbed or self.was_paused):
            self.world.found(f"run {self.number}: process {number} is lost without a fault: {reason}")
        if not self._is_lost:
            self._is_lost = True
            self.world.network.event(f"run {self.number}: process {number} is lost: {reason}")
            self.world.time.call_later(self._random.random() * _LOST_S_MAX, self._end_lost)

    def _end_lost(self) -> None:
        self._has_lost = True

    def disturb(self) -> None:
        """Kill a process, or disturb a connection between two."""
        if len(self.processes) < 2:
            return
        self._is_disturbed = True
        if self._random.random() < 0.3:
            process = self.processes.pop(self._random.randrange(len(self.processes)))
            self.world.network.event(f"run {self.number}: process {process.number} is killed")
            process.dispose(self.world)
            self._lose(process.number, "killed")
        else:
            self.world.sockets.disturb([process.loop for process in self.processes])

    # -- turns -----------------------------------------------------------------------------------------

    def take_turns(self, turns: int) -> None:
        """Take so many turns; fewer if the job ends or there is a finding."""
        trace, last = self.world.trace, self.world.trace.turns + turns

        def until() -> bool:
            return self.is_over or trace.turns >= last or self.world.violation is not None

        self.run(until)

    def run(self, until: Callable[[], bool]) -> None:
        """Take turns until a condition holds."""
        while not until():
            if len(self.processes) == 1:
                self.processes[0].loop.run(lambda: until() or len(self.processes) != 1)
            else:
                loops = [process.loop for process in self.processes]
                run_together(loops, until, self.world.trace, self._random)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended by itself, or because of a loss."""
        if self._has_lost:
            return True
        mains = [process.main for process in self._all]
        return all(main.done() for main in mains) or any(main.done() and main.exception() for main in mains)

    @property
    def has_ended_by_itself(self) -> bool:
        """Whether all processes have ended, and may leave nothing behind."""
        return not self._is_lost and all(process.main.done() for process in self._all)

    @property
    def job(self) -> Job | None:
        """The job of process 0, while all jobs run."""
        return self._first.job if not self._is_lost and all(process.job is not None for process in self._all) else None

    @property
    def unfinished(self) -> list[SimulatedTask]:
        """The tasks that have not ended."""
        return [task for process in self.processes for task in process.loop.unfinished]

    @property
    def has_read_all(self) -> bool:
        """Whether all records have arrived and were read."""
        return (
            self.job is not None
            and self.world.is_fed
            and not any(any(reader.lag().values()) for each in self._all for reader in each.cluster.readers)
            and all(task.ended for task in self.job.statistics().tasks if task.steps[0].step in self._bounded_sources)
        )

    @property
    def is_unbounded(self) -> bool:
        """Whether the job ends only if it is asked to stop."""
        return self._has_unbounded_source and not self.is_stopping

    def stop(self, mode: StopMode) -> None:
        """Ask the job to stop, which takes turns."""
        assert self.job is not None
        self.is_stopping = True
        self._is_suspending |= mode == "suspend"
        self.world.network.event(f"run {self.number} is to stop: {mode}")
        self._first.loop.create_task(self._stop(self.job, mode), name=f"stop run {self.number}")

    async def _stop(self, job: Job, mode: StopMode) -> None:
        try:
            await job.stop(mode)
        except Exception as error:
            # The job raises the same error where it is awaited.
            self.world.network.event(f"run {self.number} cannot stop: {type(error).__name__}")

    def pause(self) -> None:
        """Note that the driver lets another life start before this one takes further turns."""
        self.was_paused = True
        self.world.network.event(f"run {self.number} is paused")

    def lose_transactions(self) -> None:
        """Let another owner open the job's transactions, if it has any."""
        for transactional_id in dict.fromkeys(
            each for process in self._all for each in process.cluster.transactional_ids
        ):
            self.world.network.event(f"another owner opens the transactions {transactional_id!r}")
            topic = self.world.broker.topic("anything")
            at_once(at_once(topic.open_transactions(transactional_id)).close())

    # -- end -------------------------------------------------------------------------------------------

    def ending(self) -> Ending:
        """Return how the job has ended; raise its error, unless a fault has caused it."""
        if self._is_lost:
            return "failed by a fault"
        error = next((error for each in self._all if each.main.done() and (error := each.main.exception())), None)
        if error is None:
            state: JobState = self._first.main.result()
            self.world.network.event(f"run {self.number} is {state}")
            return state
        self.world.network.event(f"run {self.number} fails: {_first_line(error)}")
        faults = _FAULTS_OF_THE_PAUSED if self.was_paused else _FAULTS
        if (self._is_suspending or self._is_disturbed) and self.settings.alignment_timeout_s < _LONG_ALIGNMENT_S:
            faults = (*faults, WorkersApart)
        if isinstance(error, Exception) and _comes_from(error, faults):
            return "failed by a fault"
        raise error

    def crash(self) -> None:
        """End the job between two turns; none of its code runs after that."""
        self.world.network.event(f"run {self.number} crashes")
        self.dispose()

    def dispose(self) -> None:
        """Cut the connections, and drop all tasks."""
        for process in self.processes:
            process.dispose(self.world)


@final
class _Late:
    """The owner of a connection of the attempt before, which arrives late."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def opened(self, link: ProcessLink) -> None:
        """Note that the connection was not refused."""
        self._life.world.found(f"run {self._life.number} accepts a connection of an old attempt")

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """No message arrives."""

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """The connection was refused."""


def _comes_from(error: BaseException | None, faults: tuple[type[Exception], ...]) -> bool:
    if error is None:
        return False
    if isinstance(error, faults):
        return True
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(_comes_from(part, faults) for part in (*parts, error.__cause__, error.__context__))


def _first_line(error: BaseException) -> str:
    step = f"step {error.step!r}, " if isinstance(error, JobFailed) else ""
    return f"{step}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
