"""One run of a simulated job, in one process or in several, from its start to its end or its crash.

A ``Life`` in several processes has the attempts of a supervisor in it, which decides about losses as in real life; its
processes, and the links between them, are in :mod:`~streamiter.testing.simulation.processes`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from streamiter.engine.graph.statistics import JobState
from streamiter.engine.job.barriers import WorkersApart
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.engine.plan.placement import Placement
from streamiter.engine.processes.host import PlainOptions
from streamiter.engine.processes.supervisor import Attempt, Supervisor
from streamiter.engine.storage.store import Checkpoints
from streamiter.errors import CheckpointError, JobFailed, ProcessLost, ProducerFenced, StorageFull, TopicUnavailable
from streamiter.flow.flow import Flow
from streamiter.testing.simulated_time import TaskClock, at_once
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop, SimulatedTask, run_together
from streamiter.testing.simulation.network import SimulatedStore
from streamiter.testing.simulation.processes import SimulatedHost, SimulatedProcess
from streamiter.testing.simulation.world import MakeFlow, Simulation, World
from streamiter.values.records import BATCH_RECORDS

Ending = JobState | Literal["failed by a fault"]

# Errors of other processes arrive as data.
_FAULTS = (TopicUnavailable, StorageFull, ProducerFenced)
# A life that was paused during its start may know a checkpoint that a later life has removed.
_FAULTS_OF_THE_PAUSED = (*_FAULTS, CheckpointError)
# With a shorter limit, a suspension may end with WorkersApart because the input of a worker is late, and the last
# checkpoint because a connection carries nothing for a while.
_LONG_ALIGNMENT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """Settings that are drawn for each life, and must not change the result; by default they disturb nothing."""

    shuffle: Shuffle
    """The order of tasks."""
    checkpoints: Checkpoints
    """The checkpoints, without their store."""
    channel_records: int = BATCH_RECORDS
    """The limit of each channel."""
    processes: int = 1
    """The most processes."""

    def __str__(self) -> str:
        return (
            f"at most {self.processes} processes, shuffled within {self.shuffle.window} turns, channels of "
            f"{self.channel_records} records, a checkpoint every {self.checkpoints.interval_s:.3f} s"
        )


CALM_SETTINGS: Final = LifeSettings(Shuffle(0, 0), Checkpoints(interval_s=1.0))


# A frozen process is lost after SILENCE_S and a second; its attempt ends within six more. A turn may be late.
_ENDED_AFTER_S: Final = 15.0
# The longest freeze of a process: some are shorter than SILENCE_S, and many longer than an attempt with a loss.
_FROZEN_S_MAX: Final = 40.0
# What the supervisor promises.
_LOSSES_MAX: Final = 3
_LOSSES_WITHIN_S: Final = 600.0


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
        self._was_disturbed = False
        """Whether one of its processes, or a connection, was disturbed."""
        self._is_attempt_disturbed = False
        """Whether a process or a connection of the current attempt was disturbed."""
        self._is_program_disturbed = False
        """Whether the process of the supervisor was frozen, so that the supervisor may be late."""
        self._is_program_lost = False
        """Whether the process of the supervisor was killed, but not the processes that it has started."""
        self._is_disposed = False
        self._losses_s: list[float] = []
        """When attempts were lost."""
        self._host: SimulatedHost | None = None
        """The host of its processes, if there are several."""
        self._stoppable: Job | Supervisor | None = None
        self._job: Job | Attempt | None = None
        """The object that gives the statistics of the running job."""
        world.network.event(f"run {number} begins: {settings}")
        self._program = SimulatedProcess(world, f"run {number}", settings.shuffle)
        """The process that has the job, or the supervisor."""
        self._main = self._program.start(self._live(), self._program.name)

    async def _live(self) -> JobState:
        flow = self._flow(self._program)
        sources = [step for step in flow.steps if step.source is not None]
        self._bounded_sources = frozenset(step.name for step in sources if step.bounded)
        self._has_unbounded_source = len(self._bounded_sources) < len(sources)
        count = min(self.settings.processes, max(step.parallelism for step in flow.steps))
        limits = ChannelLimits(records=self.settings.channel_records)
        if count == 1:
            job = await flow.start(
                clock=TaskClock(self.world.time),
                new_id=self.world.new_id,
                channel_limits=limits,
                checkpoints=replace(self.settings.checkpoints, store=self._store_of(self._program)),
            )
            self._stoppable = self._job = job
            return (await job.wait()).state
        checkpoints = replace(self.settings.checkpoints, store="simulation" if self._has_store else None)
        options = PlainOptions.of(flow.name, {"channel_limits": limits, "checkpoints": checkpoints})
        host = SimulatedHost(self.world, self._program.name, count, self.settings.shuffle, self._flow, self._options_of)

        def check(placement: Placement) -> None:
            placement.check(flow.name, flow.steps)
            host.fingerprint = placement.fingerprint

        clock = TaskClock(self.world.time)
        supervisor = Supervisor(flow.name, "simulation", host, options, check, clock, self.world.new_id())
        self._host, self._stoppable = host, supervisor
        return (await supervisor.run(self._attempting)).state

    def _flow(self, process: SimulatedProcess) -> Flow:
        return self._make_flow(Simulation(self.world, process.cluster, self.number))

    def _store_of(self, process: SimulatedProcess) -> SimulatedStore | None:
        return SimulatedStore(self.world.store.another(), process.connection) if self._has_store else None

    def _options_of(self, process: SimulatedProcess, options: JobOptions) -> JobOptions:
        assert options.checkpoints is not None
        checkpoints = replace(options.checkpoints, store=self._store_of(process))
        return replace(options, clock=TaskClock(self.world.time), checkpoints=checkpoints)

    # -- losses ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _attempting(self, attempt: Attempt, stops: Sequence[StopMode]) -> AsyncIterator[None]:
        """Check that the supervisor keeps its promises about losses."""
        self._job = attempt
        self._is_attempt_disturbed = self._is_program_disturbed = False
        if self._recent_losses() > _LOSSES_MAX:
            self.world.found(f"run {self.number} starts again after {self._recent_losses()} losses")
        try:
            yield
        finally:
            self._job = None
            if (loss := attempt.loss) is not None:
                what = f"run {self.number}: process {loss.process} is lost: {loss.reason}"
                self.world.network.event(what)
                self._losses_s.append(self.world.time.now_s)
                if not (self._is_attempt_disturbed or self.was_paused):
                    self.world.found(f"{what}, and no fault has led to that")

    def _recent_losses(self) -> int:
        return sum(self.world.time.now_s - lost_s < _LOSSES_WITHIN_S for lost_s in self._losses_s)

    def disturb(self) -> None:
        """Kill or freeze a process, or disturb a connection between two."""
        if self._host is None or self._is_program_lost:
            return
        self._was_disturbed = self._is_attempt_disturbed = True
        chosen, running = self._random, self._host.running()
        what = chosen.random()
        if what < 0.25 and running:
            self._host.end(chosen.choice(running), "it was killed by a fault")
            self._expect_loss()
        elif what < 0.5 and running:
            seconds = chosen.random() * _FROZEN_S_MAX
            self._host.freeze(chosen.choice(running).process, seconds)
            if seconds > _ENDED_AFTER_S:
                self._expect_loss()
        elif what < 0.55 and not self._program.is_frozen:
            self._is_program_disturbed = True
            self._host.freeze(self._program, chosen.random() * _FROZEN_S_MAX)
        elif what < 0.6:
            self.world.network.event(f"{self._program.name} is killed, but not its processes")
            self._is_program_lost = True
            self._program.dispose()
        else:
            self.world.sockets.disturb(self._loops())

    def _expect_loss(self) -> None:
        attempt = self._job
        if not isinstance(attempt, Attempt) or not attempt.has_run:
            return  # A process that starts may be silent for longer.

        def look() -> None:
            is_excused = self._is_disposed or self.was_paused or self._is_program_disturbed or self._is_program_lost
            if self._job is attempt and not is_excused:
                self.world.found(f"run {self.number}: {_ENDED_AFTER_S:g} s after a loss its attempt has not ended")

        self.world.time.call_later(_ENDED_AFTER_S, look)

    # -- turns -----------------------------------------------------------------------------------------

    def take_turns(self, turns: int) -> None:
        """Take ``turns`` turns; fewer if the job ends or there is a finding."""
        trace, last = self.world.trace, self.world.trace.turns + turns

        def until() -> bool:
            return self.is_over or trace.turns >= last or self.world.violation is not None

        self.run(until)

    def run(self, until: Callable[[], bool]) -> None:
        """Take turns until a condition holds."""
        while not until():
            if (host := self._host) is None:
                self._program.loops[0].run(lambda: until() or self._host is not None)
            else:
                host.settle()
                run_together(
                    self._loops(), lambda: until() or host.has_changed, self.world.time, self.world.trace, self._random
                )

    def _loops(self) -> list[SimulatedEventLoop]:
        assert self._host is not None
        is_waiting = self._program.is_frozen or self._is_program_lost
        return [*([] if is_waiting else self._program.loops), *self._host.loops()]

    @property
    def is_over(self) -> bool:
        """Whether the job has ended by itself, or because its program was killed."""
        if self._is_program_lost:
            return self._host is None or not self._host.alive
        return self._main.done()

    def left(self) -> str | None:
        """Return what is left of a job that has ended by itself, if anything."""
        return None if self._is_program_lost else self._program.left()

    @property
    def can_stop(self) -> bool:
        """Whether it can be asked to stop."""
        return self._stoppable is not None and not self.is_stopping and not self._is_program_lost

    @property
    def unfinished(self) -> list[SimulatedTask]:
        """The tasks that have not ended."""
        own = self._program.loops[0].unfinished
        return own if self._host is None else [*own, *self._host.unfinished()]

    @property
    def has_read_all(self) -> bool:
        """Whether all records have arrived and were read."""
        if self._job is None or not self.world.is_fed:
            return False
        tasks = self._job.statistics().tasks
        clusters = [part.process.cluster for part in self._host.alive] if self._host else [self._program.cluster]
        return (
            bool(tasks)
            and not any(any(reader.lag().values()) for each in clusters for reader in each.readers)
            and all(task.ended for task in tasks if task.steps[0].step in self._bounded_sources)
        )

    @property
    def is_unbounded(self) -> bool:
        """Whether the job ends only if it is asked to stop."""
        return self._has_unbounded_source and not self.is_stopping

    def stop(self, mode: StopMode) -> None:
        """Ask the job to stop, which takes turns."""
        assert self._stoppable is not None
        self.is_stopping = True
        self._is_suspending |= mode == "suspend"
        self.world.network.event(f"run {self.number} is to stop: {mode}")
        stop = self._stop(self._stoppable, mode)
        self._program.loops[0].create_task(stop, name=f"stop run {self.number}")

    async def _stop(self, job: Job | Supervisor, mode: StopMode) -> None:
        try:
            await (job.stop(mode) if isinstance(job, Job) else job.stop_on_signal(mode))
        except Exception as error:
            # The job raises the same error where it is awaited.
            self.world.network.event(f"run {self.number} cannot stop: {type(error).__name__}")

    def pause(self) -> None:
        """Note that the driver lets another life start before this one takes further turns."""
        self.was_paused = True
        self.world.network.event(f"run {self.number} is paused")

    def miss_turns(self) -> None:
        """Note that time passes without its turns: its processes will be silent, all at once."""
        self._was_disturbed = self._is_attempt_disturbed = self._is_program_disturbed = True

    def lose_transactions(self) -> None:
        """Let another owner open the job's transactions, if it has any."""
        clusters = self._host.clusters if self._host else [self._program.cluster]
        for transactional_id in dict.fromkeys(each for cluster in clusters for each in cluster.transactional_ids):
            self.world.network.event(f"another owner opens the transactions {transactional_id!r}")
            topic = self.world.broker.topic("anything")
            at_once(at_once(topic.open_transactions(transactional_id)).close())

    # -- end -------------------------------------------------------------------------------------------

    def ending(self) -> Ending:
        """Return how the job has ended; raise its error, unless a fault has caused it."""
        if self._is_program_lost:
            return "failed by a fault"
        error = self._main.exception()
        if error is None:
            state: JobState = self._main.result()
            self.world.network.event(f"run {self.number} is {state}")
            return state
        self.world.network.event(f"run {self.number} fails: {_first_line(error)}")
        faults = _FAULTS_OF_THE_PAUSED if self.was_paused else _FAULTS
        if (
            self._is_suspending or self._was_disturbed
        ) and self.settings.checkpoints.alignment_timeout_s < _LONG_ALIGNMENT_S:
            faults = (*faults, WorkersApart)
        if isinstance(error, ProcessLost) and (self.is_stopping or self._recent_losses() > _LOSSES_MAX):
            return "failed by a fault"
        if isinstance(error, Exception) and _comes_from(error, faults):
            return "failed by a fault"
        raise error

    def crash(self) -> None:
        """End the job between two turns; none of its code runs after that."""
        self.world.network.event(f"run {self.number} crashes")
        self.dispose()

    def dispose(self) -> None:
        """Cut the connections, and drop all tasks."""
        self._is_disposed = True
        if self._host is not None:
            self._host.dispose()
        if not self._is_program_lost:
            self._program.dispose()


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
