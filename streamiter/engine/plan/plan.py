"""The plan of a job: its tasks in one process, and the channels between them.

The :class:`Planner` follows the :class:`~streamiter.engine.plan.placement.Placement`. It makes the operators of the
subtasks in its process, and their channels: for a channel with one end in another process, its own half. For a feedback
edge it makes feedback channels. Then it makes a task for each subtask of the first step of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from streamiter.engine.graph.channels import Channel, Intake
from streamiter.engine.graph.feedback import (
    AttachedBoundary,
    FeedbackChannel,
    FeedbackDeparture,
    FeedbackLimits,
    Surroundings,
    spill_queue,
)
from streamiter.engine.graph.graph import SINGLE_INPUT, Edge, Step, edge_key, leaves_loop, order_numbers, read_to_end
from streamiter.engine.graph.output import ChannelOutput, EdgeWriter, FeedbackWriter, Writer
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.order import ARRIVAL, BY_EPOCH, BY_EPOCH_THEN_PORT
from streamiter.engine.inbox.port_log import Port, PortOrigin
from streamiter.engine.inbox.port_progress import AwaitedInput
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.placement import PlacedEdge, place
from streamiter.engine.states.backends import JobStates
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.engine.tasks.chain import Rounds
from streamiter.engine.tasks.feeder import EventTimeInput, Feeder, SinkEncoding
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.making import check_not_shared, make_source, operator_of, operators_of
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import Acknowledge
from streamiter.engine.tasks.topic_feedback import TopicFeedback
from streamiter.operators.event_time import AssignEventTime, TellsOrder
from streamiter.operators.operator import JobScope, Progress
from streamiter.operators.output import follow_watermarks, report_rejected, trace_origins
from streamiter.operators.source import TellsEnd
from streamiter.topics.source_and_sink import DecodeValues, TopicSink
from streamiter.values.origins import Passes
from streamiter.values.plain_data import PlainData

if TYPE_CHECKING:
    from concurrent.futures import Executor


_AnyChannel: TypeAlias = Channel | FeedbackChannel | FeedbackDeparture


def first_process(flow: str, steps: Sequence[Step], processes: int = 1) -> OwnProcess:
    """Make an operator of each step, and decide the placement; the result is for process 0.

    Raises GraphError for a factory that does not work, and for a flow that cannot run in this many processes.
    """
    operators = {step: operators_of(step, [0], None)[0] for step in steps}
    return OwnProcess(place(flow, steps, operators, processes), operators=operators)


@dataclass
class Planner:
    """Turns the steps of a job into the tasks of one process; used once."""

    own: OwnProcess
    """The process, and the placement of the flow."""
    steps: Sequence[Step]
    """The steps of the flow, upstream first."""
    options: JobOptions
    """The options of the job."""
    scope: JobScope
    """Objects that operators of the job share."""
    plain_data: PlainData
    """The encoding of the flow."""
    states: JobStates
    """Where keyed states are kept."""
    acknowledge: Acknowledge
    """Called by each task that has passed a barrier."""
    executor: Executor | None = None
    """The threads for steps that run in threads."""
    topic_feedback: list[TopicFeedback] = field(default_factory=list, init=False)
    """The feedback through topics that ``make_tasks`` has made."""
    departures: list[FeedbackDeparture] = field(default_factory=list, init=False)
    """The producers' halves of feedback channels that ``make_tasks`` has made."""
    encodings: dict[Step, SinkEncoding] = field(default_factory=dict, init=False)
    """The encodings for sinks in another process that ``make_tasks`` has made."""

    def make_tasks(self) -> list[Task]:
        """Return the tasks of this process, upstream first."""
        self._placed = dict(zip(self.steps, self.own.placement.steps, strict=True))
        self._chained_to = {step: step.inputs[0] for step, placed in self._placed.items() if placed.chained_to}
        self._make_operators()
        self._read_to_end = read_to_end(self.steps)
        self._cuts_by_time = not any(map(_adds_up_in_order, self.steps))
        self._connect_steps()
        tasks = [
            self._make_task(step, subtask)
            for step in self.steps
            if step not in self._chained_to
            for subtask in self._subtasks(step)
        ]
        self._connect_intakes(tasks)
        return tasks

    def _make_operators(self) -> None:
        made = self.own.operators
        self._operators = {step: operators_of(step, self._subtasks(step), made.get(step)) for step in self.steps}
        check_not_shared(self._operators)
        order = order_numbers(self.steps)
        for step, operators in self._operators.items():
            for operator in operators.values():
                if step in order:
                    assert isinstance(operator, TellsOrder)
                    operator.order_number = order[step]
                if self.own.number:
                    self._placed[step].check_operator(step, operator)

    def _subtasks(self, step: Step) -> list[int]:
        """Return the subtasks of a step that are in this process."""
        processes = self._placed[step].processes
        return [subtask for subtask, process in enumerate(processes) if process == self.own.number]

    def _connect_steps(self) -> None:
        """Find the readers of each step, and make the channels of all edges that are not chained."""
        self._channels: dict[Edge, Sequence[Sequence[_AnyChannel | None]]] = {}
        self._outgoing: dict[Edge, list[list[FeedbackChannel]]] = {}
        self._intakes_elsewhere: dict[Channel, Intake] = {}
        self._readers: dict[Step, list[tuple[Step, Edge]]] = {step: [] for step in self.steps}
        for step, placed in self._placed.items():
            if any(edge.feedback_topic is not None for edge in step.inputs):
                self._feed_back_through_topic(step)
            for edge in step.inputs:
                self._readers[edge.upstream].append((step, edge))
            for edge, numbers in zip(step.inputs, placed.edges, strict=False):  # A chained step has no channels.
                if edge not in self._channels:
                    self._channels[edge] = self._make_channels(step, edge, numbers)

    def _chain(self, first: Step) -> list[Step]:
        chain = [first]
        for step in chain:
            chain.extend(reader for reader, edge in self._readers[step] if self._chained_to.get(reader) is edge)
        return chain

    # -- channels --------------------------------------------------------------------------------------

    def _make_channels(self, step: Step, edge: Edge, numbers: PlacedEdge) -> list[list[_AnyChannel | None]]:
        """Return a channel for each upstream and downstream subtask; None for a pair without one in this process."""
        return [
            [self._channel_between(step, edge, numbers, source, target) for target in range(step.parallelism)]
            for source in range(edge.upstream.parallelism)
        ]

    def _feed_back_through_topic(self, step: Step) -> None:
        feedback = TopicFeedback(
            step,
            run_id=self.options.new_id(),
            start=self.options.new_id(),
            plain_data=self.plain_data,
            clock=self.options.clock,
        )
        self.topic_feedback.append(feedback)
        self._channels.update(feedback.returning)
        self._outgoing.update(feedback.outgoing)

    def _channel_between(
        self, step: Step, edge: Edge, numbers: PlacedEdge, source: int, target: int
    ) -> _AnyChannel | None:
        number, own = numbers.number(source, target), self.own.number
        departs_from = self._placed[edge.upstream].processes[source]
        arrives_in = self._placed[step].processes[target]
        if number is None or own not in (departs_from, arrives_in):
            return None
        name = f"{edge.upstream.name}[{source}] → {step.name}[{target}]"
        if departs_from == arrives_in:
            return self._make_channel(name, edge.feedback)
        if edge.feedback is not None:
            return self._half_of_feedback(step, name, number, departs_from, arrives_in)
        if own == departs_from:
            neighbours = self._neighbours(step, target)
            return self.own.others[arrives_in].departing(
                number, name, self.options.channel_limits, neighbours=neighbours
            )
        channel, intake = self.own.others[departs_from].arriving(number, name, self.options.channel_limits)
        self._intakes_elsewhere[channel] = intake
        return channel

    def _half_of_feedback(self, head: Step, name: str, number: int, source: int, target: int) -> _AnyChannel:
        queue = spill_queue(name, head.limits, self.plain_data)
        if self.own.number == target:
            return self.own.others[source].arriving_feedback(number, name, queue)
        departure = self.own.others[target].departing_feedback(number, name, queue)
        self.departures.append(departure)
        self.scope.get((head, "departures"), list[FeedbackDeparture]).append(departure)
        return departure

    def _make_channel(self, name: str, feedback: FeedbackLimits | None) -> _AnyChannel:
        if feedback is None:
            return self._bounded_channel(name)
        return FeedbackChannel(name, spill_queue(name, feedback, self.plain_data))

    def _neighbours(self, step: Step, target: int) -> int:
        """Return the number of channels from other processes to a subtask."""
        placed = self._placed[step]
        return sum(
            process != placed.processes[target] and numbers.number(source, target) is not None
            for edge, numbers in zip(step.inputs, placed.edges, strict=True)
            for source, process in enumerate(self._placed[edge.upstream].processes)
        )

    def _bounded_channel(self, name: str) -> Channel:
        limits = self.options.channel_limits
        return Channel(name, limit_records=limits.records, limit_bytes=limits.size_bytes)

    def _replay_cache(self, name: str, memory_limit_bytes: int, limits: FeedbackLimits) -> ReplayCache:
        import tempfile

        return ReplayCache(
            name=name,
            plain_data=self.plain_data,
            memory_limit_bytes=memory_limit_bytes,
            disk_limit_bytes=limits.disk_bytes,
            directory=limits.directory or tempfile.gettempdir(),
        )

    # -- tasks -----------------------------------------------------------------------------------------

    def _make_task(self, first: Step, subtask: int) -> Task:
        name = f"{first.name}[{subtask}]"
        feeder, ports, input_names = None, self._ports(first, subtask), first.input_names()
        if first.source is not None:
            source, is_awaited = make_source(first), first in self._read_to_end
            if isinstance(source, TellsEnd):
                source.tells_end = is_awaited and not first.bounded
            channel = self._bounded_channel(f"{name} ← source")
            feeder = Feeder(source, channel, first.name, self.options.clock, is_awaited=is_awaited, note=self.own.note)
            ports = [Port(0, SINGLE_INPUT, feeder.channel)]
            input_names = [SINGLE_INPUT]
        inbox = self._make_inbox(first, name, ports)
        feedback = [port.channel for port in ports if isinstance(port.channel, FeedbackChannel)]
        self._attach(first, subtask, name, feedback, inbox)
        progress = Progress()
        instances = self._instances(first, subtask, progress, inbox)
        rounds = None
        if self._placed[first].traits.per_round:
            rounds = Rounds(instances[first], inbox, progress, lambda: operator_of(first))
        task = Task(
            name=name,
            inbox=inbox,
            instances=list(instances.values()),
            input_names=input_names,
            writers=self._connect(instances, subtask, progress),
            progress=progress,
            clock=self.options.clock,
            acknowledge=self.acknowledge,
            plain_data=self.plain_data,
            executor=self.executor,
            feeder=feeder,
            rounds=rounds,
            cuts_by_time=self._cuts_by_time,
        )
        for step, instance in instances.items():
            if isinstance(instance.operator, AssignEventTime):
                is_one = bool(getattr(first.topic, "is_one_sequence", False))
                decoder, by_partition = self._decoder(instances, step), self._reads_partitions(step) and not is_one
                instance.operator.attach(EventTimeInput(task.parts, decoder, by_partition=by_partition), instance.out)
        return task

    def _decoder(self, instances: Mapping[Step, OperatorInstance], step: Step) -> DecodeValues | None:
        """Return the operator that decodes the topic right before a step of the same task, if there is one."""
        edge = self._chained_to.get(step)
        operator = None if edge is None else instances[edge.upstream].operator
        return operator if isinstance(operator, DecodeValues) else None

    def _make_inbox(self, first: Step, name: str, ports: Sequence[Port]) -> Inbox:
        traits, by_port = self._placed[first].traits, self._merges_in_order(first, ports)
        in_order = traits.epochs_in_order and not traits.boundary
        return Inbox(
            ports,
            order=BY_EPOCH_THEN_PORT if by_port else BY_EPOCH if in_order else ARRIVAL,
            epochs_in_order=in_order,
            make_queue=lambda: spill_queue(name, first.limits, self.plain_data),
            make_feedback_queue=lambda: spill_queue(f"{name}, feedback of a checkpoint", first.limits, self.plain_data),
            timed_ports=self._timed_ports(first, ports),
            awaited=self._awaited_input(first),
        )

    def _awaited_input(self, step: Step) -> AwaitedInput | None:
        if step.awaited_input is None or step.loop is not None:  # In a loop, the table ends.
            return None
        needs_barrier = step.others_follow and step.parallelism > 1 and self.options.checkpoints is not None
        return AwaitedInput(step.awaited_input, step.others_follow, needs_barrier)

    def _timed_ports(self, first: Step, ports: Sequence[Port]) -> list[int]:
        """Return the ports that bring event-time watermarks for the step: not feedback, and none in rounds."""
        edges = {edge_key(first, edge): edge for edge in first.edges if edge.upstream.watermarked}
        if self._placed[first].traits.per_round:
            return []
        return [port.index for port in ports if port.origin is not None and port.origin[:4] in edges]

    def _attach(self, first: Step, subtask: int, name: str, feedback: Sequence[FeedbackChannel], inbox: Inbox) -> None:
        operator = self._operators[first][subtask]
        if isinstance(operator, AttachedBoundary):
            operator.attach(
                Surroundings(
                    feedback,
                    inbox,
                    make_replay_cache=lambda memory: self._replay_cache(name, memory, first.limits),
                    member=self._placed[first].first_member + subtask,
                )
            )

    def _ports(self, step: Step, subtask: int) -> list[Port]:
        ports: list[Port] = []
        for edge, placed in zip(step.inputs, self._placed[step].edges, strict=True):
            key = edge_key(step, edge)
            for source, channels in enumerate(self._channels.get(edge, ())):
                if isinstance(channel := channels[subtask], (Channel, FeedbackChannel)):
                    ports.append(
                        Port(
                            len(ports),
                            edge.input_name,
                            channel,
                            one_at_a_time=placed.one_at_a_time,
                            origin=PortOrigin(*key, source),
                        )
                    )
        return ports

    def _merges_in_order(self, step: Step, ports: Sequence[Port]) -> bool:
        """Return whether the inbox of a step hands over the records of several channels in a fixed order.

        In a synchronous loop the results must not depend on the speed of tasks. The feedback of heads is set
        aside by epoch and port. Entrances may ask for it in other loops, too.
        """
        traits = self._placed[step].traits
        return (
            step.loop is not None
            and (step.loop.max_epochs_ahead == 0 or (traits.boundary and traits.epochs_in_order))
            and step.service is None
            and not traits.any_order
            and sum(not port.is_feedback for port in ports) > 1
        )

    def _instances(self, first: Step, subtask: int, progress: Progress, inbox: Inbox) -> dict[Step, OperatorInstance]:
        instances = {
            step: OperatorInstance(
                step,
                self._operators[step][subtask],
                subtask,
                clock=self.options.clock,
                progress=progress,
                scope=self.scope,
                post=inbox.post,
                encode=self.plain_data.encode,
                states=self.states,
                note=self.own.note,
            )
            for step in self._chain(first)
        }
        for step, instance in instances.items():
            report_rejected(instance.out, self.options.on_rejected)
            if self._knows_origin(step):
                trace_origins(instance.out, progress, self._passes(step))
        return instances

    def _knows_origin(self, step: Step) -> bool:
        """Return whether all input of the step comes from the batch that its task is handling."""
        edge = self._chained_to.get(step)
        return edge is None or self._passes_origin(edge.upstream)

    def _passes_origin(self, step: Step) -> bool:
        """Return whether all output of the step comes from the batch that its task is handling."""
        return self._placed[step].traits.emits_at_once and self._knows_origin(step)

    def _reads_partitions(self, step: Step) -> bool:
        """Return whether the step sees the batches of a partition as they were read."""
        edge = self._chained_to.get(step)
        return edge is None or (self._placed[edge.upstream].traits.stateless and self._reads_partitions(edge.upstream))

    def _passes(self, step: Step) -> Passes:
        """Return what the output of the step has of the origin of the batch that it was made of."""
        if not self._passes_origin(step):
            return "no origin"
        return "originals" if any(reader in self._before_letters for reader, _ in self._readers[step]) else "ranges"

    def _keeps(self, edge: Edge, reader: Step) -> Passes:
        """Return what the records of an edge have of their origin."""
        if not self._passes_origin(edge.upstream):
            return "no origin"
        return "originals" if reader in self._before_letters else "ranges"

    @cached_property
    def _before_letters(self) -> frozenset[Step]:
        """The steps that must know the originals of their input: the step, or one behind it, writes dead letters."""
        found: set[Step] = set()
        for step in reversed(self.steps):
            behind = self._placed[step].traits.emits_at_once and any(
                reader in found for reader, _ in self._readers[step]
            )
            if step.policy == "dead_letter" or behind:
                found.add(step)
        return frozenset(found)

    def _connect(self, instances: dict[Step, OperatorInstance], subtask: int, progress: Progress) -> list[Writer]:
        writers: list[Writer] = []
        for step, instance in instances.items():
            for reader, edge in self._readers[step]:
                if self._chained_to.get(reader) is edge:
                    instance.out.connect(instances[reader].entry(SINGLE_INPUT), edge.tag)
                    if instances[reader].times is not None:
                        follow_watermarks(instance.out, instances[reader].advance)
                else:
                    writer = self._writer(edge, subtask, progress, reader)
                    writers.append(writer)
                    instance.out.connect(writer, edge.tag)
                    follow_watermarks(instance.out, writer.control)
        return writers

    def _writer(self, edge: Edge, subtask: int, progress: Progress, reader: Step) -> Writer:
        given = self._outgoing.get(edge, self._channels[edge])
        channels = [channel for channel in given[subtask] if channel is not None]
        split = None if len(channels) == 1 else edge.partitioning.splitter(subtask, len(channels))
        if edge.feedback is not None:
            entrances = [channel for channel in channels if not isinstance(channel, Channel)]
            return FeedbackWriter(split, entrances, progress, reader.name)
        return EdgeWriter(
            split,
            [ChannelOutput(channel) for channel in channels if isinstance(channel, Channel)],
            progress,
            reader.name,
            leaves_loop=leaves_loop(edge, reader),
            keeps=self._keeps(edge, reader),
            encode=self._encoding(reader),
        )

    def _encoding(self, reader: Step) -> SinkEncoding | None:
        """Return the encoding for a sink whose subtasks are all in process 0, if this process is another one."""
        if not self.own.number or not self._placed[reader].traits.takes_encoded:
            return None
        if reader not in self.encodings:
            sink = operator_of(reader)
            self._placed[reader].check_operator(reader, sink)
            assert isinstance(sink, TopicSink)
            self.encodings[reader] = SinkEncoding(reader, sink)
        return self.encodings[reader]

    def _connect_intakes(self, tasks: Sequence[Task]) -> None:
        """Tell each channel the sources of its records, and the most channels between them and its reader."""
        way: dict[Step, int] = {}
        for step in self.steps:
            hop = 0 if step in self._chained_to else 1
            way[step] = max((way[edge.upstream] + hop for edge in step.edges), default=0)
        intakes: dict[Channel, tuple[Intake, ...]] = {
            channel: (intake,) for channel, intake in self._intakes_elsewhere.items()
        }
        for task in tasks:
            step, by_input = task.first.step, dict[str, dict[Intake, None]]()
            for port in task.inbox.ports:
                if isinstance(port.channel, Channel):
                    by_input.setdefault(port.input_name, {}).update(dict.fromkeys(intakes.get(port.channel, ())))
            # Records of an awaited table go no further, and a step behind may hold records while this one waits again.
            awaited = by_input.pop(step.awaited_input or "", {})
            known = {intake: None for of_input in by_input.values() for intake in of_input}
            if step.others_follow:
                elsewhere = [intake for intake in known if intake in self._intakes_elsewhere.values()]
                task.inbox.hold_back(intake for intake in known if intake not in elsewhere)
                task.holds_back = elsewhere
                known |= awaited
            sources = tuple(known) if task.feeder is None else (task.feeder.intake,)
            for channel in (lane.channel for writer in task.writers for lane in writer.lanes):
                intakes[channel] = sources
                channel.shut_intakes(sources, way[step] + 1)


def _adds_up_in_order(step: Step) -> bool:
    """Return whether a step adds up numbers of several tasks in a fixed order, so that runs are equal to the bit.

    Workers of a parameter server do so, and loops that are not asynchronous. Their batches must not be cut by time.
    """
    return step.service is not None or (step.loop is not None and step.loop.max_epochs_ahead is not None)
