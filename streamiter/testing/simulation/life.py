"""What a flow is built from when it is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from streamiter.checkpoints.store import Checkpoints
from streamiter.errors import CheckpointError, ConfigurationError, JobFailed, ProducerFenced
from streamiter.flow.flow import Flow
from streamiter.numbers import whole_number
from streamiter.runtime.checkpointing.barriers import WorkersApart
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.plan import ChannelLimits
from streamiter.runtime.statistics import JobState
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop, drop_all
from streamiter.testing.simulation.network import (
    NetworkConnection,
    SimulatedStorageFull,
    SimulatedUnavailable,
)
from streamiter.testing.simulation.simulated_time import TaskClock, at_once, generator
from streamiter.testing.simulation.topic import SimulatedStore, SimulatedTopic, SimulatedTopics
from streamiter.testing.simulation.world import (
    Compare,
    Delivery,
    Input,
    KeyOf,
    Order,
    OutputRules,
    World,
    key_and_value,
)
from streamiter.topics.topic import Topic

__all__ = [
    "Ending",
    "Life",
    "LifeSettings",
    "MakeFlow",
    "Simulation",
]


class Simulation:
    """Given to the function that builds the flow: its topics come from here.

    The function is called again for every restart; it must build a flow that can go on from the last one's state.
    """

    def __init__(self, world: World, cluster: SimulatedTopics, run: int = 1) -> None:
        self.seed = world.seed
        self.run = run
        """Which start this is, counted from 1: for what an update of the flow may change, such as a parallelism."""
        self.random = generator(world.seed, "flow")
        """For what should differ from seed to seed, such as the inputs; begins anew with each restart."""
        self._world = world
        self._cluster = cluster
        self._given: dict[str, None] = {}

    def input(
        self,
        name: str,
        records: Iterable[Any],
        *,
        partitions: int = 1,
        key: KeyOf | None = None,
        over_s: float = 0.0,
    ) -> Topic:
        """A topic to read from. ``records`` are bytes, or what JSON can hold.

        They are all there at the start, or come in one by one within the first ``over_s`` seconds. Without ``key``
        record i goes to partition i mod ``partitions``.
        """
        self._take_name(name)
        whole_number("Simulation.input: partitions", partitions, 1)
        if name not in self._world.inputs:
            self._world.feed(Input(name, records, partitions=partitions, key=key, over_s=over_s))
        return SimulatedTopic(self._cluster, name)

    def output(
        self,
        name: str,
        *,
        partitions: int = 1,
        order: Order = "partition",
        delivery: Delivery = "exactly_once",
        compare: Compare = key_and_value,
    ) -> Topic:
        """A topic to write to, whose records must be those of an undisturbed run.

        ``order``: each ``"partition"`` has the same records in the same order; or each ``"key"`` has; or they are
        the same in ``"any"`` order, as where streams of several subtasks meet. ``compare`` gives what of a
        :class:`~streamiter.topics.TopicRecord` is to be the same, its key and value unless given.
        ``delivery="at_least_once"`` lets records come more than once, for sinks that write at once.
        """
        self._take_name(name)
        self._create(name, partitions)
        self._world.outputs[name] = OutputRules(name, order, delivery, compare)
        return SimulatedTopic(self._cluster, name)

    def topic(self, name: str, *, partitions: int = 1) -> Topic:
        """A topic that is neither fed nor compared, such as one that feedback goes through."""
        self._take_name(name)
        self._create(name, partitions)
        return SimulatedTopic(self._cluster, name)

    def _create(self, name: str, partitions: int) -> None:
        whole_number("Simulation: partitions", partitions, 1)
        at_once(self._world.broker.topic(name).create(partitions=partitions))

    def _take_name(self, name: str) -> None:
        if name in self._given:
            raise ConfigurationError(
                f"simulation: expected a name of its own for each topic, given {name!r} twice; use the topic twice "
                "where the flow reads it twice"
            )
        self._given[name] = None


MakeFlow = Callable[[Simulation], Flow]

Ending = JobState | Literal["failed by a fault"]

_FAULTS = (SimulatedUnavailable, SimulatedStorageFull, ProducerFenced)

# A run that was paused while it started may know of a checkpoint that others have removed meanwhile.
_FAULTS_OF_THE_PAUSED = (*_FAULTS, CheckpointError)

# With a shorter limit a suspension may be told that workers are apart because their input is late; then it ends there.
_LONG_ENOUGH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """What is drawn anew for each life, and must make no difference."""

    shuffle: Shuffle
    channel_records: int
    interval_s: float
    keep: int
    alignment_timeout_s: float
    transaction_timeout_s: float

    def __str__(self) -> str:
        return (
            f"shuffled within {self.shuffle.window} turns, channels of {self.channel_records} records, a checkpoint "
            f"every {self.interval_s:.3f} s"
        )


class Life:
    """A job in an event loop of its own, which goes no further than it is told to.

    One run of a simulated job, from its start to its end or its crash.
    """

    def __init__(self, world: World, number: int, make_flow: MakeFlow, settings: LifeSettings) -> None:
        self.world = world
        self.number = number
        self._make_flow = make_flow
        self._settings = settings
        self.connection = NetworkConnection(world.network)
        self.cluster = SimulatedTopics(world.broker, self.connection, world.look)
        self.loop = SimulatedEventLoop(world.time, settings.shuffle, world.trace)
        self.job: Job | None = None
        self._bounded_sources: frozenset[str] = frozenset()
        self._has_unbounded_source = False
        self.is_stopping = False
        """Whether it was told to end."""
        self._is_suspending = False
        self.was_paused = False
        """Whether others have begun while it lived."""
        world.network.event(f"run {number} begins: {settings}")
        self._main = self.loop.create_task(self._live(), name=f"run {number}")

    async def _live(self) -> JobState:
        flow = self._make_flow(Simulation(self.world, self.cluster, self.number))
        sources = [step for step in flow.steps if step.source is not None]
        self._bounded_sources = frozenset(step.name for step in sources if step.bounded)
        self._has_unbounded_source = len(self._bounded_sources) < len(sources)
        settings = self._settings
        self.job = await flow.start(
            clock=TaskClock(self.world.time),
            new_id=self.world.new_id,
            channel_limits=ChannelLimits(records=settings.channel_records),
            checkpoints=Checkpoints(
                SimulatedStore(self.world.store.another(), self.connection),
                interval_s=settings.interval_s,
                keep=settings.keep,
                alignment_timeout_s=settings.alignment_timeout_s,
                transaction_timeout_s=settings.transaction_timeout_s,
            ),
        )
        return (await self.job.wait()).state

    # -- going on --------------------------------------------------------------------------------------

    def go_on(self, turns: int) -> None:
        """Take so many turns, fewer where it ends or something is found to be wrong."""
        trace, until = self.world.trace, self.world.trace.turns + turns
        self.loop.run(lambda: self.is_over or trace.turns >= until or self.world.violation is not None)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended by itself."""
        return self._main.done()

    @property
    def has_read_all(self) -> bool:
        """Whether nothing more comes in, and all that came was read."""
        return (
            self.job is not None
            and self.world.is_fed
            and not any(any(reader.lag().values()) for reader in self.cluster.readers)
            and all(
                task.ended
                for task in self.job.statistics().tasks
                if task.steps[0].step in self._bounded_sources
            )
        )

    @property
    def goes_on_for_ever(self) -> bool:
        """Whether it ends only if it is told to."""
        return self._has_unbounded_source and not self.is_stopping

    def stop(self, mode: StopMode) -> None:
        """Have the job stop; it needs turns for that."""
        assert self.job is not None
        self.is_stopping = True
        self._is_suspending |= mode == "suspend"
        self.world.network.event(f"run {self.number} is to stop: {mode}")
        self.loop.create_task(self._stop(self.job, mode), name=f"stop run {self.number}")

    async def _stop(self, job: Job, mode: StopMode) -> None:
        try:
            await job.stop(mode)
        except Exception as error:
            # Whoever waits for the job is told, too.
            self.world.network.event(f"run {self.number} cannot stop: {type(error).__name__}")

    def lose_transactions(self) -> bool:
        """Let another owner open the job's transactions; says whether it has any."""
        for transactional_id in self.cluster.transactional_ids:
            self.world.network.event(f"another owner opens the transactions {transactional_id!r}")
            topic = self.world.broker.topic("anything")
            at_once(at_once(topic.open_transactions(transactional_id)).close())
        return bool(self.cluster.transactional_ids)

    # -- end -------------------------------------------------------------------------------------------

    def ending(self) -> Ending:
        """How it has ended; raises what it failed with, unless a fault has led to that."""
        error = self._main.exception()
        if error is None:
            state: JobState = self._main.result()
            self.world.network.event(f"run {self.number} is {state}")
            return state
        self.world.network.event(f"run {self.number} fails: {_first_line(error)}")
        faults = _FAULTS_OF_THE_PAUSED if self.was_paused else _FAULTS
        if self._is_suspending and self._settings.alignment_timeout_s < _LONG_ENOUGH_S:
            faults = (*faults, WorkersApart)
        if isinstance(error, Exception) and _comes_from(error, faults):
            return "failed by a fault"
        raise error

    def crash(self) -> None:
        """End it between two turns; nothing of it runs any more."""
        self.world.network.event(f"run {self.number} crashes")
        self.dispose()

    def dispose(self) -> None:
        """Let go of all that is left of it."""
        self.connection.cut()
        drop_all(self.loop)


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
