"""Jobs of one flow in one event loop, each as in a process of its own, whose channels and messages go through links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any

from processes.pipes import MovingPipe, Owner, identity

from streamiter import Flow
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.messages import Handler
from streamiter.engine.plan.plan import first_process
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import ProcessLink
from streamiter.engine.processes.remote_feedback import LinkChannels
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
    """Make the job, and the followers of the other processes; their links are in their messages."""
    given = options or JobOptions()
    first = first_process(flows[0].name, flows[0].steps, len(flows))
    processes = [first, *(OwnProcess(first.placement, number) for number in range(1, len(flows)))]
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
