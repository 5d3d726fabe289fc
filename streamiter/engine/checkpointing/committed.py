"""Jobs without state: the positions of their sources are committed to the topics that they read.

A source with ``start="committed"`` resumes where the consumer group of its flow has committed. A job of such sources
whose steps keep no state needs no store of checkpoints. It takes the same barriers; instead of a snapshot it stores
:class:`SourcePositions`, in the transaction of its outputs where both are in one commit domain. :func:`checkpoints_of`
decides how a job commits, and refuses steps with state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, final

from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.store import Checkpoints
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task import Task
from streamiter.errors import ConfigurationError, GraphError, StorageFull, did_you_mean
from streamiter.operators.operator import Operator, known_of
from streamiter.operators.source import Positions
from streamiter.topics.compacted import commit_positions, committed_positions
from streamiter.topics.source_and_sink import TopicSink, TopicSource
from streamiter.topics.topic import Topic, Transactions
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_all

_log = logging.getLogger("streamiter.job")

PositionsByStep: TypeAlias = dict[str, list[Positions]]
"""The positions of the subtasks of each source, by the name of its step."""


def joined_positions(all_positions: Iterable[PositionsByStep]) -> PositionsByStep:
    """Return the positions of several processes as the positions of one process."""
    joined: PositionsByStep = {}
    for positions in all_positions:
        for step, of_step in positions.items():
            joined.setdefault(step, []).extend(of_step)
    return joined


def id_of(flow: str) -> str:
    """Return the consumer group of a flow, which is also its transactional id."""
    return f"streamiter-{flow}"


def checkpoints_of(flow: str, tasks: Sequence[Task], options: JobOptions) -> Checkpoints | None:
    """Return the settings of the job's checkpoints, without a store if it commits positions; None without both.

    Raises ConfigurationError for options that do not fit, and GraphError for a step that needs a store.
    """
    given, committed = options.checkpoints, _committed_of(tasks)
    if given is not None and given.has_store:
        return given
    if committed:
        _check_options(flow, options, committed)
        _check_sources(tasks)
        for instance in (instance for task in tasks for instance in task.instances):
            _check_without_state(instance, next(iter(committed)))
        return given or Checkpoints()
    if given is not None:
        raise ConfigurationError(
            f'flow {flow!r}: expected Checkpoints with a store, or sources with start="committed", given neither; '
            'write Checkpoints("/var/lib/…") (on the command line --checkpoints STORE), or, in a flow without state, '
            'flow.source(…, start="committed")'
        )
    changed = sorted(options.changed_steps)
    for option, value, is_given in (
        ("restore", options.restore, options.restore != "last"),
        ("changed_steps", changed, bool(changed)),
    ):
        if is_given:
            raise ConfigurationError(
                f"flow {flow!r}: expected checkpoints= together with {option}=, given {option}={value!r} alone; "
                f"add checkpoints=Checkpoints(…) (on the command line --checkpoints STORE), or leave {option}= out"
            )
    return None


def warn_of_doubled_outputs(flow: str, tasks: Sequence[Task]) -> None:
    """Log a warning for a job whose next run, or second copy, reads all records again and writes all outputs again.

    ``start=`` at the source says that this is meant. So does a range of offsets, a file, or a flow that computes a
    result from all of its input.
    """
    instances = [instance for task in tasks for instance in task.instances]
    keeps_state = any(_state_of(instance) is not None for instance in instances)
    again = [
        task.first.step.name
        for task, source in _topic_sources(tasks)
        if source.start is None
        and (source.stop is None or (source.stop == "latest" and not keeps_state))
        and not getattr(source.topic, "bounded", False)
    ]
    sinks = [
        instance.step.name
        for instance in instances
        if type(instance.operator) is TopicSink and not instance.operator.is_for_dead_letters
    ]
    if again and sinks:
        _log.warning(
            "flow %r: each start, also of a second copy, reads step %r from the first record and writes all outputs of "
            'step %r again. Give the source start="committed", or the job checkpoints=Checkpoints("folder"); or say '
            'with start="earliest" that this is meant',
            flow,
            again[0],
            sinks[0],
        )


def _topic_sources(tasks: Sequence[Task]) -> Iterator[tuple[Task, TopicSource]]:
    for task in tasks:
        if task.feeder is not None and isinstance(task.feeder.source, TopicSource):
            yield task, task.feeder.source


def _committed_of(tasks: Sequence[Task]) -> dict[str, Topic]:
    """Return the topic of each source with ``start="committed"``, by step."""
    found: dict[str, Topic] = {}
    for task, source in _topic_sources(tasks):
        if source.start == "committed":
            found.setdefault(task.first.step.name, source.topic)
    return found


def _check_options(flow: str, options: JobOptions, committed: Iterable[str]) -> None:
    if options.restore not in ("last", None):
        raise ConfigurationError(
            f'flow {flow!r}: expected restore=None or restore="last" without a store of checkpoints, given '
            f"{options.restore!r}; the topics have only the last positions"
        )
    if unknown := sorted(set(options.changed_steps) - set(committed)):
        raise ConfigurationError(
            f'flow {flow!r}: expected changed_steps= to name sources with start="committed" '
            f"({', '.join(map(repr, committed))}), given {unknown[0]!r}; no other step has a position or state"
            f"{did_you_mean(unknown[0], committed)}"
        )


def _check_sources(tasks: Sequence[Task]) -> None:
    """Raise GraphError for a source that would bring its records again, or whose positions another source commits."""
    for step, source in ((task.first.step, task.feeder.source) for task in tasks if task.feeder is not None):
        if not isinstance(source, TopicSource) or source.start not in ("committed", "latest"):
            raise GraphError(
                f'step {step.name!r}: expected start="committed" or "latest", as another source has start="committed", '
                "given a source that begins again at each start; change it, or use flow.start(checkpoints=…), which "
                "stores all positions",
                where=step.where,
            )
    check_one_source_of_each_topic(tasks)


def check_one_source_of_each_topic(tasks: Sequence[Task]) -> None:
    """Raise GraphError for a source whose positions another source commits.

    Before the job has joined the commit domains, a topic under two addresses is two topics.
    """
    by_topic: dict[tuple[str, str], str] = {}
    for task, source in _topic_sources(tasks):
        step = task.first.step
        topic = source.topic.commit_domain, source.topic.name
        other = by_topic.setdefault(topic, step.name) if source.start == "committed" else step.name
        if other != step.name:
            raise GraphError(
                f'step {step.name!r}: expected one source with start="committed" of topic {source.topic.name!r}, given '
                f"also {other!r}; a group has one position in a partition: use one source for both",
                where=step.where,
            )


# The methods of operators that hold something between two batches.
_HOLDING: Final = ("snapshot", "finish", "on_timer", "on_event_timer", "wanted_inputs")


def _check_without_state(instance: OperatorInstance, source: str) -> None:
    if (reason := _state_of(instance)) is not None:
        raise GraphError(
            f'step {instance.step.name!r}: expected a step without state, since step {source!r} has start="committed" '
            f"and the job has no store for state, given one that {reason}; use "
            'flow.start(checkpoints=Checkpoints("folder")) (on the command line --checkpoints STORE), which stores the '
            "state together with the positions",
            where=instance.step.where,
        )


def _state_of(instance: OperatorInstance) -> str | None:
    """Return why a step may hold something between two batches; None if it does not."""
    step, operator = instance.step, instance.operator
    if step.loop is not None:
        return "is in an iteration"
    if step.service is not None:
        return f"works with the parameter server {step.service.name!r}"
    if step.keys is not None:
        return "keeps state by key"
    if known_of(operator).is_stateless or type(operator) is TopicSink:
        return None
    kind = type(operator)
    holding = [name for name in _HOLDING if getattr(kind, name, None) is not getattr(Operator, name, None)]
    return f"keeps state: {kind.__name__} defines {holding[0]}()" if holding else None


async def join_commit_domains(tasks: Sequence[Task]) -> None:
    """Give the topics of each cluster one commit domain, also where their addresses differ.

    Otherwise the job would open two transactions in the cluster, of which the second shuts out the first.
    """
    operators = [instance.operator for task in tasks for instance in task.instances]
    committing: list[TopicSink | TopicSource] = [
        *(each for each in operators if isinstance(each, TopicSink) and each.is_transactional),
        *(source for _task, source in _topic_sources(tasks) if source.start == "committed"),
    ]
    joined: dict[Topic, Topic] = {}
    for each in committing:
        if each.topic not in joined:
            found = each.topic
            for other in joined.values():
                found = await found.in_domain_of(other)
            joined[each.topic] = found
        each.topic = joined[each.topic]


@final
class SourcePositions:
    """The positions of the sources of a job without state, which it commits in place of a snapshot.

    Positions in the commit domain of the job's transaction are committed in that transaction. Each further commit
    domain has transactions of its own, which are committed after the outputs: after a crash in between, some records
    are read again.
    """

    def __init__(self, flow: str, tasks: Sequence[Task], *, run: str, clock: Clock) -> None:
        self._flow = flow
        self._run = run
        self._clock = clock
        self._sources = _committed_of(tasks)
        self.now: PositionsByStep = {}
        """The positions that are committed next: where the sources begin, or those at the last barrier."""
        self._others: dict[str, Transactions] = {}

    @property
    def first_topic(self) -> Topic:
        """The topic whose commit domain the job uses if none of its outputs has transactions."""
        return next(iter(self._sources.values()))

    async def open_others(self, domain: str, timeout_s: float) -> None:
        """Open transactions in the commit domains besides ``domain``, which shuts out older runs there."""
        for step, topic in self._sources.items():
            other = topic.commit_domain
            if other != domain and other not in self._others:
                self._others[other] = await topic.open_transactions(id_of(self._flow), timeout_s=timeout_s)
                _log.warning(
                    "flow %r, step %r: its positions are committed to %s after the outputs, which are committed to %s: "
                    "after a crash some records may come twice",
                    self._flow,
                    step,
                    other,
                    domain,
                )

    async def write_into(self, transactions: Transactions, domain: str) -> None:
        """Write the positions of the sources in a commit domain."""
        for step, topic in self._sources.items():
            if topic.commit_domain == domain:
                positions = TopicSource.group_positions(self.now[step], self._run)
                await commit_positions(transactions, topic, id_of(self._flow), positions)

    async def commit_others(self) -> None:
        """Commit the positions that are not in the job's transaction."""
        for domain, transactions in self._others.items():
            await transactions.begin()
            try:
                await self.write_into(transactions, domain)
                await transactions.commit()
            except StorageFull:  # The next checkpoint begins another transaction.
                await transactions.abort()
                raise

    async def runs(self) -> list[str | None]:
        """Return for each source the run that has committed its positions last; None if there are no positions.

        It is "" for positions that a tool has set.
        """
        topics = self._sources.values()
        found = [await committed_positions(topic, id_of(self._flow), clock=self._clock) for topic in topics]
        return [None if each is None else each.run for each in found]

    async def close(self) -> None:
        """Close the transactions. May be called more than once."""
        others, self._others = self._others, {}
        await close_all(each.close for each in others.values())
