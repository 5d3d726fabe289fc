"""What the operators of a step keep, for another number of subtasks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

from streamiter.checkpoints.disk_queue import SpillQueue
from streamiter.checkpoints.keys import key_groups, normalize_key
from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock
from streamiter.deferred import entries_of
from streamiter.errors import StreamiterError
from streamiter.operators.keyed import KeyedOperator
from streamiter.operators.keyed_state import StateFrame, select_keys
from streamiter.operators.operator import Boundary, Operator, Sharing
from streamiter.runtime.checkpointing.gate_shares import EdgeSharing, GateShares
from streamiter.runtime.checkpointing.old_job import (
    OldJob,
    OldTask,
    SubtaskProgress,
    behind_all,
    joined,
    origins,
)
from streamiter.runtime.feedback import TopicRange
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS
from streamiter.runtime.graph import Edge, FeedbackLimits, Step, edge_number, leaves_loop
from streamiter.runtime.instance import Feeder, OperatorInstance
from streamiter.runtime.output import subtask_of_group
from streamiter.runtime.port import PortOrigin
from streamiter.runtime.task import Task
from streamiter.runtime.topic_inlets import gather
from streamiter.topics.topic import Topic

__all__ = [
    "KeyShare",
    "fits",
    "redistributed",
    "timers_of",
    "with_batches",
]


Timer = tuple[int, Any, Any]
"""When it is due in milliseconds, its key, its payload."""


@final
class KeyShare:
    """The states of the keys of one subtask, from those of all old ones; read anew whenever one goes through them."""

    def __init__(self, states: Sequence[Iterable[StateFrame]], subtask: int, subtasks: int) -> None:
        self._states = states
        self._subtask = subtask
        self._subtasks = subtasks

    def __iter__(self) -> Iterator[StateFrame]:
        for frames in self._states:
            yield from (frame for frame in select_keys(frames, self._owns) if frame[0])

    def _owns(self, keys: list[Any]) -> list[bool]:
        owners = subtask_of_group(key_groups(keys), self._subtasks)
        owned: list[bool] = (owners == self._subtask).tolist()
        return owned


def shared_out(
    old: OldJob, step: Step, operator: Operator, states: Sequence[dict[str, Any]], sharing: Sharing
) -> list[dict[str, Any]]:
    """The states of the new instances from those of the old ones; ``operator`` is a new one, not open."""
    subtasks = range(step.parallelism)
    operators = _of_operators(old, step, operator, [state["operator"] for state in states], sharing)
    keyed = [state["keyed"] for state in states if state["keyed"] is not None]
    is_keyed = step.keys is not None
    timers = timers_of([state["timers"] for state in states], step.parallelism, by_key=is_keyed)
    takes_timers = any(state["takes timers"] for state in states)
    return [
        {
            "operator": operators[subtask],
            "keyed": KeyShare(keyed, subtask, len(subtasks)) if is_keyed else None,
            "timers": timers[subtask],
            "takes timers": takes_timers,
        }
        for subtask in subtasks
    ]


def timers_of(timers: Iterable[Iterable[Timer]], subtasks: int, *, by_key: bool) -> list[list[Timer]]:
    """A timer that was set for a key goes with it; the others are dealt out in turn.

    >>> timers_of([[(5, None, "a"), (6, None, "b")], [(7, None, "c")]], 2, by_key=False)
    [[(5, None, 'a'), (7, None, 'c')], [(6, None, 'b')]]
    """
    dealt: list[list[Timer]] = [[] for _ in range(subtasks)]
    turn = 0
    for timer in (timer for of_subtask in timers for timer in of_subtask):
        _, key, _ = timer
        if by_key and key is not None:
            [group] = key_groups([normalize_key(key)])
            dealt[subtask_of_group(int(group), subtasks)].append(timer)
        else:
            dealt[turn % subtasks].append(timer)
            turn += 1
    return dealt


def _of_operators(
    old: OldJob, step: Step, operator: Operator, states: list[Any], sharing: Sharing
) -> Sequence[Any]:
    count = step.parallelism
    if all(state is None for state in states):
        return [None] * count
    if isinstance(operator, KeyedOperator):
        return [KeyShare(states, subtask, count) for subtask in range(count)]
    share_out: Callable[..., Any] | None = getattr(operator, "share_out", None)
    given: Any = sharing
    if share_out is None:
        share_out, given = getattr(operator, "redistribute", None), count
    if share_out is None:
        raise old.refused(
            step.name,
            f"expected the parallelism {len(states)} that it had, given {count}; its state cannot be shared out anew: "
            f"keep parallelism={len(states)}, or define redistribute(states, parallelism) in "
            f"{type(operator).__name__}",
        )
    try:
        shared = share_out(states, given)
    except StreamiterError as error:
        raise old.refused(
            step.name,
            f"its {len(states)} subtasks cannot become {count}: {error}; keep parallelism={len(states)}, or take "
            "another checkpoint with it",
        ) from error
    return _checked(old, step, operator, shared)


def _checked(old: OldJob, step: Step, operator: Operator, shared: Any) -> Sequence[Any]:
    if (
        not isinstance(shared, Sequence)
        or isinstance(shared, (str, bytes))
        or len(shared) != step.parallelism
    ):
        given = f"{len(shared)} of them" if isinstance(shared, (list, tuple)) else type(shared).__name__
        raise old.refused(
            step.name,
            f"{type(operator).__name__}.redistribute: expected a list of {step.parallelism} states, one for each "
            f"subtask, given {given}",
        )
    return shared


def positions_for(
    old: OldJob, step: Step, feeder: Feeder, positions: Sequence[dict[Any, Any]]
) -> Sequence[dict[Any, Any]]:
    """The positions of each new subtask from those of the old ones.

    Where sources go on, for another number of subtasks.
    """
    count, before = step.parallelism, len(positions)
    if count == before:
        return positions
    try:
        shared: Any = feeder.redistribute(positions, count)
    except StreamiterError as error:
        raise old.refused(
            step.name, f"its {before} subtasks cannot become {count}: {error}; keep parallelism={before}"
        ) from error
    if shared is None:
        if not any(positions):
            return [{}] * count
        raise old.refused(
            step.name,
            f"expected the parallelism {before} that it had, given {count}; its positions cannot be shared out anew: "
            f"keep parallelism={before}, or define redistribute(positions, parallelism) in its Source",
        )
    if not isinstance(shared, Sequence) or len(shared) != count:
        given = f"{len(shared)} of them" if isinstance(shared, Sequence) else type(shared).__name__
        raise old.refused(
            step.name,
            f"redistribute of its Source: expected a list of {count} positions, one for each subtask, given {given}",
        )
    return shared


ShareOut = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def rounds_for(
    old: OldJob, step: Step, rounds: Sequence[dict[str, Any] | None], share_out: ShareOut, *, hears_ends: bool
) -> list[dict[str, Any]]:
    """What each new subtask goes on from; ``share_out`` shares out the states of the operators that live.

    Where one lives, there is one in each new subtask: it ends with the round, whether it got anything or not.

    The round under way of a step that begins anew in each epoch, for another number of subtasks.
    """
    alive = [each for each in rounds if each is not None and each["epoch"] is not None]
    if not alive:
        return [{"epoch": None} for _ in range(step.parallelism)]
    told = [set(each["told"]) for each in alive]
    if len({each["epoch"] for each in alive}) > 1 or (hears_ends and any(each != told[0] for each in told)):
        raise old.not_between(
            step.name, step.parallelism, "some of them are further in their rounds than others"
        )
    heard = [name for name in alive[0]["told"] if all(name in each for each in told)]
    states = share_out([each["instance"] for each in alive])
    return [{"epoch": alive[0]["epoch"], "told": heard, "instance": state} for state in states]


async def with_batches(
    old: OldJob, steps: Iterable[Step], plain_data: PlainData, clock: Clock, queues: ExitStack
) -> OldJob:
    """The same job, with batches in the place of ranges where steps have another parallelism now.

    ``steps`` are those at the heads of the new tasks. The batches wait on disk until ``queues`` is closed.

    What lies in a topic for heads that are others now: taken out of it, it is shared out like all that waited.
    """
    gathering = _Gathering(old, plain_data, clock, queues)
    tasks = dict(old.tasks)
    for step in steps:
        edges = [edge for edge in step.inputs if edge.feedback_topic is not None]
        before = old.tasks.get(step.name, [])
        if edges and not _keeps(old, [step, *(edge.upstream for edge in edges)]):
            tasks[step.name] = [await gathering.with_batches(task, step, edges) for task in before]
    return replace(old, tasks=tasks)


def _keeps(old: OldJob, steps: Iterable[Step]) -> bool:
    return all(old.parallelism(step.name) == step.parallelism for step in steps)


@final
class _Gathering:
    def __init__(self, old: OldJob, plain_data: PlainData, clock: Clock, queues: ExitStack) -> None:
        self._old = old
        self._plain_data = plain_data
        self._clock = clock
        self._queues = queues

    async def with_batches(self, task: OldTask, step: Step, edges: Iterable[Edge]) -> OldTask:
        by_origin = {_key(step, edge): edge for edge in edges}
        logged: list[tuple[int, Iterable[Any]]] = []
        for port, frames in task.logged:
            edge = by_origin.get(PortOrigin(*task.state["gate"]["ports"][port])[:4])
            ranges = [lying for entry in entries_of(frames) if (lying := TopicRange.of(entry)) is not None]
            # What lies in another topic is refused where it is shared out.
            if edge is not None and ranges and {lying.topic for lying in ranges} == {_topic_of(edge).name}:
                logged.append((port, await self._gathered(step, edge, frames, ranges)))
            else:
                logged.append((port, frames))
        return replace(task, logged=logged)

    async def _gathered(
        self, step: Step, edge: Edge, frames: Iterable[Any], ranges: list[TopicRange]
    ) -> _DealtFrames:
        import tempfile  # 4 ms with what it imports

        limits: FeedbackLimits = FeedbackLimits() if step.loop is None else step.loop.limits
        queue = SpillQueue(
            name=f"{step.name}, feedback of a checkpoint",
            plain_data=self._plain_data,
            memory_limit_bytes=limits.memory_bytes,
            disk_limit_bytes=limits.disk_bytes,
            directory=limits.directory or tempfile.gettempdir(),
        )
        self._queues.callback(queue.close)
        queue.refill([entry] for entry in entries_of(frames) if TopicRange.of(entry) is None)
        await gather(queue, _topic_of(edge), ranges, plain_data=self._plain_data, clock=self._clock)
        return _DealtFrames(queue, self._plain_data)


@final
class _DealtFrames:
    """The decoded frames of what is in a queue, made anew whenever one goes through them."""

    def __init__(self, queue: SpillQueue, plain_data: PlainData) -> None:
        self._queue = queue
        self._plain_data = plain_data

    def __iter__(self) -> Iterator[Any]:
        return map(self._plain_data.decode, self._queue.snapshot().frames())


def _key(step: Step, edge: Edge) -> tuple[Any, ...]:
    tag = None if edge.tag is None else edge.tag.name
    return edge.input_name, edge.upstream.name, tag, edge_number(step, edge)


def _topic_of(edge: Edge) -> Topic:
    assert edge.feedback_topic is not None
    return edge.feedback_topic


def fits(old: OldJob, tasks: Sequence[Task]) -> bool:
    """Whether the tasks are those of the snapshot, with the same channels between them.

    The states of the new tasks, step by step.
    """
    before = {(head, task.subtask): task for head, of_head in old.tasks.items() for task in of_head}
    if len(before) != len(tasks):
        return False
    for task in tasks:
        known = before.get((task.first.step.name, task.first.subtask))
        if known is None or known.state["steps"] != [instance.step.name for instance in task.instances]:
            return False
        if origins(known) != [port.origin for port in task.gate.ports]:
            return False
    return True


async def redistributed(
    old: OldJob, tasks: Sequence[Task], plain_data: PlainData
) -> dict[str, dict[str, Any]]:
    """The state of each task by its name. Raises CheckpointError for what cannot be shared out anew."""
    shares = _Shares(old, tasks, plain_data)
    states: dict[str, dict[str, Any]] = {}
    for head in shares.heads:
        states.update(shares.of(head))
        await asyncio.sleep(0)
    return states


class _Shares:
    def __init__(self, old: OldJob, tasks: Sequence[Task], plain_data: PlainData) -> None:
        self._old = old
        self._plain_data = plain_data
        self.heads: dict[str, list[Task]] = {}
        self._steps: dict[str, OperatorInstance] = {}
        """An instance of each step, upstream first."""
        for task in tasks:
            self.heads.setdefault(task.first.step.name, []).append(task)
            for instance in task.instances:
                self._steps.setdefault(instance.step.name, instance)
        self._check_held()
        self._standings: dict[str, list[SubtaskProgress]] = {}
        for instance in self._steps.values():
            self._standings[instance.step.name] = self._standing(instance.step, instance.operator)

    def _check_held(self) -> None:
        """Nothing that was on its way between two steps may be lost because other steps head the tasks now."""
        for head, of_head in self._old.tasks.items():
            if head not in self.heads and any(
                task.state["gate"]["held"] or task.state["gate"]["aside"] or list(task.logged)
                for task in of_head
            ):
                raise self._old.refused(
                    head,
                    "records wait before it, which is now chained to another or gone; restore the flow as it was, and "
                    "stop it where less waits",
                )

    def _standing(self, step: Step, operator: Operator) -> list[SubtaskProgress]:
        before = self._old.standings(step.name)
        if before is None:
            upstream = [
                standing.behind_loop(BEFORE_ALL_EPOCHS) if leaves_loop(edge, step) else standing
                for edge in step.inputs
                if edge.feedback is None
                for standing in self._standings[edge.upstream.name]
            ]
            return [behind_all(upstream)] * step.parallelism
        if len(before) == step.parallelism:
            return before
        if isinstance(operator, Boundary) and operator.gives_epochs:
            furthest = max(standing.watermark for standing in before)
            return [joined(before)._replace(watermark=furthest)] * step.parallelism
        hears_epochs = not isinstance(operator, Boundary) and (
            self._steps[step.name].is_listener or _is_per_round(step, operator)
        )
        if hears_epochs and len({standing.watermark for standing in before}) > 1:
            epochs = ", ".join(str(standing.watermark) for standing in before)
            raise self._old.not_between(
                step.name, step.parallelism, f"they have heard of different epochs as the last ({epochs})"
            )
        if step.loop is not None and len({standing.ended for standing in before}) > 1:
            raise self._old.not_between(
                step.name,
                step.parallelism,
                "some of them have ended with their iteration and others have not",
            )
        hears_ends = not isinstance(operator, Boundary) and hasattr(operator, "input_ended")
        if hears_ends and step.name not in self.heads and len({each.data_ended for each in before}) > 1:
            raise self._old.not_between(
                step.name,
                step.parallelism,
                "some of them have heard that their input has ended and others have not",
            )
        if step.name not in self.heads:  # All operators of a task stand where it does.
            return self._standings[step.inputs[0].upstream.name]
        return [joined(before)] * step.parallelism

    # -- the tasks of one step -----------------------------------------------------------------------------

    def of(self, head: str) -> dict[str, dict[str, Any]]:
        """The states of the tasks that a step stands at the head of, by their names."""
        tasks = self.heads[head]
        first = tasks[0].first
        step, before = first.step, self._old.tasks.get(head, [])
        per_round = _is_per_round(step, first.operator)
        chain = tasks[0].instances[1:] if per_round else tasks[0].instances
        operators = {
            instance.step.name: shared
            for instance in chain
            if (shared := self._of_instances(instance.step, instance.operator)) is not None
        }
        is_new_source = step.source is not None and not before
        if is_new_source and not operators:
            return {}
        rounds = self._rounds(step, first.operator) if per_round else [None] * len(tasks)
        # Those of a new source are where it begins, whatever the steps behind it in its tasks go on from.
        positions: Sequence[Any] = [None if is_new_source else {}] * len(tasks)
        if not is_new_source and (feeder := tasks[0].feeder) is not None:
            positions = positions_for(self._old, step, feeder, [task.state["positions"] for task in before])
        gates = GateShares(
            self._old,
            step,
            first.operator,
            self._standings,
            self._plain_data,
            in_order=per_round or first.operator.epochs_in_order,
        )
        states: dict[str, dict[str, Any]] = {}
        for subtask, task in enumerate(tasks):
            standing = self._standings[head][subtask]
            gate, logged = self._gate(gates, task)
            states[task.name] = {
                "operators": {name: of_step[subtask] for name, of_step in operators.items()},
                "round": rounds[subtask],
                "watermark": standing.watermark,
                "ended": standing.ended,
                "interior input ended": standing.data_ended,
                "positions": None if positions[subtask] is None else dict(positions[subtask]),
                "turns": [None] * len(task.writers),
                "gate": gate,
                "logged": logged,
            }
        return states

    def _gate(self, gates: GateShares, task: Task) -> tuple[Any, Any]:
        """As it was, where nothing has changed before it."""
        step, subtask = task.first.step, task.first.subtask
        before = self._old.tasks.get(step.name, [])
        upstream = [edge.upstream.name for edge in step.inputs]
        if (
            len(before) == step.parallelism
            and origins(before[subtask]) == [port.origin for port in task.gate.ports]
            and all(self._old.standings(name) == self._standings[name] for name in upstream)
        ):
            return before[subtask].state["gate"], before[subtask].logged
        return gates.of(subtask, task.gate.ports)

    def _of_instances(self, step: Step, operator: Operator) -> list[Any] | None:
        states = self._old.instances.get(step.name)
        if states is None or len(states) == step.parallelism:
            return states
        return self._shared_out(step, operator, states)

    def _shared_out(self, step: Step, operator: Operator, states: Sequence[Any]) -> list[Any]:
        return shared_out(self._old, step, operator, states, EdgeSharing(step, self._plain_data))

    def _rounds(self, step: Step, operator: Operator) -> Sequence[Any]:
        rounds = [task.state["round"] for task in self._old.tasks.get(step.name, [])]
        if len(rounds) == step.parallelism:
            return rounds
        share_out = functools.partial(self._shared_out, step, operator)
        return rounds_for(self._old, step, rounds, share_out, hears_ends=hasattr(operator, "input_ended"))


def _is_per_round(step: Step, operator: Operator) -> bool:
    return step.per_round and not operator.is_stateless
