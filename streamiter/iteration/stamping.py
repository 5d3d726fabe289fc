"""Epochs on unbounded data: groups of records, each followed by its epoch watermark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_function, check_name, check_seconds
from streamiter.flow.stream import Stream
from streamiter.iteration.epoch_groups import GroupsOf, GroupsUpToMarks
from streamiter.iteration.stamper import Stamper
from streamiter.iteration.timed_stamper import TimedStamper
from streamiter.operators.operator import OperatorFactory
from streamiter.runtime.graph import Step
from streamiter.user_code import user_line

__all__ = ["epochs_every"]


def epochs_every(
    stream: Stream,
    *,
    records: int | None = None,
    seconds: float | None = None,
    marks: Callable[[Any], object] | None = None,
    idle_timeout: float | None = None,
    name: str | None = None,
) -> Stream:
    """Stamp a stream with epochs, so that in an unbounded iteration listeners hear of them on endless input.

    The records of each subtask are cut into groups: the first gets epoch 0, the next 1, …, and each is
    followed in-band by its ``EpochWatermark``. One of these says where a group ends:

    - ``records=n``: after n records of the subtask.
    - ``seconds=s``: every s seconds of the job's clock, at all subtasks at the same time; what has no records
      in that time goes along. Where nobody has any, no epoch ends.
    - ``marks=predicate``: at each record for which ``marks(record)`` is true (a row of ``Columns`` is a dict).
      The mark is not passed on. Two in a row make an epoch without records. What the predicate raises ends
      the job, naming the record.

    When its input ends, a subtask's last group ends too.

    **Subtasks without input.** An epoch is complete when every subtask has completed it, so in synchronous
    training the model waits for the slowest. Not for a subtask that no partition belongs to: it goes along
    with the others. With ``idle_timeout`` neither for one that nothing has come to for so many seconds, since
    the start or since its last record: the group it is in ends, smaller than the others, and it goes along
    with them. Then each epoch is trained on the records of those who have some. What comes to it later is in
    the epoch after those that all others have completed, so nothing is lost and nothing comes late. The model
    waits that long once, each time a partition falls silent: choose a time that is longer than the pauses of
    a healthy one. Without it the others wait for as long as the partition is silent. With ``seconds`` nobody
    waits for a silent subtask, and it changes nothing.

    Subtasks go along with others of the same step only: of two streams that are stamped apart, an iteration
    waits for the slower. Stamp their union where that is not wanted.

    Raises GraphError inside an iteration body, and for other than one of ``records``, ``seconds``, ``marks``.

    >>> from streamiter import Flow, Operator
    >>> class WithEpoch(Operator):
    ...     def open(self, context):
    ...         self.context = context
    ...     def process(self, record, out):
    ...         out.emit((self.context.epoch, record))
    >>> flow = Flow("groups")
    >>> lines = flow.from_items(["a", "b", "--", "c", "d", "e"])
    >>> by_count = epochs_every(lines, records=4).process(WithEpoch).collect()
    >>> by_mark = epochs_every(lines, marks=lambda line: line == "--").process(WithEpoch).collect()
    >>> by_time = epochs_every(lines, seconds=3600).process(WithEpoch).collect()
    >>> flow.run().state, by_count.items
    ('finished', [(0, 'a'), (0, 'b'), (0, '--'), (0, 'c'), (1, 'd'), (1, 'e')])
    >>> by_mark.items
    [(0, 'a'), (0, 'b'), (1, 'c'), (1, 'd'), (1, 'e')]
    >>> by_time.items
    [(0, 'a'), (0, 'b'), (0, '--'), (0, 'c'), (0, 'd'), (0, 'e')]
    """
    if not isinstance(stream, Stream):
        raise GraphError(f"epochs_every: expected a stream, given {stream!r}; write epochs_every(stream, …)")
    check_name(name)
    step = name or "epochs_every"
    _check_one_of(records=records, seconds=seconds, marks=marks)
    _check_records(records)
    check_seconds(seconds, "seconds", "end epochs by records or marks", step=step)
    check_seconds(idle_timeout, "idle_timeout", "wait for silent partitions", step=step)
    if marks is not None:
        check_function(marks, "epochs_every(marks)", ["record"], step=name)
    flow = stream.flow
    if flow.loop is not None or stream.loop is not None:
        raise GraphError(
            f"epochs_every: expected a stream outside an iteration body, given {stream.name!r} inside; "
            "stamp the data stream before it is passed to the iteration"
        )
    edges = stream.edges()
    unique_name = flow.graph.unique_name(step, named=name is not None)
    return flow.add_step(
        Step(
            name=unique_name,
            parallelism=stream.parallelism,
            where=user_line(),
            factory=_factory(records, seconds, marks, idle_timeout),
            inputs=edges,
            has_lasting_name=name is not None and not flow.graph.is_numbered(unique_name),
            bounded=stream.is_bounded,
            stamped=True,
            shape="iteration",
        )
    )


def _factory(
    records: int | None,
    seconds: float | None,
    marks: Callable[[Any], object] | None,
    idle_timeout: float | None,
) -> OperatorFactory:
    if seconds is not None:
        return lambda: TimedStamper(seconds)
    if marks is not None:
        return lambda: Stamper(GroupsUpToMarks(marks), idle_timeout)
    assert records is not None
    return lambda: Stamper(GroupsOf(records), idle_timeout)


def _check_one_of(**ways: Any) -> None:
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        raise GraphError(
            f"epochs_every: expected one of {', '.join(ways)}, given {' and '.join(given) or 'none of them'}; "
            f"{'leave out all but one' if given else 'write epochs_every(stream, records=1000)'}"
        )


def _check_records(records: Any) -> None:
    if records is not None and (isinstance(records, bool) or not isinstance(records, int) or records < 1):
        raise GraphError(
            f"epochs_every: expected records of at least 1, given {records!r}; use a whole number"
        )
