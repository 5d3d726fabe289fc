"""Jobs of one flow in one event loop, each as in a process of its own; channels between them are in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from streamiter import Flow
from streamiter.engine.graph.channels import Channel, Intake
from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackDeparture
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions, OwnProcess
from streamiter.engine.plan.messages import Handler, Messages
from streamiter.engine.plan.placement import Placement
from streamiter.engine.plan.plan import first_process
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.deferred import PlainValue
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Control, DataBatch


class ChannelBetween(Channel):
    """Both halves of a channel; a batch is encoded on its way, as it would be between processes."""

    def try_put(self, batch: DataBatch) -> bool:
        encoding = FrameEncoding(PlainData())
        body = bytearray().join(encoding.encode_batch(batch, 0))
        return super().try_put(encoding.decode_batch(memoryview(body))[0])


class IntakeElsewhere(Intake):
    """Shuts the sources that the producer's process knows."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def shut(self) -> None:
        for intake in self._channel._intakes:
            intake.shut()

    def open(self) -> None:
        for intake in self._channel._intakes:
            intake.open()


@dataclass
class FeedbackBetween:
    """The producer's half of a feedback channel, whose other half is in the same process in truth."""

    arriving: FeedbackChannel

    def put(self, batch: DataBatch) -> None:
        plain = PlainData()
        self.arriving.put(DataBatch(plain.decode(plain.encode(batch.records)), batch.epoch))

    def put_control(self, control: Control) -> None:
        self.arriving.put_control(control)

    def waiting(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Leave the feedback to the other half."""


@dataclass
class Joint:
    """The channels between two processes (``RemoteChannels``): each has one departing and one arriving half."""

    departing_names: dict[int, str] = field(default_factory=dict)
    arriving_names: dict[int, str] = field(default_factory=dict)
    channels: dict[int, ChannelBetween] = field(default_factory=dict)
    feedback: dict[int, FeedbackChannel] = field(default_factory=dict)
    neighbours: dict[str, int] = field(default_factory=dict)
    """By the name of a channel, how many channels from other processes lead to its reader."""

    def _channel(self, number: int, name: str, limits: ChannelLimits) -> ChannelBetween:
        made = ChannelBetween(name, limit_records=limits.records, limit_bytes=limits.size_bytes)
        return self.channels.setdefault(number, made)

    def departing(self, number: int, name: str, limits: ChannelLimits, *, neighbours: int) -> Channel:
        assert number not in self.departing_names
        self.neighbours[name] = neighbours
        self.departing_names[number] = name
        return self._channel(number, name, limits)

    def arriving(self, number: int, name: str, limits: ChannelLimits) -> tuple[Channel, Intake]:
        assert number not in self.arriving_names
        self.arriving_names[number] = name
        channel = self._channel(number, name, limits)
        return channel, IntakeElsewhere(channel)

    def departing_feedback(self, number: int, name: str, queue: SpillQueue) -> FeedbackDeparture:
        assert number not in self.departing_names
        self.departing_names[number] = name
        return FeedbackBetween(self.feedback.setdefault(number, FeedbackChannel(name, queue)))

    def arriving_feedback(self, number: int, name: str, queue: SpillQueue) -> FeedbackChannel:
        assert number not in self.arriving_names
        self.arriving_names[number] = name
        return self.feedback.setdefault(number, FeedbackChannel(name, queue))


class MessagesBetween:
    """Carries messages in one event loop; each travels as bytes and arrives in a later turn, in any loop in order."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[int, str], Handler] = {}
        self.under_way: dict[tuple[int, int], deque[tuple[str, bytes]]] = {}
        """By sender and receiver."""

    def of(self, process: int) -> Messages:
        """Return what this process uses."""
        return _MessagesOf(self, process)


@dataclass
class _MessagesOf:
    between: MessagesBetween
    process: int

    def send(self, process: int, kind: str, *contents: PlainValue) -> Callable[[], None]:
        under_way = self.between.under_way.setdefault((self.process, process), deque())
        under_way.append((kind, PlainData().encode(list(contents))))
        asyncio.get_running_loop().call_soon(self._arrive, process, under_way)
        return lambda: None

    def _arrive(self, process: int, under_way: deque[tuple[str, bytes]]) -> None:
        kind, contents = under_way.popleft()
        self.between.handlers[process, kind](self.process, *PlainData().decode(contents))

    def handle(self, kind: str, handler: Handler) -> None:
        assert (self.process, kind) not in self.between.handlers
        self.between.handlers[self.process, kind] = handler


@dataclass
class JoinedJobs:
    """The job, which is in process 0, and the followers of the other processes, not started."""

    jobs: list[Any]
    joints: list[Joint]
    placement: Placement

    async def run(self) -> None:
        """Run all jobs to their ends."""
        await self.start()
        await self.wait()

    async def start(self) -> None:
        """Start all jobs; if one fails, end all."""
        await self._all([job.start() for job in self.jobs])

    async def wait(self) -> None:
        """Wait until all jobs have ended; if one fails, end all."""
        await self._all([job.wait() for job in self.jobs])

    async def _all(self, calls: Sequence[Coroutine[Any, Any, object]]) -> None:
        tasks = list(map(asyncio.ensure_future, calls))
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.abort()
            raise

    async def abort(self) -> None:
        """End all jobs that have started, as with the processes of an attempt."""
        tasks = [job._coordinating if isinstance(job, Job) else job._running for job in self.jobs]
        started = [job for job, task in zip(self.jobs, tasks, strict=True) if task is not None]
        await asyncio.gather(*map(abort, started), return_exceptions=True)

    @property
    def tasks(self) -> list[list[str]]:
        """The names of the tasks of each process."""
        return [[task.name for task in job.statistics().tasks] for job in self.jobs]


def joined_jobs(flows: Sequence[Flow], options: JobOptions | Callable[[int], JobOptions] | None = None) -> JoinedJobs:
    """Make the job of each process from its own flow and its own ``options``; the placement travels as bytes."""
    given = options or JobOptions()
    joints: dict[tuple[int, int], Joint] = {}
    messages = MessagesBetween()
    first = first_process(flows[0].name, flows[0].steps, processes=len(flows))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(first.placement), type=Placement)
    jobs = []
    for number, flow in enumerate(flows):
        others = {
            other: joints.setdefault((min(number, other), max(number, other)), Joint())
            for other in range(len(flows))
            if other != number
        }
        own = OwnProcess(received, number) if number else first
        own = replace(own, others=others, messages=messages.of(number))
        kind = JobFollower if number else Job
        jobs.append(kind(flow.name, flow.steps, flow.plain_data, given(number) if callable(given) else given, own))
    return JoinedJobs(jobs, list(joints.values()), first.placement)


async def abort(job: Job | JobFollower) -> None:
    """End a job, or the tasks of one process, and wait for the end."""
    if isinstance(job, Job):
        await job.stop("abort")
    else:
        job.abort()
        await job.wait()


async def run_joined(
    build: Callable[[int], tuple[Flow, Any]], processes: int, options: JobOptions | None = None
) -> Any:
    """Run the flow that ``build(process)`` returns in this many jobs; return what process 0 got with its flow."""
    built = [build(process) for process in range(processes)]
    await joined_jobs([flow for flow, _ in built], options).run()
    return built[0][1]
