"""Ways to run a loop: a case is built once, and runs in processes, through topics, with restores, in simulated time."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from iteration.iteration_support import Log, Witness, cut_items, ended, run_shuffled, with_coroutines
from iteration.topic_loops_support import MakeTopic
from processes.linked_jobs import piped_jobs
from support.waiting import PATIENCE_S

from streamiter import (
    Checkpoints,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    feedback_through,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError, ConfigurationError
from streamiter.operators.source import Collected
from streamiter.testing.simulated_time import SimulatedTime, TaskClock, Trace, where_tasks_wait
from streamiter.testing.simulation.event_loop import Shuffle, SimulatedEventLoop
from streamiter.topics import MemoryBroker, Topic
from streamiter.values.helpers.clock import Clock, SystemClock

T = TypeVar("T")
Ahead = int | Literal["unbounded"] | None
Body = Callable[[list[Stream], list[Stream]], IterationBodyResult[Any]]

RARELY_S = 100.0
# A loop that takes longer in simulated time stands still.
WITHIN_S = 400.0


class Remembering(Witness):
    """A witness with its log in its snapshot: after a restore the log continues at the snapshot."""

    def snapshot(self) -> Any:
        return [entry for entry in self._log if entry != ("close",)]

    def restore(self, state: Any) -> None:
        self._log[:] = [tuple(entry) for entry in state]


class InThreads(Remembering):
    """Handles its records in a thread."""

    runs_in_thread = True


WithCoroutines = with_coroutines(Remembering)


@dataclass
class Loop:
    """What a way gives to a case: the flow, the speed of its sources, the path of its feedback, and its witnesses."""

    flow: Flow
    seed: int
    ahead: Ahead = 0
    topics: Sequence[Topic] | None = None
    kind: type[Witness] = Remembering

    def __post_init__(self) -> None:
        self.log: Log = {}
        self.heads: list[int] = []
        """The number of heads of each feedback stream so far."""

    def items(self, items: Any, parallelism: int = 1) -> Stream:
        return cut_items(self.flow, items, seed=self.seed, parallelism=parallelism)

    def witness(self, given: Any, name: str, parallelism: int | None = None, **calls: Any) -> Stream:
        """Add a witness behind a stream, or behind connected streams."""
        stream: Stream = given.process(lambda: self.kind(self.log, **calls), name=name, parallelism=parallelism)
        return stream

    def iterate(self, initial: Sequence[Stream], data: Sequence[Any], body: Body, **config: Any) -> Any:
        """Add an iteration whose feedback takes the path of this way."""

        def on_its_way(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult[Any]:
            made = body(variables, entered)
            streams = cast("Sequence[Stream]", made.feedback_variable_streams)
            feedback = [self._back(stream, first.parallelism) for stream, first in zip(streams, initial, strict=True)]
            return IterationBodyResult(feedback, made.output_streams, made.termination_criteria)

        is_unbounded = config.pop("is_unbounded", self.ahead == "unbounded")
        config.setdefault("max_epochs_ahead", None if self.ahead == "unbounded" else self.ahead)
        iterate = iterate_unbounded_streams if is_unbounded else iterate_bounded_streams_until_termination
        return iterate(initial, data, on_its_way, IterationConfig(**config))

    def collect(self, initial: Sequence[Stream], data: Sequence[Any], body: Body, **config: Any) -> list[Collected]:
        return [output.collect() for output in self.iterate(initial, data, body, **config)]

    def _back(self, stream: Stream, heads: int) -> Any:
        self.heads.append(heads)
        return stream if self.topics is None else feedback_through(stream, self.topics[len(self.heads) - 1])


Build = Callable[[Loop], T]


def channel_limits(seed: int) -> ChannelLimits:
    """Return limits of one to three records for each channel, or, sometimes, of many."""
    return ChannelLimits(records=random.Random(seed).choice([1, 1, 2, 2, 3, 1000]))


def simulated(main: Callable[[Clock], Awaitable[T]], seed: int) -> T:
    """Run ``main`` in simulated time; the seed decides which task has the next turn."""
    time = SimulatedTime()
    events = SimulatedEventLoop(time, Shuffle(seed, window=random.Random(seed).choice([1, 4, 16, 64])), Trace())

    async def run() -> T:
        return await main(TaskClock(time))

    task = events.create_task(run())
    events.run(until=lambda: task.done() or time.now_s > WITHIN_S)
    assert task.done(), where_tasks_wait(events.unfinished)
    events.close()
    return task.result()


@dataclass(frozen=True)
class Way:
    """How a loop is run: in how many processes, through what, and how often it is stopped.

    It is stopped by a snapshot or by a checkpoint, at random moments, and aborted some turns later, or suspended.
    """

    processes: int = 1
    through_topics: bool = False
    stopped_by: Literal["snapshot", "checkpoint", "suspend"] | None = None
    is_simulated: bool = False
    kind: type[Witness] = Remembering

    def run(self, build: Build[T], seed: int, ahead: Ahead = 0, turns: int = 200) -> T:
        """Build a case, run it to its end, and return what the last build returned; a run takes about ``turns``."""
        if self.is_simulated:
            return simulated(lambda clock: self.run_on(build, seed, ahead, turns, clock=clock), seed)
        return run_shuffled(self.run_on(build, seed, ahead, turns), seed)

    async def run_on(
        self,
        build: Build[T],
        seed: int,
        ahead: Ahead = 0,
        turns: int = 200,
        *,
        make_topic: MakeTopic | None = None,
        clock: Clock | None = None,
    ) -> T:
        chosen = random.Random(seed)
        topics = await self._topics(build, seed, ahead, make_topic) if self.through_topics else None
        begin: JobSnapshot | None = None
        store = MemoryStore()
        for stops_left in range(chosen.randint(1, 3) if self.stopped_by else 0, -1, -1):
            loop = Loop(Flow("loop"), seed + stops_left, ahead, topics, self.kind)
            # Checkpoints refuse steps without a name; the order of steps is the same each time.
            with loop.flow.graph.adapting(lambda step: replace(step, has_lasting_name=True)):
                made = build(loop)
            jobs = await self._started(loop, begin, clock or SystemClock(), store)
            is_over = not stops_left
            if stops_left:
                await self._moment(chosen, turns)
                begin, is_over = await self._stopped(jobs, begin)
            if is_over:
                await (asyncio.gather(*(job.wait() for job in jobs)) if self.is_simulated else ended(*jobs))
                break
            await self._moment(chosen, 50)
            await jobs[0].stop("abort")
        return made

    async def _topics(self, build: Build[T], seed: int, ahead: Ahead, make_topic: MakeTopic | None) -> list[Topic]:
        """Create a topic for each feedback stream of the case, with a partition for each head, or some more."""
        counting = Loop(Flow("count"), seed, ahead)
        build(counting)
        broker, topics = MemoryBroker(), list[Topic]()
        for number, heads in enumerate(counting.heads):
            name, partitions = f"loop-{number}", heads + (seed + number) % 3
            if make_topic is None:
                topics.append(broker.topic(name))
                await topics[-1].create(partitions=partitions)
            else:
                topics.append(await make_topic(partitions=partitions, name=name))
        return topics

    async def _started(self, loop: Loop, begin: JobSnapshot | None, clock: Clock, store: MemoryStore) -> list[Any]:
        options: dict[str, Any] = {"channel_limits": channel_limits(loop.seed), "clock": clock}
        if self.stopped_by == "snapshot":
            return [await loop.flow.start(snapshot=begin, **options)]
        if self.stopped_by is not None:
            jobs = piped_jobs(
                loop.flow,
                self.processes,
                loop.seed,
                lambda _: JobOptions(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S), **options),
            )
        else:
            jobs = piped_jobs(loop.flow, self.processes, loop.seed, JobOptions(**options))
        await asyncio.gather(*(job.start() for job in jobs))
        return jobs

    async def _moment(self, chosen: random.Random, turns: int) -> None:
        if self.is_simulated:
            await asyncio.sleep(3 * chosen.random() ** 4)
        else:
            for _ in range(int(turns * chosen.random() ** 3)):
                await asyncio.sleep(0)

    async def _stopped(self, jobs: list[Any], begin: JobSnapshot | None) -> tuple[JobSnapshot | None, bool]:
        """Take a snapshot or a checkpoint, or suspend the job.

        Return the snapshot from which the next run begins, and whether this run has reached its end.
        """
        if self.stopped_by == "suspend":
            return begin, (await asyncio.wait_for(jobs[0].stop("suspend"), PATIENCE_S)).state == "finished"
        try:
            if self.stopped_by == "snapshot":
                begin = await asyncio.wait_for(jobs[0].snapshot(), PATIENCE_S)
            else:
                await asyncio.wait_for(jobs[0].checkpoint(), PATIENCE_S)
        except (CheckpointError, ConfigurationError):  # The job has ended.
            return begin, self.stopped_by == "checkpoint"
        return begin, False


WAYS = {
    "in memory": Way(),
    "in two processes": Way(processes=2),
    "in three processes": Way(processes=3),
    "in simulated time": Way(is_simulated=True),
    "restored": Way(stopped_by="snapshot"),
    "restored in processes": Way(processes=2, stopped_by="checkpoint"),
    "through topics": Way(through_topics=True),
    "restored through topics": Way(through_topics=True, stopped_by="snapshot"),
    "crashed through topics": Way(through_topics=True, stopped_by="checkpoint"),
    "suspended through topics": Way(through_topics=True, stopped_by="suspend"),
    "with coroutines": Way(kind=WithCoroutines),
    "in threads": Way(kind=InThreads),
}
