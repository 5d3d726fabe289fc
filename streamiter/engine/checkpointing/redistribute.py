"""Redistribution of a job's state to the tasks of a job with another parallelism, or with other chains.

:func:`redistribute_states` returns the state of each new task of this process. The state of a key goes to the subtask
that owns the key now; operators without keys share out their state themselves (``redistribute`` or ``share_out``), as
do sources with their positions; waiting batches go the way of their edge
(:mod:`~streamiter.engine.checkpointing.shares`). The progress of a step is one value for all its new subtasks: if
the old values differ and the difference matters, the restart is refused. Before that, :func:`fetch_topic_batches` reads
feedback out of topics whose heads have changed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

from streamiter.engine.checkpointing.shares import (
    NO_PROGRESS,
    EdgeSharing,
    InboxShares,
    OldJob,
    OldTask,
    RepeatedFrames,
    SubtaskProgress,
    join_progress,
    old_ports,
    origins,
)
from streamiter.engine.graph.feedback import TopicRange, spill_queue
from streamiter.engine.graph.graph import Step, edge_key, leaves_loop
from streamiter.engine.inbox.alignment import Logged
from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS
from streamiter.engine.plan.messages import Meeting
from streamiter.engine.states.stored import KeyShare
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.tasks.chain import is_per_round
from streamiter.engine.tasks.feeder import Feeder
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import TaskStates
from streamiter.engine.tasks.topic_returning import fetch_ranges
from streamiter.errors import StreamiterError
from streamiter.operators.keyed import KeyedOperator
from streamiter.operators.keyed_state import StateFrame
from streamiter.operators.operator import Boundary, Operator, Sharing
from streamiter.topics.topic import Topic
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock
from streamiter.values.plain_data import PlainData
from streamiter.values.subtasks import KEY_GROUPS, subtask_of_group, subtask_of_key
from streamiter.values.times import MAX_TIME, MIN_TIME

AllProgress: TypeAlias = Mapping[str, Sequence[SubtaskProgress]]
"""The progress of the subtasks of each step."""

Timer = tuple[int, Any, Any]
"""The time it is due in milliseconds, its key, its payload."""


def key_share(states: Sequence[Iterable[StateFrame]], subtask: int, subtasks: int) -> KeyShare:
    """Return the states of the keys of one new subtask, selected from all old states.

    >>> key_share([], 1, 3).groups
    range(43, 86)
    """
    groups = [group for group in range(KEY_GROUPS) if subtask_of_group(group, subtasks) == subtask]
    return KeyShare(states, range(groups[0], groups[-1] + 1) if groups else range(0))


def redistribute_operators(
    old: OldJob, step: Step, operator: Operator, states: Sequence[dict[str, PlainValue]], sharing: Sharing
) -> list[dict[str, PlainValue]]:
    """Return the states of the new operators of a step; ``operator`` is a new, unopened one."""
    subtasks = range(step.parallelism)
    operators = _of_operators(old, step, operator, [state["operator"] for state in states], sharing)
    keyed = [state["keyed"] for state in states if state["keyed"] is not None]
    is_keyed = step.keys is not None
    timers = redistribute_timers([state["timers"] for state in states], step.parallelism, by_key=is_keyed)
    takes_timers = any(state["takes timers"] for state in states)
    event_times = redistribute_event_times(
        [state.get("event time") for state in states], len(subtasks), by_key=is_keyed
    )
    return [
        {
            "operator": operators[subtask],
            "keyed": key_share(keyed, subtask, len(subtasks)) if is_keyed else None,
            "timers": timers[subtask],
            "takes timers": takes_timers,
            "event time": event_times[subtask],
        }
        for subtask in subtasks
    ]


def redistribute_event_times(
    states: Sequence[PlainValue], subtasks: int, *, by_key: bool
) -> Sequence[dict[str, PlainValue] | None]:
    """Return the event time of each new subtask: the least watermark, and its timers.

    A group of keys whose subtask was further keeps that as its *floor*: no record of it is judged by less.
    """
    known = [state for state in states if state is not None]
    if not known:
        return [None] * subtasks
    watermark = min(state["watermark"] for state in known)
    timers = redistribute_timers([state["timers"] for state in known], subtasks, by_key=by_key)
    keyed = [frames for state in known if (frames := state.get("keyed timers")) is not None]
    floors: list[dict[int, int]] = [{} for _ in range(subtasks)]
    for group in range(KEY_GROUPS) if by_key and len(known) == len(states) else ():
        before = known[subtask_of_group(group, len(states))]
        floor = max(before["watermark"], dict(before["floors"]).get(group, MIN_TIME))
        if floor > watermark:
            floors[subtask_of_group(group, subtasks)][group] = floor
    return [
        {
            "watermark": watermark,
            "passed": min(state["passed"] for state in known),
            "last": max(state["last"] for state in known) if watermark == MAX_TIME else MAX_TIME,
            "timers": timers[subtask],
            "keyed timers": key_share(keyed, subtask, subtasks) if keyed else None,
            "dropped": sum(state["dropped"] for state in known[subtask::subtasks]),
            "floors": list(floors[subtask].items()),
        }
        for subtask in range(subtasks)
    ]


def redistribute_timers(timers: Iterable[Iterable[Timer]], subtasks: int, *, by_key: bool) -> list[list[Timer]]:
    """Return the timers of each new subtask: a timer goes with its key; timers without a key go in turn.

    >>> redistribute_timers([[(5, None, "a"), (6, None, "b")], [(7, None, "c")]], 2, by_key=False)
    [[(5, None, 'a'), (7, None, 'c')], [(6, None, 'b')]]
    """
    dealt: list[list[Timer]] = [[] for _ in range(subtasks)]
    turn = 0
    for timer in (timer for of_subtask in timers for timer in of_subtask):
        _, key, _ = timer
        if by_key and key is not None:
            dealt[subtask_of_key(key, subtasks)].append(timer)
        else:
            dealt[turn % subtasks].append(timer)
            turn += 1
    return dealt


def _of_operators(
    old: OldJob, step: Step, operator: Operator, states: list[PlainValue], sharing: Sharing
) -> Sequence[PlainValue]:
    count = step.parallelism
    if all(state is None for state in states):
        return [None] * count
    if isinstance(operator, KeyedOperator):
        return [key_share(states, subtask, count) for subtask in range(count)]
    share_out: Callable[..., Any] | None = getattr(operator, "share_out", None)
    given: PlainValue = sharing
    if share_out is None:
        share_out, given = getattr(operator, "redistribute", None), count
    if share_out is None:
        raise old.refusal(
            step.name,
            f"expected the parallelism {len(states)} that it had, given {count}; its state cannot be redistributed: "
            f"keep parallelism={len(states)}, or define redistribute(states, parallelism) in "
            f"{type(operator).__name__}",
        )
    shared = _asked(old, step, share_out, states, given)
    return _checked(old, step, f"{type(operator).__name__}.redistribute", "states", shared)


def _asked(
    old: OldJob, step: Step, share_out: Callable[..., Any], of_old: Sequence[PlainValue], given: PlainValue
) -> PlainValue:
    try:
        return share_out(of_old, given)
    except StreamiterError as error:
        before = len(of_old)
        raise old.refusal(
            step.name,
            f"its {before} subtasks cannot become {step.parallelism}: {error}; keep parallelism={before}, or take "
            "another checkpoint with it",
        ) from error


def _checked(old: OldJob, step: Step, method: str, what: str, shared: PlainValue) -> Sequence[PlainValue]:
    count = step.parallelism
    if not isinstance(shared, Sequence) or isinstance(shared, (str, bytes)) or len(shared) != count:
        given = f"{len(shared)} of them" if isinstance(shared, (list, tuple)) else type(shared).__name__
        raise old.refusal(
            step.name, f"{method}: expected a list of {count} {what}, one for each subtask, given {given}"
        )
    return shared


def redistribute_positions(
    old: OldJob, step: Step, feeder: Feeder, positions: Sequence[dict[PlainValue, PlainValue]]
) -> Sequence[dict[PlainValue, PlainValue]]:
    """Return the positions of each new subtask of a source."""
    count, before = step.parallelism, len(positions)
    if count == before:
        return positions
    shared = _asked(old, step, feeder.redistribute, positions, count)
    if shared is None:
        if not any(positions):
            return [{}] * count
        raise old.refusal(
            step.name,
            f"expected the parallelism {before} that it had, given {count}; its positions cannot be redistributed: "
            f"keep parallelism={before}, or define redistribute(positions, parallelism) in its Source",
        )
    return _checked(old, step, "redistribute of its Source", "positions", shared)


ShareOut = Callable[[list[dict[str, PlainValue]]], list[dict[str, PlainValue]]]


def redistribute_rounds(
    old: OldJob, step: Step, rounds: Sequence[dict[str, PlainValue] | None], share_out: ShareOut, *, hears_ends: bool
) -> list[dict[str, PlainValue]]:
    """Return the rounds of each new subtask of a step that has a new operator in each epoch.

    ``share_out`` shares out the states of the operators of an open round. If any old subtask has one, each new subtask
    gets one: it ends with the round, with or without records.
    """
    alive = [each for each in rounds if each is not None and each["epoch"] is not None]
    if not alive:
        return [{"epoch": None} for _ in range(step.parallelism)]
    come_to = ((each["epoch"], frozenset(each["told"]) if hears_ends else None) for each in alive)
    old.check_same(step, come_to, "some of them are further in their rounds than others")
    heard = [name for name in alive[0]["told"] if all(name in each["told"] for each in alive)]
    states = share_out([each["instance"] for each in alive])
    return [{"epoch": alive[0]["epoch"], "told": heard, "instance": state} for state in states]


async def fetch_topic_batches(
    old: OldJob, steps: Iterable[Step], plain_data: PlainData, clock: Clock, queues: ExitStack
) -> OldJob:
    """Return the job with feedback that is in topics replaced by its batches, for steps with another parallelism.

    ``steps`` are the first steps of the new tasks. The batches are shared out like others that wait, and are kept on
    disk until ``queues`` is closed.
    """
    tasks = dict(old.tasks)
    for step in steps:
        edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        readers = [step, *(edge.upstream for edge in edges)]
        if edges and any(old.parallelism(each.name) != each.parallelism for each in readers):
            topics = {edge_key(step, edge): edge.feedback_topic for edge in edges}
            tasks[step.name] = [
                await _with_batches(task, step, topics, plain_data, clock, queues)
                for task in old.tasks.get(step.name, [])
            ]
    return replace(old, tasks=tasks)


async def _with_batches(
    task: OldTask,
    step: Step,
    topics: Mapping[tuple[str, str, str | None, int], Topic | None],
    plain_data: PlainData,
    clock: Clock,
    queues: ExitStack,
) -> OldTask:
    """Return the task with the feedback in topics replaced by its batches; ``topics`` are by the key of the edge."""
    logged = Logged()
    for port, frames, plain in task.logged:
        origin = origins(task)[port]
        topic = None if origin is None else topics.get(origin[:4])
        ranges = [TopicRange.from_plain(each) for each in plain]
        # Feedback in another topic is refused later, by InboxShares.
        if topic is None or {topic_range.topic for topic_range in ranges} != {topic.name}:
            logged.append((port, frames, plain))
            continue
        queue = spill_queue(f"{step.name}, feedback of a checkpoint", step.limits, plain_data)
        queues.callback(queue.close)
        queue.refill(frames or ())
        await fetch_ranges(queue, topic, ranges, plain_data=plain_data, clock=clock)
        logged.append((port, RepeatedFrames(functools.partial(_frames_in, queue, plain_data)), ()))
    return replace(task, logged=logged)


def _frames_in(queue: SpillQueue, plain_data: PlainData) -> Iterator[PlainValue]:
    return map(plain_data.decode, queue.snapshot().frames())


def has_same_tasks(old: OldJob, tasks: Sequence[Task]) -> bool:
    """Return whether the snapshot has these tasks, with the same channels between them."""
    before = {(step, task.subtask): task for step, of_step in old.tasks.items() for task in of_step}
    for task in tasks:
        known = before.get((task.first.step.name, task.first.subtask))
        if known is None or known.state["steps"] != [instance.step.name for instance in task.instances]:
            return False
        if origins(known) != [port.origin for port in task.inbox.ports]:
            return False
    return True


async def redistribute_states(
    old: OldJob, tasks: Sequence[Task], plain_data: PlainData, meeting: Meeting | None = None
) -> TaskStates:
    """Return the state of each task of this process by its name.

    Raises CheckpointError for state that cannot be redistributed.
    """
    redistribution = _Redistribution(old, tasks, plain_data)
    if meeting is None:
        redistribution.find_progress()
    else:
        # Only process 0 has a subtask of each step.
        here = {} if meeting.process else redistribution.find_progress()
        told = {step: list(map(list, of)) for step, of in here.items()}
        found = await meeting.reach("the progress of all steps is found", told)
        redistribution.progress = {step: [SubtaskProgress(*each) for each in of] for step, of in found[0].items()}
    states: TaskStates = {}
    for first_step in redistribution.by_first_step:
        states.update(redistribution.states_of(first_step))
        await asyncio.sleep(0)
    return states


class _Redistribution:
    def __init__(self, old: OldJob, tasks: Sequence[Task], plain_data: PlainData) -> None:
        self._old = old
        self._plain_data = plain_data
        self.by_first_step: dict[str, list[Task]] = {}
        """The tasks of this process by their first step, in the order of subtasks."""
        self._steps: dict[str, OperatorInstance] = {}
        """One instance of each step, upstream first."""
        for task in tasks:
            self.by_first_step.setdefault(task.first.step.name, []).append(task)
            for instance in task.instances:
                self._steps.setdefault(instance.step.name, instance)
        self.progress: AllProgress = {}

    def find_progress(self) -> AllProgress:
        """Return the progress of each step; this process must have a subtask of each."""
        self._check_held()
        progress = self.progress = {}
        for instance in self._steps.values():
            progress[instance.step.name] = self._find_progress(instance.step, instance.operator)
        return progress

    def _check_held(self) -> None:
        """Raise CheckpointError if records wait before a step that is not the first of a task any more."""
        for step, of_step in self._old.tasks.items():
            if step not in self.by_first_step and any(
                any(next(port.batches(), None) for port in old_ports(task)) or list(task.logged) for task in of_step
            ):
                raise self._old.refusal(
                    step,
                    "records wait before it, which is now chained to another or gone; restore the flow as it was, and "
                    "stop it where less waits",
                )

    def _find_progress(self, step: Step, operator: Operator) -> Sequence[SubtaskProgress]:
        before = self._old.progress_of(step.name)
        if before is None:
            upstream = [
                progress.behind_loop(BEFORE_ALL_EPOCHS) if leaves_loop(edge, step) else progress
                for edge in step.inputs
                if edge.feedback is None
                for progress in self.progress[edge.upstream.name]
            ]
            # A new step does not see the epochs and ends that these have already passed on.
            return [join_progress(upstream) if upstream else NO_PROGRESS] * step.parallelism
        if len(before) == step.parallelism:
            return before
        if isinstance(operator, Boundary) and operator.gives_epochs:
            furthest = max(progress.watermark for progress in before)
            return [join_progress(before)._replace(watermark=furthest)] * step.parallelism
        # What an operator shares out itself, such as mini-batches, it keeps by epoch: it may hear of an epoch again.
        hears_epochs = not isinstance(operator, Boundary) and (
            (self._steps[step.name].is_listener and not hasattr(operator, "share_out")) or is_per_round(step, operator)
        )
        check_same = functools.partial(self._old.check_same, step)
        if hears_epochs:
            epochs = [progress.watermark for progress in before]
            check_same(epochs, f"they have heard of different epochs as the last ({', '.join(map(str, epochs))})")
        if step.loop is not None:
            ended = (progress.ended for progress in before)
            check_same(ended, "some of them have ended with their iteration and others have not")
        if step.name not in self.by_first_step:  # All operators of a task have the same progress.
            if not isinstance(operator, Boundary) and hasattr(operator, "input_ended"):
                data_ended = (progress.data_ended for progress in before)
                check_same(data_ended, "some of them have heard that their input has ended and others have not")
            return self.progress[step.inputs[0].upstream.name]
        return [join_progress(before)] * step.parallelism

    # -- the tasks of one step -----------------------------------------------------------------------------

    def states_of(self, first_step: str) -> TaskStates:
        """Return the states of the tasks with this first step, by their names."""
        tasks = self.by_first_step[first_step]
        first = tasks[0].first
        step, before = first.step, self._old.tasks.get(first_step, [])
        per_round = is_per_round(step, first.operator)
        chain = tasks[0].instances[1:] if per_round else tasks[0].instances
        operators = {
            instance.step.name: shared
            for instance in chain
            if (shared := self._operator_states(instance.step, instance.operator)) is not None
        }
        is_new_source = step.source is not None and not before
        if is_new_source and not operators:
            return {}
        rounds = self._rounds(step, first.operator) if per_round else [None] * step.parallelism
        # A new source starts at its own start, whatever state the steps behind it in its tasks have.
        positions: Sequence[PlainValue] = [None if is_new_source else {}] * step.parallelism
        if not is_new_source and (feeder := tasks[0].feeder) is not None:
            positions = redistribute_positions(self._old, step, feeder, [task.state["positions"] for task in before])
        inboxes = InboxShares(self._old, step, first.operator, self.progress, self._plain_data)
        states: TaskStates = {}
        for task in tasks:
            subtask = task.first.subtask
            progress = self.progress[first_step][subtask]
            inbox, logged = self._inbox(inboxes, task)
            states[task.name] = {
                "operators": {name: of_step[subtask] for name, of_step in operators.items()},
                "round": rounds[subtask],
                "watermark": progress.watermark,
                "ended": progress.ended,
                "interior input ended": progress.data_ended,
                "positions": None if positions[subtask] is None else dict(positions[subtask]),
                "turns": [None] * len(task.writers),
                "inbox": inbox,
                "logged": logged,
            }
        return states

    def _inbox(self, inboxes: InboxShares, task: Task) -> tuple[PlainValue, PlainValue]:
        """Return the inbox of a task and its logged feedback: unchanged if the steps before it are unchanged."""
        step, subtask = task.first.step, task.first.subtask
        before = self._old.tasks.get(step.name, [])
        upstream = [edge.upstream.name for edge in step.inputs]
        if (
            len(before) == step.parallelism
            and origins(before[subtask]) == [port.origin for port in task.inbox.ports]
            and all(self._old.progress_of(name) == self.progress[name] for name in upstream)
        ):
            return before[subtask].state["inbox"], before[subtask].logged
        return inboxes.state_of(subtask, task.inbox.ports)

    def _operator_states(self, step: Step, operator: Operator) -> list[PlainValue] | None:
        states = self._old.instances.get(step.name)
        if states is None or len(states) == step.parallelism:
            return states
        return self._shared_out(step, operator, states)

    def _shared_out(self, step: Step, operator: Operator, states: Sequence[PlainValue]) -> list[PlainValue]:
        return redistribute_operators(self._old, step, operator, states, EdgeSharing(step, self._plain_data))

    def _rounds(self, step: Step, operator: Operator) -> Sequence[PlainValue]:
        rounds = [task.state["round"] for task in self._old.tasks.get(step.name, [])]
        if len(rounds) == step.parallelism:
            return rounds
        share_out = functools.partial(self._shared_out, step, operator)
        return redistribute_rounds(self._old, step, rounds, share_out, hears_ends=hasattr(operator, "input_ended"))
