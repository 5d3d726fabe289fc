"""Jobs of one flow in one event loop, each as in a process of its own, whose channels and messages go through links."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any

import msgspec
from processes.pipes import MovingPipe, Owner, identity

from streamiter import Flow
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.messages import Handler
from streamiter.engine.plan.placement import Placement
from streamiter.engine.plan.plan import first_process
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import ProcessLink
from streamiter.engine.processes.remote_channel import LinkChannels
from streamiter.values.deferred import PlainValue


@dataclass
class LinkMessages:
    """The messages of one process, over its links to the others."""

    links: dict[int, ProcessLink] = field(default_factory=dict)
    handlers: dict[str, Handler] = field(default_factory=dict)

    def connect(self, process: int, link: ProcessLink, owner: Owner) -> None:
        self.links[process] = link
        owner.on_message = lambda _, message: self.handlers[message[0]](process, *message[1:])

    def send(self, process: int, kind: str, *contents: PlainValue) -> Callable[[], None]:
        return self.links[process].send_message([kind, *contents])

    def handle(self, kind: str, handler: Handler) -> None:
        assert kind not in self.handlers
        self.handlers[kind] = handler

    @property
    def others(self) -> Mapping[int, LinkChannels]:
        return {process: LinkChannels(link) for process, link in self.links.items()}


Options = JobOptions | Callable[[int], JobOptions]
"""The options of all processes, or those of each."""


def linked_jobs(flows: Sequence[Flow], messages: Sequence[LinkMessages], options: Options | None = None) -> list[Any]:
    """Make the job, and the followers of the other processes, which get the placement as bytes.

    Their links are in their messages.
    """
    given = options or JobOptions()
    first = first_process(flows[0].name, flows[0].steps, len(flows))
    placement = msgspec.msgpack.decode(msgspec.msgpack.encode(first.placement), type=Placement)
    processes = [first, *(OwnProcess(placement, number) for number in range(1, len(flows)))]
    return [
        (JobFollower if own.number else Job)(
            flow.name,
            flow.steps,
            flow.plain_data,
            given(own.number) if callable(given) else given,
            replace(own, others=messages[own.number].others, messages=messages[own.number]),
        )
        for flow, own in zip(flows, processes, strict=True)
    ]


def piped_jobs(flow: Flow, processes: int, seed: int, options: Options) -> list[Any]:
    """Make jobs of a flow whose links deliver pieces of random lengths; fewer jobs if its parallelism is lower."""
    return piped_jobs_of([flow] * min(processes, max(step.parallelism for step in flow.steps)), seed, options)


def piped_jobs_of(flows: Sequence[Flow], seed: int, options: Options) -> list[Any]:
    """Make jobs of which each process has built its own flow."""
    random = Random(seed)
    messages = [LinkMessages() for _ in flows]
    clock = (options(0) if callable(options) else options).clock
    for pair in combinations(range(len(flows)), 2):
        owners = Owner(), Owner()
        ends: Any = [
            ProcessLink(identity(number), owner, FrameEncoding(flows[number].plain_data), clock)
            for number, owner in zip(pair, owners, strict=True)
        ]
        MovingPipe(*ends, random)
        for number, other, end, owner in zip(pair, reversed(pair), ends, owners, strict=True):
            messages[number].connect(other, end, owner)
    return linked_jobs(flows, messages, options)


@dataclass
class JoinedJobs:
    """The job, which is in process 0, and the followers of the other processes, not started."""

    jobs: list[Any]

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


def joined_jobs(flows: Sequence[Flow], options: Options | None = None) -> JoinedJobs:
    """Make the job of each process from its own flow and its own ``options``, with links between them."""
    return JoinedJobs(piped_jobs_of(flows, 0, options or JobOptions()))


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
